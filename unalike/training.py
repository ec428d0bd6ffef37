"""The training loop, the only one. Knows a model, a loss and rows; nothing of methods, clients or servers."""

import math
from collections.abc import Callable, Iterator
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

Positive = Annotated[int, Field(ge=1)]


class Training(BaseModel):
    """How much work everybody does and how; shared by every algorithm run on a scenario, so that comparisons do equal work."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    rounds: Positive = 20
    epochs: Positive = 1                                        # local epochs a round
    batch: Positive = 32
    optimiser: Literal["adamw", "adam", "sgd"] = "adamw"
    rate: Annotated[float, Field(gt=0)] = 1e-3
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0         # SGD only
    clip: Annotated[float, Field(gt=0)] | None = None           # largest norm of a gradient


class Diverged(ValueError):
    """A loss that is no longer a number."""


def optimiser_for(parameters: list[nn.Parameter], training: Training, rate: float | None = None) -> torch.optim.Optimizer:
    """Fused kernels do the same arithmetic in one call; they exist for floating parameters on CPU and CUDA."""
    rate = rate or training.rate
    fused = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)
    match training.optimiser:
        case "adamw":
            return torch.optim.AdamW(parameters, lr=rate, weight_decay=training.weight_decay, fused=fused)
        case "adam":
            return torch.optim.Adam(parameters, lr=rate, weight_decay=training.weight_decay, fused=fused)
        case _:
            return torch.optim.SGD(parameters, lr=rate, momentum=training.momentum, weight_decay=training.weight_decay, fused=fused)


def batches(rows: int, batch: int, generator: torch.Generator | None = None) -> Iterator[Tensor]:
    """Row numbers in batches, shuffled if there is a generator. A last batch of one row joins the one before it,
    since batch statistics of a single row do not exist.

    >>> [len(b) for b in batches(9, 4)], [len(b) for b in batches(10, 4)]
    ([4, 5], [4, 4, 2])
    """
    order = torch.arange(rows) if generator is None else torch.randperm(rows, generator=generator)
    starts = list(range(0, rows, batch))
    if len(starts) > 1 and rows - starts[-1] == 1:
        starts.pop()
    for start, end in zip(starts, [*starts[1:], rows], strict=False):      # no rows: no batches
        yield order[start:end]


def step(loss: Tensor, optimiser: torch.optim.Optimizer, clip: float | None = None) -> None:
    """One update from a loss."""
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    move(optimiser, clip)


def move(optimiser: torch.optim.Optimizer, clip: float | None = None) -> None:
    """One update from gradients that are there already."""
    if clip:
        nn.utils.clip_grad_norm_([p for group in optimiser.param_groups for p in group["params"]], clip)
    optimiser.step()


def train(model: nn.Module, rows: int, loss: Callable[[Tensor], Tensor], optimiser: torch.optim.Optimizer,
          orders: list[torch.Generator], batch: int, clip: float | None = None) -> float:
    """One epoch per generator in `orders` over `rows` samples; `loss(index)` gives the loss of a batch. Returns the mean loss."""
    model.train()
    total: Tensor | float = 0.0
    seen = 0
    for order in orders:
        for index in batches(rows, batch, order):
            value = loss(index)
            step(value, optimiser, clip)
            total = total + value.detach() * len(index)          # stays on the device: no waiting for each step
            seen += len(index)
    mean = float(total) / max(seen, 1)
    if not math.isfinite(mean):
        raise Diverged(f"the training loss became {mean}; lower training.rate (now {optimiser.param_groups[0]['lr']}) "
                       "or look for NaN in the data")
    return mean
