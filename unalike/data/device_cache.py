"""Samples kept on the device that computes with them, as they are or after a frozen trunk."""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from unalike.data.samples import (
    Inputs,
    InputShape,
    Samples,
    Tensors,
    integer_labels,
    map_modalities,
)

MAX_BYTES = 2**32  # larger sets are not cached
# Rows passed through the trunk at once. With fewer than 16, PyTorch takes a slow convolution on one
# thread of a CPU; with more, memory is allocated anew at every step.
CHUNK = {"cuda": 256, "cpu": 16}


class DeviceCache(Samples):
    """Samples in memory that are moved to a device as a whole when first read.

    If the result is too large to be kept, rows are moved each time they are read.

    Args:
        transform: applied to inputs on the device, such as an encoder's frozen trunk.
    """

    def __init__(
        self, raw: Tensors, device: str, transform: Callable[[Inputs], Inputs] | None = None
    ):
        self.raw = raw
        self.device = device
        self.transform = transform
        self.fits = True
        self.cache: tuple[Inputs, Tensor | None] | None = None

    def __len__(self) -> int:
        return len(self.raw)

    @property
    def shape(self) -> InputShape:
        return self.raw.shape

    def rows(self, index: Tensor) -> tuple[Inputs, Tensor | None]:
        if self.cache is None and self.fits:
            self._fill()
        if self.cache is None:
            return self._compute(index.cpu())
        x, y = self.cache
        if is_every_row(index, len(self)):  # a copy takes less than looking rows up
            return map_modalities(x, torch.clone), None if y is None else y.clone()
        chosen = index.to(self.device, non_blocking=True)
        return map_modalities(x, lambda rows: rows[chosen]), None if y is None else y[chosen]

    def all_rows(self) -> tuple[Inputs, Tensor | None]:
        """Every row, in order, not to be changed."""
        if self.cache is None and self.fits:
            self._fill()
        return self._compute(torch.arange(len(self))) if self.cache is None else self.cache

    def _fill(self) -> None:
        """Compute all rows, unless the first chunk shows that they do not fit."""
        if self.transform is None:  # `cache_on_device` looked at their size
            x, y = self.raw.all_rows()
            x = map_modalities(x, lambda rows: rows.to(self.device, non_blocking=True))
            self.cache = x, None if y is None else y.to(self.device, non_blocking=True)
            return
        first, *others = torch.arange(len(self.raw)).split(chunk_rows(self.device))
        parts = [self._compute(first)]
        self.fits = byte_count(parts[0][0]) * len(self.raw) <= MAX_BYTES * len(first)
        if self.fits:
            parts += [self._compute(index) for index in others]
            self.cache = tree_map(
                lambda *rows: None if rows[0] is None else torch.cat(rows), *parts
            )

    def _compute(self, index: Tensor) -> tuple[Inputs, Tensor | None]:
        x, y = self.raw.rows(index)
        x = map_modalities(x, lambda rows: rows.to(self.device))
        if self.transform is not None:
            x = self.transform(x)
        return x, None if y is None else integer_labels(y).to(self.device)

    def subset(self, index: Tensor) -> "DeviceCache":
        return DeviceCache(self.raw.subset(index), self.device, self.transform)


def cache_on_device(
    samples: Samples | None, device: str, transform: Callable[[Inputs], Inputs] | None = None
) -> Samples | None:
    """The samples cached on a GPU, or with a transform on any device.

    Samples that are read on demand or too large are returned unchanged.
    """
    on_cpu = torch.device(device).type == "cpu"
    if not isinstance(samples, Tensors) or (transform is None and on_cpu):
        return samples
    one_row = map_modalities(samples.x, lambda x: x[:1])
    fits = byte_count(one_row) * len(samples) <= MAX_BYTES
    return DeviceCache(samples, device, transform) if fits else samples


@lru_cache(64)
def row_numbers(count: int) -> Tensor:
    return torch.arange(count)


def is_every_row(index: Tensor, count: int) -> bool:
    """Whether these are the numbers of all rows, in order; one on a GPU is not looked at."""
    same_size = len(index) == count and not index.is_cuda and index.dtype == torch.int64
    return same_size and torch.equal(index, row_numbers(count))


def chunk_rows(device: str) -> int:
    """Rows that a frozen trunk takes at once."""
    return CHUNK.get(torch.device(device).type, 256)


def byte_count(x: Inputs) -> int:
    """Bytes of inputs."""
    parts = x.values() if isinstance(x, dict) else [x]
    return sum(part.numel() * part.element_size() for part in parts)
