"""Channel groups: units of a network that can be removed, and where they occur in its tensors.

Also operations on channel numbers, some of which denote the same channel. Knows no layers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NONE = -1  # no channel
FIXED = 0  # a channel that must stay, such as those of the input and the output


@dataclass(frozen=True)
class AxisSlice:
    """Where a channel group occurs: an axis of a tensor of the model's state, and its entries."""

    tensor: str
    axis: int
    entries: Tensor  # (units, entries per unit), int64
    is_output: bool  # the tensor produces the units (rows, bias, norm); False: it consumes them


@dataclass(frozen=True)
class ChannelGroup:
    """Units that can be removed, each from all slices at once."""

    units: int
    slices: tuple[AxisSlice, ...]

    @property
    def name(self) -> str:
        return self.slices[0].tensor


def varies(label: Tensor, axis: int) -> bool:
    """Whether channel numbers differ along an axis."""
    return label.shape[axis] > 1 and bool((label != label.narrow(axis, 0, 1)).any())


def distinct_pairs(a: Tensor, b: Tensor, count: int) -> Tensor:
    """The different pairs of unequal channel numbers at the same place of `a` and `b`, (2, n).

    The tensors are broadcast; pairs with NONE are left out. Numbers are below `count`.
    """
    codes = (torch.add(a, 1) * (count + 1) + torch.add(b, 1)).unique()
    both = torch.stack([codes // (count + 1), codes % (count + 1)]) - 1
    return both[:, (both > NONE).all(0) & (both[0] != both[1])]


def connected_components(count: int, pairs: list[Tensor]) -> Tensor:
    """A component number (count,) for each channel number, equal where pairs (2, n) link them."""
    import numpy as np
    from scipy.sparse import coo_array, csgraph

    a, b = torch.cat([torch.empty(2, 0, dtype=torch.int64), *pairs], 1).numpy()
    graph = coo_array((np.ones(len(a)), (a, b)), (count, count))
    return torch.from_numpy(csgraph.connected_components(graph, directed=False)[1]).long()
