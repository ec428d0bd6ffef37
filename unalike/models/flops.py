"""Floating-point operations of a forward pass."""

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from unalike.models.tracing import unfused_eval


def count_flops(model: nn.Module, x: Tensor | dict) -> int:
    """Floating-point operations of a forward pass over the rows `x`, as torch counts them."""
    counter = FlopCounterMode(display=False)
    # with gradients: without them the counter fails on views of parameters
    with unfused_eval(model), torch.enable_grad(), counter:
        model(x)
    return counter.get_total_flops()
