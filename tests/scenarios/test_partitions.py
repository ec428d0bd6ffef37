"""Rows dealt out: among more clients than take part, so that those who do hold the same with fewer others; and what each is tested on."""

import pytest
import torch

from unalike.base.errors import UserError
from unalike.data import load_dataset
from unalike.data.partitions import match_label_proportions
from unalike.scenarios import build_clients, parse_scenario


def some(count, clients, **more):
    told = {
        "name": "some",
        "algorithm": {"name": "local"},
        "data": {
            "name": "digits",
            "partition": {"name": "dirichlet", "alpha": 0.1, "by": "digit"} | clients,
        },
        "clients": [
            {"id": f"c{i}", "model": {"name": "mlp"}, "target": "digit", **more}
            for i in range(count)
        ],
    }
    return build_clients(parse_scenario(told, "some")[0])


def rows(count, clients):
    return [client.train.index.tolist() for client in some(count, clients)]


def test_fewer_clients_hold_what_they_would_among_more():
    assert (
        rows(1, {"clients": 3}) == rows(3, {})[:1]
        and rows(2, {"clients": 3}) == rows(3, {"clients": 3})[:2]
    )
    assert len(rows(1, {})[0]) == 1200


@pytest.mark.parametrize(
    "clients, said",
    [
        (2, "partition.clients   are 2, but 3 take part: raise it or leave it out"),
        (0, "at least 1"),
    ],
)
def test_too_few_to_share(clients, said):
    with pytest.raises(UserError, match=said):
        rows(3, {"clients": clients})


def shares(samples):
    counts = torch.bincount(samples.labelled_batch(torch.arange(len(samples)))[1], minlength=10)
    return counts / counts.sum()


def test_a_client_is_tested_on_its_classes_in_its_proportions():
    for whole, few in zip(some(3, {}), some(3, {}, test=40)):
        own, spread = (
            shares(whole.train),
            shares(whole.train).max() - shares(whole.train)[shares(whole.train) > 0].min(),
        )
        assert float(spread) > 0.1  # or nothing is shown
        assert float((shares(whole.test) - own).abs().max()) < 1 / len(whole.test) * 5
        assert len(few.test) == 40 and set(few.test.index.tolist()) <= set(
            whole.test.index.tolist()
        )
        counts = torch.bincount(
            whole.test.labelled_batch(torch.arange(len(whole.test)))[1], minlength=10
        )
        everything = torch.bincount(
            load_dataset("digits").targets["digit"][load_dataset("digits").test],
            minlength=10,
        )
        assert bool((counts == everything)[own > 0].any())  # no more rows could be had


def test_a_class_the_test_rows_lack_is_left_out():
    chosen = match_label_proportions(
        torch.tensor([0, 0, 0, 2]), torch.tensor([0, 0, 1, 1]), torch.Generator()
    )
    assert sorted(chosen.tolist()) == [0, 1, 2]
    assert not len(match_label_proportions(torch.tensor([2]), torch.tensor([0]), torch.Generator()))
