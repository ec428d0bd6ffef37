"""Copies of many tensors with few kernels."""

import torch
from torch import Tensor


@torch.no_grad()
def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target.

    Those of one kind on a GPU are copied at once: torch copies lists of mixed kinds, or of other
    orders in memory, one by one.

    >>> targets = [torch.zeros(2), torch.zeros(1, dtype=torch.int64)]
    >>> copy_all(targets, [torch.ones(2), torch.tensor([3])])
    >>> targets
    [tensor([1., 1.]), tensor([3])]
    """
    if not targets:
        return  # torch refuses an empty list
    if not targets[0].is_cuda:
        torch._foreach_copy_(targets, sources)
        return
    groups: dict[object, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        kind = target.dtype, source.dtype, target.stride() == source.stride()
        own_targets, own_sources = groups.setdefault(kind, ([], []))
        own_targets.append(target)
        own_sources.append(source)
    for own_targets, own_sources in groups.values():
        torch._foreach_copy_(own_targets, own_sources)


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on a device, without waiting for what a GPU computes."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
