"""Rows that stay where they are computed with: on the device as they are, or as what a frozen trunk made of them. Knows no models."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from unalike.data.samples import Inputs, Samples, Tensors, integer_labels, map_modalities

ROOM = 2**32  # bytes; a larger set stays where it is
AT_ONCE = {
    "cuda": 256,
    "cpu": 8,
}  # rows through the trunk: memory for more than so many a processor asks of the system at each step


class DeviceCache(Samples):
    """Samples in memory, brought to a device as a whole when first read; `look` is what becomes of a batch of inputs there. Where that is
    too large to be kept, rows are brought anew each time."""

    def __init__(self, raw: Tensors, device: str, look: Callable[[Inputs], Inputs] | None = None):
        self.raw, self.device, self.look, self.fits = raw, device, look, True
        self.held: tuple[Inputs, Tensor | None] | None = None

    def __len__(self) -> int:
        return len(self.raw)

    @property
    def shape(self) -> tuple[int, ...] | dict[str, tuple[int, ...]]:
        return self.raw.shape

    def rows(self, index: Tensor) -> tuple[Inputs, Tensor | None]:
        if self.held is None and self.fits:
            first, *rest = torch.arange(len(self.raw)).split(
                AT_ONCE.get(torch.device(self.device).type, 256)
            )
            parts = [self._brought(first)]
            self.fits = size(parts[0][0]) * len(self.raw) <= ROOM * len(first)
            if self.fits:
                parts += [self._brought(few) for few in rest]
                self.held = tree_map(
                    lambda *rows: None if rows[0] is None else torch.cat(rows), *parts
                )
        if self.held is None:
            return self._brought(index.cpu())
        x, y = self.held
        chosen = index.to(self.device, non_blocking=True)
        return map_modalities(x, lambda rows: rows[chosen]), None if y is None else y[chosen]

    def _brought(self, index: Tensor) -> tuple[Inputs, Tensor | None]:
        x, y = self.raw.rows(index)
        x = map_modalities(x, lambda rows: rows.to(self.device))
        return x if self.look is None else self.look(x), None if y is None else integer_labels(
            y
        ).to(self.device)

    def subset(self, index: Tensor) -> "DeviceCache":
        return DeviceCache(self.raw.subset(index), self.device, self.look)


def cache_on_device(
    given: Samples | None, device: str, look: Callable[[Inputs], Inputs] | None = None
) -> Samples | None:
    """The same samples on a GPU, or as `look` sees them anywhere; those read on demand, and too many, as they are."""
    if not isinstance(given, Tensors) or (look is None and torch.device(device).type == "cpu"):
        return given
    bytes = size(map_modalities(given.x, lambda x: x[:1])) * len(given)
    return DeviceCache(given, device, look) if bytes <= ROOM else given


def size(x: Inputs) -> int:
    """Bytes of some rows."""
    return sum(
        part.numel() * part.element_size() for part in (x.values() if isinstance(x, dict) else [x])
    )
