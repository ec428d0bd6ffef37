"""Every partition gives each row to exactly one client, and the same draws give the same parts."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unalike.data.partitions import (
    PARTITIONS,
    apart,
    by_cluster,
    dirichlet,
    draw_proportions,
    iid,
    multilabel_dirichlet,
    numpy_generator,
    shards,
)

CALLS = {
    "iid": lambda n, clients, g: iid(n, clients, g),
    "dirichlet": lambda n, clients, g: dirichlet(torch.arange(n) % 7, clients, 0.3, g),
    "shards": lambda n, clients, g: shards(torch.arange(n) % 7, clients, 2, g),
    "apart": lambda n, clients, g: apart(torch.arange(n) % 3, clients, g),
    "multilabel_dirichlet": lambda n, clients, g: multilabel_dirichlet(bits(n), clients, 0.3, g),
    "by_cluster": lambda n, clients, g: by_cluster(
        torch.rand(n, 3, generator=seeded(5)), clients, g
    ),
}


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def bits(rows, labels=5, share=0.3, seed=3):
    return (torch.rand(rows, labels, generator=seeded(seed)) < share).float()


def complete(parts, rows):
    return torch.equal(torch.cat(parts).sort().values, torch.arange(rows))


def histograms(y, parts):
    """(clients, classes): each client's share of every class."""
    y = y if y.ndim == 2 else torch.nn.functional.one_hot(y).double()
    return torch.stack([y[part].double().sum(0) for part in parts]) / y.double().sum(0)


def test_every_partition_is_tried_here():
    assert CALLS.keys() == PARTITIONS.keys()


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(clients=st.integers(1, 8), more=st.integers(0, 60), seed=st.integers(0, 2**31))
def test_disjoint_complete_repeatable_and_no_client_empty(name, clients, more, seed):
    rows = 2 * clients + more
    parts = CALLS[name](rows, clients, seeded(seed))
    assert len(parts) == clients and complete(parts, rows)
    assert all(len(part) for part in parts) and all(part.dtype == torch.int64 for part in parts)
    again = CALLS[name](rows, clients, seeded(seed))
    assert all(torch.equal(a, b) for a, b in zip(parts, again))


@pytest.mark.parametrize("name", [name for name in CALLS if name != "by_cluster"])
def test_another_state_gives_other_parts_and_the_global_seed_is_left_alone(name):
    before = torch.get_rng_state()
    generator = seeded(0)
    first, second = CALLS[name](200, 4, generator), CALLS[name](200, 4, generator)
    assert any(not torch.equal(a, b) for a, b in zip(first, second))
    assert torch.equal(before, torch.get_rng_state())


def test_iid_takes_sizes():
    parts = iid(10, [7, 0, 3], seeded(0))
    assert [len(part) for part in parts] == [7, 0, 3] and complete(parts, 10)


@pytest.mark.parametrize("share", [dirichlet, multilabel_dirichlet])
def test_large_alpha_is_near_iid_and_small_alpha_is_skewed(share):
    y = torch.arange(2000) % 10 if share is dirichlet else bits(2000)
    even = histograms(y, share(y, 5, 1e6, seeded(0)))
    skewed = histograms(y, share(y, 5, 0.02, seeded(0)))
    assert (even - 0.2).abs().max() < 0.02
    assert skewed.max(0).values.mean() > (
        0.8 if share is dirichlet else 0.6
    )  # one client holds most of a class
    assert (skewed.max(0).values > even.max(0).values).all()


def test_tiny_alpha_still_works():
    y = torch.arange(300) % 10
    parts = dirichlet(y, 20, 1e-5, seeded(1), minimum=3)
    assert complete(parts, 300) and min(map(len, parts)) >= 3


def test_rows_moved_to_reach_the_minimum_are_logged(caplog):
    caplog.set_level("INFO")
    dirichlet(torch.zeros(50, dtype=torch.int64), 10, 0.01, seeded(0), minimum=2)
    assert "at least 2" in caplog.text


