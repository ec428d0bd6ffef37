"""Public rows come from one or several datasets and are nobody's labelled rows."""

import pytest
import torch

from unalike import Classification
from unalike.base.errors import UserError
from unalike.data import DATASETS, Table
from unalike.scenarios import build_clients, build_server, parse_scenario


def pictures(first, program, rows=60, channels=3):
    """A loader of images, the i-th of which has brightness `first + i` everywhere."""

    def load(folder=None) -> Table:
        numbers = torch.arange(first, first + rows, dtype=torch.uint8)
        return Table(
            x=numbers.reshape(-1, 1, 1, 1).expand(-1, channels, program, program).contiguous(),
            train=torch.arange(rows - 10),
            test=torch.arange(rows - 10, rows),
            targets={"thing": torch.arange(rows) % 2},
            tasks={"thing": Classification(("even", "odd"))},
        )

    return load


@pytest.fixture
def build(monkeypatch):
    for name, load in {
        "low": pictures(0, 8),
        "high": pictures(100, 12),
        "grey": pictures(0, 8, channels=1),
    }.items():
        monkeypatch.setitem(DATASETS, name, load)

    def build_one(public, **top):
        mapping = {
            "name": "some",
            "algorithm": {"name": "fedmuscle", "peers": 1, "batch": 4},
            "data": {"name": "low"},
            "public": public,
            "clients": [
                {"id": "a", "model": {"name": "cnn"}, "train": 20},
                {"id": "b", "model": {"name": "cnn"}, "train": 20},
                {"id": "c", "model": {"name": "cnn"}, "train": 20, "data": {"name": "high"}},
            ],
            **top,
        }
        scenario, _ = parse_scenario(mapping, "some")
        build_server(scenario)
        return build_clients(scenario)

    return build_one


def numbers(samples):
    return samples.rows(torch.arange(len(samples)))[0][:, 0, 0, 0].tolist()


def test_one_name_is_the_same_as_a_list_of_one(build):
    unnamed, one, same = (
        build({"size": 9, **data})[0].public for data in ({}, {"data": "low"}, {"data": ["low"]})
    )
    assert numbers(unnamed) == numbers(one) == numbers(same) and one.shape == (3, 8, 8)


def test_several_datasets_give_equally_many_rows_and_no_labelled_ones(build):
    clients = build({"size": 11, "data": ["low", "high"]})
    public = numbers(clients[0].public)
    assert (
        sum(n < 100 for n in public) == 6
        and len(public) == len(set(public)) == 11
        and clients[0].public.shape == (3, 12, 12)
    )
    assert all(client.public is clients[0].public for client in clients)
    assert not set(public) & {
        n for client in clients for n in (*numbers(client.train), *numbers(client.test))
    }
    assert public == numbers(build({"size": 11, "data": ["low", "high"]})[0].public)
    assert public != numbers(build({"size": 11, "data": ["low", "high"]}, seed=1)[0].public)


SERVER = {"id": "server", "model": {"name": "cnn"}}


@pytest.mark.parametrize(
    ("public", "top", "expected"),
    [
        (
            {"data": ["low", "hihg"]},
            {},
            r'public.data +There is no dataset "hihg". Did you mean "high"\?',
        ),
        ({"data": ["low", "high", "low"]}, {}, 'public.data +"low" is listed twice.'),
        ({"data": []}, {}, r"1 problem in some\n +public.data +must be a list of 1 or more"),
        ({"data": 5}, {}, r"1 problem in some\n +public.data +must be a list"),
        (
            {"data": ["low", "grey"]},
            {},
            "public.data +rows of low are pictures of 3 channels in uint8, those of grey "
            "pictures of 1 channel in",
        ),
        ({"data": ["hihg", "hihg"]}, {}, "1 problem in some"),
        (
            {"data": ["low", 5], "size": 1000},
            {},
            r"1 problem in some\n +public.data.1 +must be text, got 5",
        ),
        (
            {"data": ["low", "high"], "size": 99},
            {},
            "public.size +must be below 50, the training rows of low: some stay labelled, got "
            "99, of which 50 are of low.",
        ),
        (
            {"data": ["low", "high"], "size": 102},
            {},
            r"of which 51 are of low.\n +public.size .* got 102, of which 51 are of high.",
        ),
        (
            {"data": ["low", "high"], "size": 1},
            {},
            "public.size +there are 2 public datasets: must be at least 2, got 1.",
        ),
        (
            {"data": ["low", "high"], "options": {"broken": "skip"}},
            {},
            r"1 problem in some\n +public.options +there are 2 public datasets, and options",
        ),
        (
            {"data": ["low", "high"]},
            {"server": SERVER},
            "server +learns from one dataset, and there are 2 public datasets",
        ),
    ],
)
def test_invalid_public_sets_are_reported(build, public, top, expected):
    with pytest.raises(UserError, match=expected):
        build({"size": 8} | public, **top)
