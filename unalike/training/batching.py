"""Row numbers in batches, and row sets of unequal length in one tensor."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def batches(
    rows: int, batch_size: int, generator: torch.Generator | None = None
) -> Iterator[Tensor]:
    """Row numbers 0 .. rows - 1 in batches, shuffled if a generator is passed.

    A last batch of one row is merged into the batch before it, because batch normalisation needs
    at least two rows.

    >>> [len(b) for b in batches(9, 4)], [len(b) for b in batches(10, 4)]
    ([4, 5], [4, 4, 2])
    """
    order = torch.arange(rows) if generator is None else torch.randperm(rows, generator=generator)
    start = 0
    for length in batch_lengths(rows, batch_size):
        yield order[start : start + length]
        start += length


def batch_lengths(rows: int, batch_size: int) -> list[int]:
    """How many rows each batch of `batches` has.

    >>> batch_lengths(9, 4), batch_lengths(10, 4), batch_lengths(0, 4)
    ([4, 5], [4, 4, 2], [])
    """
    starts = list(range(0, rows, batch_size))
    if len(starts) > 1 and rows - starts[-1] == 1:
        starts.pop()
    # not strict: without rows there are no starts, and no batches
    return [end - start for start, end in zip(starts, [*starts[1:], rows], strict=False)]


def pad_and_mask(row_sets: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Stack row sets of unequal length, one per client, into one zero-padded tensor.

    Args:
        row_sets: tensors (rows_i, ...), equal but for the number of rows.
    Returns: rows (clients, longest, ...), and a mask (clients, longest) of the rows' dtype:
        1 for rows, 0 for padding.

    >>> pad_and_mask([torch.ones(2, 3), torch.ones(1, 3)])[1]
    tensor([[1., 1.],
            [1., 0.]])
    """
    longest = max(len(rows) for rows in row_sets)
    masks = [torch.arange(longest, device=rows.device) < len(rows) for rows in row_sets]
    mask = torch.stack(masks).to(row_sets[0].dtype)
    if all(len(rows) == longest for rows in row_sets):
        return torch.stack(list(row_sets)), mask
    return torch.nn.utils.rnn.pad_sequence(list(row_sets), batch_first=True), mask
