"""The only training loop. Knows a model, a loss and row numbers; no methods, clients or servers."""

import math
from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from unalike.base.settings import Settings
from unalike.training.batching import batches

Positive = Annotated[int, Field(ge=1)]


class Training(Settings):
    """How much each client trains, and with which optimizer.

    All algorithms run on a scenario share it, so that comparisons do equal work.
    """

    RENAMED: ClassVar[dict[str, str]] = {
        "rate": "lr",
        "batch": "batch_size",
        "optimiser": "optimizer",
        "clip": "max_grad_norm",
    }

    rounds: Positive = 20
    epochs: Positive = 1  # local epochs per round
    batch_size: Positive = 32
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    lr: Annotated[float, Field(gt=0)] = 1e-3
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0  # SGD only
    max_grad_norm: Annotated[float, Field(gt=0)] | None = None  # gradients are clipped to this norm


class Diverged(ValueError):
    """The training loss became NaN or infinite."""


def build_optimizer(
    parameters: Sequence[Tensor], training: Training, lr: float | None = None
) -> torch.optim.Optimizer:
    """The optimizer that `training` names, with its learning rate or another one.

    Fused kernels do the same arithmetic in one call. They exist for floating-point parameters on
    CPU and CUDA only.
    """
    lr = lr or training.lr
    decay = training.weight_decay
    fused = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)
    match training.optimizer:
        case "adamw":
            return torch.optim.AdamW(parameters, lr=lr, weight_decay=decay, fused=fused)
        case "adam":
            return torch.optim.Adam(parameters, lr=lr, weight_decay=decay, fused=fused)
        case _:
            return torch.optim.SGD(
                parameters, lr=lr, momentum=training.momentum, weight_decay=decay, fused=fused
            )


def step(
    loss: Tensor, optimizer: torch.optim.Optimizer, max_grad_norm: float | None = None
) -> None:
    """Backward pass of a loss and one optimizer step."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    apply_gradients(optimizer, max_grad_norm)


def apply_gradients(optimizer: torch.optim.Optimizer, max_grad_norm: float | None = None) -> None:
    """One optimizer step with the gradients that the parameters hold, clipped first if asked."""
    if max_grad_norm:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, max_grad_norm)
    optimizer.step()


def train(
    model: nn.Module,
    rows: int,
    gradient: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    orders: list[torch.Generator],
    batch_size: int,
    max_grad_norm: float | None = None,
) -> float:
    """Train for one epoch over `rows` samples per generator in `orders`.

    Args:
        gradient: takes row numbers (n,), leaves their gradient in the parameters' `.grad` and
            returns their loss, a scalar (see `GraphedStep`).
        orders: one generator per epoch; it shuffles the rows.
    Returns: the mean loss over all samples.
    Raises: Diverged if that is not finite.
    """
    model.train()
    losses, sizes = [], []
    for order in orders:
        for index in batches(rows, batch_size, order):
            losses.append(gradient(index))  # stays on the device: reading it would stall a GPU
            sizes.append(len(index))
            apply_gradients(optimizer, max_grad_norm)
    if not losses:
        return 0.0
    mean = float(torch.stack(losses) @ losses[0].new_tensor(sizes)) / sum(sizes)
    if not math.isfinite(mean):
        lr = optimizer.param_groups[0]["lr"]
        raise Diverged(f"the training loss became {mean}; lower training.lr (now {lr})")
    return mean
