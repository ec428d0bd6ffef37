"""Rows that are read on demand are read once."""

import gc

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

import unalike
from unalike.data import row_cache
from unalike.data.row_cache import VERIFIED, equal_items
from unalike.data.samples import Lazy, as_samples


class Counting(Dataset):
    """Counts reads; its rows are noisy if asked."""

    def __init__(self, rows=40, noise=0.0):
        self.reads = 0
        self.rows = rows
        self.noise = noise

    def __len__(self):
        return self.rows

    def __getitem__(self, row):
        self.reads += 1
        return torch.full((6,), float(row)) + self.noise * torch.rand(6), row % 3


def test_a_run_decodes_every_row_once(tmp_path):
    data = [Counting(40), Counting(40)]
    clients = [
        unalike.Client(
            name,
            model=torch.nn.Linear(6, 4),
            task=unalike.Classification(3),
            train=Subset(rows, range(30)),
            test=Subset(rows, range(30, 40)),
        )
        for name, rows in zip("ab", data, strict=True)
    ]
    training = unalike.Training(rounds=4, epochs=2, batch_size=8)
    unalike.run(unalike.FedAvg(), clients, training=training, out=tmp_path / "run")
    for rows in data:
        assert 40 <= rows.reads <= 40 + VERIFIED


def test_kept_rows_are_those_of_the_dataset():
    samples = Lazy(Counting())
    index = torch.tensor([3, 5, 3])
    first = samples.rows(index)
    for _ in range(VERIFIED + 2):
        again = samples.rows(index)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


def test_a_dataset_that_augments_is_read_each_time():
    rows = Counting(noise=1.0)
    samples = Lazy(rows)
    index = torch.arange(40)
    seen = [samples.rows(index)[0] for _ in range(5)]
    assert rows.reads == 200
    for one in range(5):
        for other in range(one):
            assert not torch.equal(seen[one], seen[other])


def test_views_of_a_dataset_share_what_was_read():
    rows = Counting()
    views = [as_samples(Subset(rows, range(20))), as_samples(rows), Lazy(rows)]
    for view in views:
        view.rows(torch.arange(20))
    assert rows.reads <= 20 + VERIFIED


def test_memory_is_limited_and_given_back(monkeypatch):
    gc.collect()
    before = row_cache._kept_bytes
    monkeypatch.setattr(row_cache, "MAX_BYTES", before + 10 * (6 * 4 + 128 + 64))
    rows = Counting()
    samples = Lazy(rows)
    for _ in range(3):
        samples.rows(torch.arange(40))
    assert len(samples.cache.items) == 10
    assert rows.reads >= 3 * 30 + 10
    del samples
    gc.collect()
    assert row_cache._kept_bytes == before


@pytest.mark.parametrize(
    "one, other, equal",
    [
        (({"a": torch.ones(2)}, 1), ({"a": torch.ones(2)}, 1), True),
        (({"a": torch.ones(2)}, 1), ({"a": torch.zeros(2)}, 1), False),
        ([np.ones(2)], [np.ones(2)], True),
        ([np.ones(2)], [np.zeros(2)], False),
        ([1], [1, 2], False),
        (1, 1.0, False),
    ],
)
def test_items_are_compared_by_value(one, other, equal):
    assert equal_items(one, other) == equal
