"""Layers whose output in training depends on chance or on running statistics."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd


def is_stochastic(model: nn.Module) -> bool:
    """Whether a forward pass in training draws random numbers or updates running statistics.

    Such a pass differs from call to call, so it can be neither stacked nor captured in a CUDA
    graph. Dropout layers that are not torch's own (stochastic depth, for one) are recognised by a
    float attribute with "drop" in its name.
    """
    return has_dropout(model) or has_batch_statistics(model)


def has_dropout(model: nn.Module) -> bool:
    """Whether a forward pass in training draws random numbers."""
    return any(layer.training and _is_dropout(layer) for layer in model.modules())


def has_batch_statistics(model: nn.Module) -> bool:
    """Whether a forward pass in training normalises by the statistics of a batch."""
    return any(layer.training and isinstance(layer, _BatchNorm) for layer in model.modules())


def _is_dropout(layer: nn.Module) -> bool:
    if isinstance(layer, _DropoutNd):
        return layer.p > 0
    rates = [rate for name, rate in vars(layer).items() if "drop" in name]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def tracking_batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """The batch-norm layers in training mode that keep running statistics.

    Layers that always stay in eval mode, such as frozen ones, are not among them.
    """
    norms = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    return [norm for norm in norms if norm.training and norm.running_mean is not None]


def recompute_statistics(model: nn.Module, inputs: Iterable[Any]) -> None:
    """Reset running statistics and measure them again on batches of inputs, weights unchanged.

    All other layers are in eval mode meanwhile; the model ends in training mode.
    """
    norms = tracking_batch_norms(model.train())
    momenta = [norm.momentum for norm in norms]
    model.eval()
    try:
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # cumulative mean over all batches
            norm.train()
        with torch.no_grad():
            for x in inputs:
                model(x)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        model.train()
