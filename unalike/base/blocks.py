"""Tensors of several clients in one block of memory: work on all of them is one operation.

A block has a first axis of clients. Its rows are ordinary tensors, which remember their block.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

ATTRIBUTE = "_row_of"  # of a tensor: its block and its number there


@torch.no_grad()
def split_block(block: Tensor) -> list[Tensor]:
    """The rows of a block, (clients, ...); they share its memory."""
    # Detached: as views they could not be changed where gradients are recorded.
    rows = [row.detach() for row in block.unbind()]
    for number, row in enumerate(rows):
        row._row_of = block, number  # type: ignore[attr-defined]
    return rows


def find_block(tensors: Sequence[Tensor]) -> Tensor | None:
    """A tensor (n, ...) with these n tensors as rows, if they are rows of one block; else None.

    It shares their memory if they are the whole block in its order, and is a copy if not.

    >>> block = torch.arange(6).reshape(3, 2)
    >>> rows = split_block(block)
    >>> find_block(rows) is block, find_block([rows[2], rows[0]]).tolist(), find_block([block[0]])
    (True, [[4, 5], [0, 1]], None)
    """
    places = [getattr(tensor, ATTRIBUTE, None) for tensor in tensors]
    if not places or places[0] is None:
        return None
    block = places[0][0]
    if any(place is None or place[0] is not block for place in places):
        return None
    numbers = [place[1] for place in places]  # type: ignore[index]
    if numbers == list(range(len(block))):
        return block
    return block[torch.tensor(numbers, device=block.device)]


def find_blocks(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor] | None:
    """The block of each name, as `find_block` gives it, if all tensors are rows of blocks."""
    blocks: dict[str, Tensor] = {}
    if not states or any(state.keys() != states[0].keys() for state in states):
        return None
    for name in states[0]:
        block = find_block([state[name] for state in states])
        if block is None:
            return None
        blocks[name] = block
    return blocks
