"""Rows that are read on demand are read once."""

import gc
import multiprocessing
import os

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

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


class Telling(Dataset):
    """Rows that say which process read them."""

    def __len__(self):
        return 24

    def __getitem__(self, row):
        return torch.tensor([float(row), float(os.getpid())]), row % 3


def readers(samples, order):
    """The processes that read each row, read in this order and checked."""
    found = []
    for index in order:
        x, y = samples.rows(index)
        assert torch.equal(x[:, 0], index.float()) and torch.equal(y, index % 3)
        found += x[:, 1].int().tolist()
    return set(found)


def test_the_workers_of_a_data_loader_read_ahead_what_will_be_needed():
    samples = as_samples(DataLoader(Telling(), num_workers=2))
    order = [torch.tensor([5, 7, 1]), torch.tensor([2, 9]), torch.tensor([4])]
    samples.read_ahead(order)
    assert os.getpid() not in readers(samples, order)
    samples.read_ahead([torch.tensor([20])])
    assert readers(samples, [torch.tensor([21])]) == {os.getpid()}  # not what was announced


def test_a_run_whose_rows_are_read_by_workers_ends_as_one_without(tmp_path, toys):
    ends = []
    for workers in (0, 1):
        loader = DataLoader(Counting(20), num_workers=workers)
        client = toys.client("a", dtype=torch.float32, train=loader, test=Counting(8))
        toys.execute(tmp_path / str(workers), toys.method("fedavg"), [client], rounds=2, epochs=2)
        ends.append(toys.states(tmp_path / str(workers)))
        if workers:
            assert loader.dataset.reads < 20  # the rest was read by another process
    assert toys.apart(*ends) == 0.0


def test_rows_beyond_the_limit_are_read_ahead_in_every_epoch(monkeypatch):
    samples = as_samples(DataLoader(Telling(), num_workers=1))
    monkeypatch.setattr(row_cache, "MAX_BYTES", row_cache._kept_bytes)
    order = [torch.tensor([3, 4]), torch.tensor([5, 3]), torch.tensor([4, 3])]
    samples.read_ahead(order)
    assert os.getpid() not in readers(samples, order)
    assert not samples.cache.items


def test_a_process_that_may_have_no_children_reads_by_itself(monkeypatch):
    samples = as_samples(DataLoader(Telling(), num_workers=1))
    monkeypatch.setattr(multiprocessing.current_process(), "_config", {"daemon": True})
    samples.read_ahead([torch.tensor([3])])
    assert readers(samples, [torch.tensor([3])]) == {os.getpid()}
