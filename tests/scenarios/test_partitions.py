"""Partitions: `clients` fixes the rows of a client whoever takes part; test rows match training."""

import pytest
import torch

from unalike.base.errors import UserError
from unalike.data import load_dataset
from unalike.data.partitions import match_label_proportions
from unalike.scenarios import build_clients, parse_scenario


def build(count, clients, **more):
    mapping = {
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
    return build_clients(parse_scenario(mapping, "some")[0])


def rows(count, clients):
    return [client.train.index.tolist() for client in build(count, clients)]


def test_with_clients_set_the_rows_do_not_depend_on_how_many_take_part():
    assert (
        rows(1, {"clients": 3}) == rows(3, {})[:1]
        and rows(2, {"clients": 3}) == rows(3, {"clients": 3})[:2]
    )
    assert len(rows(1, {})[0]) == 1200


@pytest.mark.parametrize(
    "clients, expected",
    [
        (2, "partition.clients   are 2, but 3 take part: raise it or leave it out"),
        (0, "at least 1"),
    ],
)
def test_fewer_sharers_than_clients_are_rejected(clients, expected):
    with pytest.raises(UserError, match=expected):
        rows(3, {"clients": clients})


def shares(samples):
    counts = torch.bincount(samples.labelled_batch(torch.arange(len(samples)))[1], minlength=10)
    return counts / counts.sum()


def test_test_rows_have_the_class_proportions_of_the_training_rows():
    for whole, few in zip(build(3, {}), build(3, {}, test=40)):
        own, spread = (
            shares(whole.train),
            shares(whole.train).max() - shares(whole.train)[shares(whole.train) > 0].min(),
        )
        assert float(spread) > 0.1  # otherwise the test shows nothing
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


def test_classes_without_test_rows_are_left_out():
    chosen = match_label_proportions(
        torch.tensor([0, 0, 0, 2]), torch.tensor([0, 0, 1, 1]), torch.Generator()
    )
    assert sorted(chosen.tolist()) == [0, 1, 2]
    assert not len(match_label_proportions(torch.tensor([2]), torch.tensor([0]), torch.Generator()))
