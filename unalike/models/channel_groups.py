"""A width of a network: units that can be left out, and where they show; and numbers of channels, some of which are one.

Knows neither layers nor operations.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NONE, FIXED = -1, 0  # no channel at all; one that must stay, as those of the input and the output


@dataclass(frozen=True)
class AxisSlice:
    """Where a width shows: an axis of a tensor of the model's state, and the entries of it that each unit has."""

    tensor: str
    axis: int
    entries: Tensor  # (units, entries of each), int64
    is_output: bool  # the tensor makes these units (its rows, their bias and norm), or takes them in (its columns)


@dataclass(frozen=True)
class ChannelGroup:
    """Units that can be left out, each from every place at once."""

    units: int
    slices: tuple[AxisSlice, ...]

    @property
    def name(self) -> str:
        return self.slices[0].tensor


def varies(label: Tensor, axis: int) -> bool:
    return label.shape[axis] > 1 and bool((label != label.narrow(axis, 0, 1)).any())


def pairs(a: Tensor, b: Tensor, count: int) -> Tensor:
    """(2, n): the different pairs in two tensors of numbers that can be broadcast, where both are numbers."""
    coded = (torch.add(a, 1) * (count + 1) + torch.add(b, 1)).unique()
    both = torch.stack([coded // (count + 1), coded % (count + 1)]) - 1
    return both[:, (both > NONE).all(0) & (both[0] != both[1])]


def components(count: int, joined: list[Tensor]) -> Tensor:
    """(count,): a number for each, equal where a chain of pairs joins them."""
    import numpy as np
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    a, b = torch.cat([torch.empty(2, 0, dtype=torch.int64), *joined], 1).numpy()
    return torch.from_numpy(
        connected_components(coo_array((np.ones(len(a)), (a, b)), (count, count)), directed=False)[
            1
        ]
    ).long()
