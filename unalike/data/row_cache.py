"""Rows of a dataset that were read once and are kept, so that a file is decoded once.

Datasets that augment at random give another row each time: these are found out and not kept.
"""

from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

MAX_BYTES = 2**31  # of all kept rows of this process; further ones are read each time
VERIFIED = 16  # rows that are read twice and compared before kept ones are trusted

_caches: WeakValueDictionary[int, "RowCache"] = WeakValueDictionary()
_kept_bytes = 0  # of all caches


class RowCache:
    """Reads rows of one dataset and keeps what it read, within a limit for the whole process.

    The first rows that are requested again are read again and compared. If one of them differs,
    the dataset is random and nothing is kept.
    """

    def __init__(self, dataset: Dataset):
        self.dataset = dataset
        self.items: dict[int, Any] = {}
        self.bytes = 0
        self.keeps = True
        self.verified: set[int] = set()

    def __getitem__(self, row: int) -> Any:
        if row not in self.items:
            item = self.dataset[row]
            self.keep(row, item)
            return item
        if row in self.verified or len(self.verified) >= VERIFIED:
            return self.items[row]
        item = self.dataset[row]
        self.verified.add(row)
        if not equal_items(item, self.items[row]):
            self.forget()
        return item

    def room(self, row: int) -> int:
        """How many further rows can be kept, if they are as large as kept ones, or as `row`."""
        if not self.keeps:
            return 0
        if not self.items:
            _ = self[row]
        size = max(self.bytes // max(len(self.items), 1), 1)
        return (MAX_BYTES - _kept_bytes) // size

    def keep(self, row: int, item: Any) -> None:
        """Keep a row that was read, if there is room."""
        global _kept_bytes
        size = item_bytes(item)
        if self.keeps and _kept_bytes + size <= MAX_BYTES:
            self.items[row] = item
            self.bytes += size
            _kept_bytes += size

    def forget(self) -> None:
        """Drop all rows and keep none from now on."""
        global _kept_bytes
        _kept_bytes -= self.bytes
        self.items = {}
        self.bytes = 0
        self.keeps = False

    def __del__(self) -> None:
        self.forget()


def cache_of(dataset: Dataset) -> RowCache:
    """The cache of a dataset, one for all samples that read from it."""
    cache = _caches.get(id(dataset))
    if cache is None:  # a cache holds its dataset: while it exists no other can have this id
        cache = RowCache(dataset)
        _caches[id(dataset)] = cache
    return cache


def equal_items(one: Any, other: Any) -> bool:
    """Whether two items of a dataset hold the same values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal_items(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(equal_items(a, b) for a, b in pairs)
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return bool(one == other)


def item_bytes(item: Any) -> int:
    """About the memory that an item takes."""
    if isinstance(item, dict):
        return sum(map(item_bytes, item.values()))
    if isinstance(item, list | tuple):
        return sum(map(item_bytes, item))
    if isinstance(item, Tensor | np.ndarray):
        return item.nbytes + 128
    return 64
