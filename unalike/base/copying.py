"""Copies of many tensors with few kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target.

    Tensors of one kind are copied at once; torch copies lists of mixed kinds or of other orders in
    memory one by one.

    >>> targets = [torch.zeros(2), torch.zeros(1, dtype=torch.int64)]
    >>> copy_all(targets, [torch.ones(2), torch.tensor([3])])
    >>> targets
    [tensor([1., 1.]), tensor([3])]
    """
    groups: dict[object, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        same_order = target.stride() == source.stride()
        kind = target.dtype, target.device, source.dtype, source.device, same_order
        own_targets, own_sources = groups.setdefault(kind, ([], []))
        own_targets.append(target)
        own_sources.append(source.detach())
    for own_targets, own_sources in groups.values():
        torch._foreach_copy_(own_targets, own_sources)
