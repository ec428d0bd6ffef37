"""Regression: predict one or more real numbers of each sample."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from unalike.tasks.task import Labels, Task


@dataclass(frozen=True)
class Regression(Task):
    """Output (B, targets); targets y (B, targets), or (B,) where there is one, finite floats.

    Args:
        labels: names of the targets, or their number.
    """

    labels: tuple[str, ...] = ("target",)

    name: ClassVar[str] = "regression"
    metric: ClassVar[str] = "mae"
    higher_is_better: ClassVar[bool] = False
    unit: ClassVar[str] = ""

    if TYPE_CHECKING:  # labels may be a number; they are stored as names

        def __init__(self, labels: Labels = ("target",)) -> None: ...

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the mean squared error over samples and targets.

        >>> Regression().loss(torch.tensor([[1.0], [4.0]]), torch.tensor([1.0, 2.0])).item()
        2.0
        """
        return F.mse_loss(output, y.reshape(output.shape))

    def imitate(self, output: Tensor, teacher: Tensor) -> Tensor:
        return F.mse_loss(output, teacher)

    def meter(self) -> "RegressionMeter":
        return RegressionMeter()

    def check(self, y: Tensor) -> None:
        targets = len(self.labels)
        fits = y.ndim == 2 and y.shape[1] == targets
        if not fits and not (y.ndim == 1 and targets == 1):
            expected = "(n,) or (n, 1)" if targets == 1 else f"(n, {targets})"
            raise ValueError(f"regression targets have shape {expected}, got {tuple(y.shape)}")
        if not y.is_floating_point():
            raise ValueError(f"regression targets are floats (torch.float32), got {y.dtype}")
        finite = y.reshape(len(y), targets).isfinite().all(1)
        if not finite.all():
            raise ValueError(
                f"regression targets must be finite, got NaN or infinity in {int((~finite).sum())} "
                f"of {len(y)} rows: leave these rows out"
            )


class RegressionMeter:
    """Collects predictions and targets.

    `mae` and `rmse` are in the unit of the targets, means over samples and targets; `r2` is the
    mean over targets that are not constant, NaN if all are.
    """

    def __init__(self) -> None:
        self.predicted: list[Tensor] = []
        self.truth: list[Tensor] = []

    def add(self, output: Tensor, y: Tensor) -> None:
        self.predicted.append(output.detach().cpu().double())
        self.truth.append(y.cpu().double().reshape(output.shape))

    def result(self) -> dict[str, float]:
        if not sum(map(len, self.truth)):
            raise ValueError("nothing to measure: the meter was given no sample")
        truth = torch.cat(self.truth)
        error = torch.cat(self.predicted) - truth
        squares = error.square()
        spread = (truth - truth.mean(0)).square().sum(0)
        varies = spread > 0
        return {
            "mae": error.abs().mean().item(),
            "rmse": squares.mean().sqrt().item(),
            "r2": (1 - squares.sum(0)[varies] / spread[varies]).mean().item(),
        }
