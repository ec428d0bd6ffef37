"""Partitions: `clients` fixes the rows of a client whoever takes part; test rows match training."""

import re

import pytest
import torch

from unalike.base.errors import UserError
from unalike.data import DATASETS, Table, load_dataset
from unalike.data.partitions import match_label_proportions
from unalike.runs import run_scenario
from unalike.scenarios import build_clients, load, parse_scenario
from unalike.tasks import Classification


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


def sorted_table(folder=None):
    """300 rows sorted by class: 200 of the first, 80 of the second and 20 of the third."""
    y = torch.tensor([0] * 200 + [1] * 80 + [2] * 20)
    even = torch.arange(300) % 2 == 0
    return Table(
        x=torch.arange(300.0)[:, None],
        targets={"kind": y},
        tasks={"kind": Classification(3)},
        train=torch.arange(300)[even],
        test=torch.arange(300)[~even],
    )


def limited(**group):
    mapping = {
        "name": "limits",
        "algorithm": {"name": "local"},
        "data": {"name": "sorted"},
        "clients": [{"id": "c", "count": 2, "model": {"name": "mlp"}, **group}],
    }
    return build_clients(parse_scenario(mapping, "limits")[0])


def counts(samples):
    y = samples.labelled_batch(torch.arange(len(samples)))[1]
    return torch.bincount(y, minlength=3).tolist()


def test_a_limited_test_set_of_a_sorted_table_has_every_class_in_proportion(monkeypatch):
    monkeypatch.setitem(DATASETS, "sorted", sorted_table)
    first, second = limited(test=30)
    assert counts(first.test) == [20, 8, 2]
    assert first.test.index.tolist() == second.test.index.tolist()
    assert first.test.index.tolist() != limited()[0].test.index[:30].tolist()
    assert len(set(first.test.index.tolist())) == 30
    assert len(limited(test=1000)[0].test) == 150


def test_a_limited_training_set_of_a_sorted_table_is_drawn_at_random(monkeypatch):
    monkeypatch.setitem(DATASETS, "sorted", sorted_table)
    drawn = counts(limited(train=60)[0].train)
    assert 30 <= drawn[0] <= 50 and drawn[1] and drawn[2]


def test_a_client_that_a_partition_gives_fewer_rows_than_train_is_announced(tmp_path):
    scenario, algorithm = load(
        "digits",
        "local",
        settings=[
            "training.rounds=1",
            "alone=false",
            "data.partition={name: dirichlet, alpha: 0.05, by: digit}",
            "clients.ada.train=390",
        ],
    )
    events = []

    def watch(event, **facts):
        events.append((event, facts.get("text")))

    run_scenario(scenario, algorithm, out=tmp_path / "run", watch=watch)
    place = events.index(("notice", next(text for event, text in events if event == "notice")))
    assert re.fullmatch(
        r"ada has \d+ training rows, its train asks for 390: "
        "the partition dirichlet gave it no more",
        events[place][1],
    )
    assert ("round", None) in events[place:] and ("round", None) not in events[:place]