def test_shards_give_few_classes_and_even_sizes():
    y = (torch.arange(1000) % 10)[torch.randperm(1000, generator=seeded(1))]
    parts = shards(y, 5, 2, seeded(0))
    assert all(len(part) == 200 and len(y[part].unique()) == 2 for part in parts)


def test_rows_without_labels_are_shared_too():
    y = torch.zeros(100, 3)
    parts = multilabel_dirichlet(y, 4, 1e6, seeded(0))
    assert [len(part) for part in parts] == [25] * 4


def test_labels_follow_the_drawn_proportions_when_rows_carry_one_each():
    y = torch.nn.functional.one_hot(torch.arange(600) % 3).float()
    draws = numpy_generator(seeded(4))  # the proportions are drawn first, label by label
    drawn = torch.from_numpy(np.stack([draw_proportions(draws, 4, 0.5) for _ in range(3)], 1))
    shares = histograms(y, multilabel_dirichlet(y, 4, 0.5, seeded(4)))
    assert (shares - drawn).abs().max() < 0.011


def test_labels_are_withheld_from_clients():
    y = torch.nn.functional.one_hot(torch.arange(900) % 9).float()
    shares = histograms(y, multilabel_dirichlet(y, 6, 5.0, seeded(0), missing=4))
    assert ((shares == 0).sum(1) >= 4).all() and (shares.sum(0) == 1).all()
    every = histograms(y, multilabel_dirichlet(y, 3, 5.0, seeded(0), missing=8))
    assert (every.sum(0) == 1).all(), "every label stays with somebody"


def test_rows_that_fit_nowhere_go_where_least_is_withheld(caplog):
    caplog.set_level("INFO")
    y = torch.zeros(200, 4)
    y[:, 0] = y[:20, 1] = 1  # the first 20 carry both
    y[20:40, 2] = y[40:60, 3] = 1
    parts = multilabel_dirichlet(y, 2, 1.0, seeded(3), missing=2)
    assert complete(parts, 200) and "no client might hold together" in caplog.text
    many = (torch.rand(800, 10, generator=seeded(1)) < 0.15).float()
    held = histograms(many, multilabel_dirichlet(many, 6, 1.0, seeded(0), missing=3))
    assert ((held == 0).sum(1) >= 3).sum() >= 3, "few clients take what fits nowhere"


def test_clusters_are_found():
    truth = torch.arange(90) % 3
    features = 10 * torch.eye(3)[truth] + torch.randn(90, 3, generator=seeded(0))
    parts = by_cluster(features, 3, seeded(0))
    assert all(len(truth[part].unique()) == 1 and len(part) == 30 for part in parts)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda g: iid(3, 5, g), "3 rows cannot give 5 clients"),
        (lambda g: iid(3, 0, g), "clients must be 1 or more"),
        (lambda g: iid(10, [3, 3], g), "sum to that, got"),
        (
            lambda g: dirichlet(torch.arange(9), 2, 0.0, g),
            "alpha must be above 0 and finite, got 0.0",
        ),
        (lambda g: dirichlet(torch.arange(9), 2, float("inf"), g), "got inf"),
        (lambda g: dirichlet(torch.rand(9), 2, 1.0, g), "whole-number label"),
        (
            lambda g: dirichlet(torch.arange(9), 5, 1.0, g, minimum=2),
            "9 rows cannot give 5 clients at least 2",
        ),
        (lambda g: shards(torch.arange(9), 5, 2, g), "9 rows cannot give 5 clients at least 2"),
        (lambda g: multilabel_dirichlet(torch.arange(9), 2, 1.0, g), r"\(n, labels\), got \(9,\)"),
        (
            lambda g: multilabel_dirichlet(bits(9), 2, 1.0, g, missing=5),
            "fewer than the 5 there are, got 5",
        ),
        (lambda g: by_cluster(torch.zeros(9), 2, g), r"\(n, width\), got \(9,\)"),
        (
            lambda g: by_cluster(torch.zeros(9, 2), 2, g),
            "1 distinct rows are too few for 2 clients",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call(seeded(0))
