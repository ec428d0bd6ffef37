"""Rows of a dataset that worker processes read ahead of whoever needs them."""

import multiprocessing
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset


@dataclass(frozen=True)
class Reading:
    """How rows of a dataset are read.

    Attributes:
        workers: processes that read; 0: nothing is read ahead.
        prefetch: batches that each of them reads ahead.
    """

    workers: int = 0
    prefetch: int = 2

    @property
    def ahead(self) -> bool:
        """Whether this process can have others read: a daemon may not start any."""
        return self.workers > 0 and not multiprocessing.current_process().daemon

    @classmethod
    def of(cls, loader: DataLoader) -> "Reading":
        """As a DataLoader reads: its `num_workers` and `prefetch_factor`."""
        return cls(loader.num_workers, loader.prefetch_factor or cls.prefetch)


class ReadAhead:
    """Batches of rows in the order of a plan, read by worker processes.

    Args:
        dataset: map-style.
        plan: row numbers of each batch.
        reading: with one worker or more.
    """

    def __init__(self, dataset: Dataset, plan: Sequence[list[int]], reading: Reading):
        self.plan = deque(plan)
        loader: DataLoader = DataLoader(
            dataset,
            batch_sampler=list(plan),
            num_workers=reading.workers,
            prefetch_factor=reading.prefetch,
            collate_fn=by_value,
            generator=torch.Generator().manual_seed(0),  # else a number of the caller's is drawn
        )
        self.batches: Iterator[list[Any]] = iter(loader)

    def take(self, rows: list[int]) -> list[Any] | None:
        """The items of the next batch, if it is these rows; else None, and the plan is void."""
        if not self.plan or self.plan.popleft() != rows:
            self.plan.clear()
            return None
        return tree_map(as_read, next(self.batches))


@dataclass(frozen=True)
class Numbers:
    """A tensor that goes from process to process by value."""

    array: np.ndarray


def by_value(items: list[Any]) -> list[Any]:
    """Items whose tensors are no files in shared memory: kept rows would hold thousands open."""
    return tree_map(_numbers, items)


def _numbers(value: Any) -> Any:
    is_plain = isinstance(value, Tensor) and value.dtype != torch.bfloat16
    return Numbers(value.detach().numpy()) if is_plain else value


def as_read(value: Any) -> Any:
    """A part of an item as the dataset gave it."""
    if isinstance(value, Numbers):
        return torch.from_numpy(value.array)
    return value.clone() if isinstance(value, Tensor) else value
