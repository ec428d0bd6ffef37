"""Regression: predict one or more numbers of each sample: real, counts, or levels in order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unalike.tasks.task import Labels, Task

Kind = Literal["real", "count", "ordinal"]
KINDS = ("real", "count", "ordinal")
LARGE = 10.0  # mean or deviation of targets that a head learns slowly


@dataclass(frozen=True)
class Regression(Task):
    """Predicts real numbers, counts, or one of several levels in order.

    Kinds, with labels y and the output:
        real: y (B, targets), or (B,), floats; output (B, targets) in the unit of y; squared error.
        count: the same with whole numbers of 0 or more; output the logarithm of the Poisson rate.
        ordinal: `labels` are levels, lowest first; y (B,) whole, from 0 to levels - 1; output
            (B, levels) log-probabilities of a proportional-odds model.

    Args:
        labels: names of the targets, or of the levels; or their number.
        kind: see above.
        mean, std: of real targets, one number or one for each. The head then learns the
            standardized target and returns it in its own unit, and errors are divided by `std` in
            the loss, so that one learning rate suits every unit. Clients may use different ones.

    References: McCullagh 1980, Regression models for ordinal data (proportional odds).
    """

    labels: tuple[str, ...] = ("target",)
    kind: Kind = "real"
    mean: float | tuple[float, ...] = 0.0
    std: float | tuple[float, ...] = 1.0

    name: ClassVar[str] = "regression"
    metric: ClassVar[str] = "mae"
    higher_is_better: ClassVar[bool] = False
    unit: ClassVar[str] = ""

    if TYPE_CHECKING:  # labels may be a number; they are stored as names

        def __init__(
            self,
            labels: Labels = ("target",),
            kind: Kind = "real",
            mean: float | Sequence[float] = 0.0,
            std: float | Sequence[float] = 1.0,
        ) -> None: ...

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in KINDS:
            raise ValueError(f"regression is of kind {', '.join(KINDS)}, got {self.kind!r}")
        if self.kind == "ordinal" and len(self.labels) < 2:
            raise ValueError(
                "ordinal regression needs two levels or more as labels, lowest first, "
                f"got {', '.join(self.labels)}"
            )
        for name in ("mean", "std"):
            value = getattr(self, name)
            if isinstance(value, Sequence):
                value = tuple(float(number) for number in value)
                object.__setattr__(self, name, value)
            self._check_scale(name, value)

    def _check_scale(self, name: str, value: float | tuple[float, ...]) -> None:
        """Raise ValueError unless `mean` or `std` fits the targets."""
        numbers = value if isinstance(value, tuple) else (value,)
        if self.kind != "real" and value != (0.0 if name == "mean" else 1.0):
            raise ValueError(f"{name} is for real targets; leave it out of kind {self.kind!r}")
        if isinstance(value, tuple) and len(value) != len(self.labels):
            raise ValueError(
                f"{name} is one number, or one for each of {len(self.labels)} targets, "
                f"got {len(value)}"
            )
        if name == "std" and min(numbers) <= 0:
            raise ValueError(f"std must be above 0, got {min(numbers):g}")

    def advice(self, y: Tensor) -> str | None:
        """How to say the scale of targets that are far from mean 0 and deviation 1.

        >>> print(Regression().advice(torch.tensor([100.0, 120.0, 140.0])))
        its targets have mean 120 and deviation 20: Regression(..., mean=120, std=20) learns faster
        """
        if self.kind != "real" or self.mean != 0 or self.std != 1 or len(y) < 2:
            return None
        columns = y.reshape(len(y), -1).double()
        mean, std = columns.mean(0), columns.std(0)
        if max(mean.abs().max().item(), std.max().item()) <= LARGE or not std.all():
            return None
        numbers = {}
        for name, values in {"mean": mean, "std": std}.items():
            shown = [f"{value:.3g}" for value in values.tolist()]
            numbers[name] = shown[0] if len(shown) == 1 else f"[{', '.join(shown)}]"
        return (
            f"its targets have mean {numbers['mean']} and deviation {numbers['std']}: "
            f"Regression(..., mean={numbers['mean']}, std={numbers['std']}) learns faster"
        )

    @property
    def variant(self) -> str:
        return "" if self.kind == "real" else self.kind

    @property
    def has_confidence(self) -> bool:
        return self.kind == "ordinal"

    def head(self, width: int) -> nn.Module:
        layers = [nn.Linear(width, width), nn.ReLU()]
        if self.kind == "ordinal":
            return nn.Sequential(*layers, ProportionalOdds(width, len(self.labels)))
        layers.append(nn.Linear(width, len(self.labels)))
        if self.kind == "count":
            # Other parameter names than of kind "real": such heads are not averaged.
            return nn.Sequential(LogRate(*layers))
        if self.mean != 0 or self.std != 1:
            layers.append(Destandardize(self.mean, self.std))
        return nn.Sequential(*layers)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss over samples and targets.

        >>> Regression().loss(torch.tensor([[1.0], [4.0]]), torch.tensor([1.0, 2.0])).item()
        2.0
        """
        if self.kind == "ordinal":
            return F.cross_entropy(output, y.long())
        y = y.reshape(output.shape).to(output.dtype)
        if self.kind == "count":
            return F.poisson_nll_loss(output, y)
        if isinstance(self.std, tuple):
            columns = zip(output.unbind(1), y.unbind(1), self.std, strict=True)
            errors = [F.mse_loss(column, target) / std**2 for column, target, std in columns]
            return torch.stack(errors).mean()
        return F.mse_loss(output, y) / self.std**2

    def imitate(self, output: Tensor, teacher: Tensor) -> Tensor:
        if self.kind == "ordinal":
            return -(teacher.softmax(-1) * output.log_softmax(-1)).sum(-1).mean()
        if self.kind == "count":
            return F.poisson_nll_loss(output, teacher.exp())
        return self.loss(output, teacher)

    def meter(self) -> "RegressionMeter":
        return OrdinalMeter() if self.kind == "ordinal" else RegressionMeter(self.kind)

    def check(self, y: Tensor) -> None:
        targets = 1 if self.kind == "ordinal" else len(self.labels)
        fits = y.ndim == 2 and y.shape[1] == targets
        if not fits and not (y.ndim == 1 and targets == 1):
            expected = "(n,) or (n, 1)" if targets == 1 else f"(n, {targets})"
            raise ValueError(f"regression targets have shape {expected}, got {tuple(y.shape)}")
        if y.is_complex() or y.dtype == torch.bool:
            raise ValueError(f"regression targets are numbers (torch.float32), got {y.dtype}")
        if self.kind == "real" and not y.is_floating_point():
            raise ValueError(f"regression targets are floats (torch.float32), got {y.dtype}")
        finite = y.reshape(len(y), targets).isfinite().all(1)
        if not finite.all():
            raise ValueError(
                f"regression targets must be finite, got NaN or infinity in {int((~finite).sum())} "
                f"of {len(y)} rows: leave these rows out"
            )
        if self.kind != "real":
            self._check_whole(y)

    def _check_whole(self, y: Tensor) -> None:
        """Raise ValueError unless counts or levels are whole numbers in their range."""
        most = len(self.labels) - 1 if self.kind == "ordinal" else torch.inf
        wrong = y[(y < 0) | (y > most) | (y != y.round())]
        if not len(wrong):
            return
        if self.kind == "count":
            raise ValueError(f"counts are whole numbers of 0 or more, got {float(wrong[0]):g}")
        raise ValueError(
            f"level {float(wrong[0]):g} does not fit {most + 1} levels: "
            f"they are whole numbers from 0 to {most}"
        )


class Destandardize(nn.Module):
    """Standardized targets (B, targets) in their own unit. Its numbers belong to the client."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: float | Sequence[float], std: float | Sequence[float]):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean), persistent=False)
        self.register_buffer("std", torch.tensor(std), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.std + self.mean


class LogRate(nn.Sequential):
    """Layers whose output is the logarithm of a Poisson rate."""


class ProportionalOdds(nn.Module):
    """Log-probabilities (B, levels): P(y > k) = sigmoid(score - threshold k), thresholds rise."""

    def __init__(self, width: int, levels: int):
        super().__init__()
        self.score = nn.Linear(width, 1)
        # All levels are equally likely at score 0.
        shares = torch.arange(1, levels) / levels
        thresholds = torch.logit(shares)
        self.first_threshold = nn.Parameter(thresholds[:1].clone())
        self.log_gaps = nn.Parameter(thresholds.diff().log())

    def forward(self, x: Tensor) -> Tensor:
        gaps = torch.cat([self.first_threshold, self.log_gaps.exp()])
        above = self.score(x) - gaps.cumsum(0)  # (B, levels - 1)
        # log P(y = k) = log(sigmoid(a) - sigmoid(b)), a above b, as a stable sum
        a, b = F.pad(above, (1, 0), value=torch.inf), F.pad(above, (0, 1), value=-torch.inf)
        gap = (a - b).clamp(min=1e-6)
        return torch.log(-torch.expm1(-gap)) - F.softplus(-a) - F.softplus(b)


class RegressionMeter:
    """Collects predictions and targets.

    `mae` and `rmse` are in the unit of the targets, means over samples and targets; `r2` is the
    mean over targets that are not constant, NaN if all are. Of counts the rates are compared, and
    `deviance` is the mean Poisson deviance.
    """

    def __init__(self, kind: Kind = "real") -> None:
        self.kind = kind
        self.predicted: list[Tensor] = []
        self.truth: list[Tensor] = []

    def add(self, output: Tensor, y: Tensor) -> None:
        predicted = output.detach().cpu().double()
        self.predicted.append(predicted.exp() if self.kind == "count" else predicted)
        self.truth.append(y.cpu().double().reshape(output.shape))

    def result(self) -> dict[str, float]:
        if not sum(map(len, self.truth)):
            raise ValueError("nothing to measure: the meter was given no sample")
        truth = torch.cat(self.truth)
        predicted = torch.cat(self.predicted)
        error = predicted - truth
        squares = error.square()
        spread = (truth - truth.mean(0)).square().sum(0)
        varies = spread > 0
        metrics = {
            "mae": error.abs().mean().item(),
            "rmse": squares.mean().sqrt().item(),
            "r2": (1 - squares.sum(0)[varies] / spread[varies]).mean().item(),
        }
        if self.kind == "count":
            # y log(y / rate) - (y - rate), where 0 log 0 = 0
            deviance = torch.xlogy(truth, truth / predicted) - truth + predicted
            metrics["deviance"] = 2 * deviance.mean().item()
        return metrics


class OrdinalMeter(RegressionMeter):
    """Compares the median level with the true one, `mae` in levels.

    Beside the metrics of numbers: `accuracy` in percent, and `kappa`, Cohen's with quadratic
    weights, NaN if all levels are the same.
    """

    def add(self, output: Tensor, y: Tensor) -> None:
        cumulative = output.detach().cpu().double().softmax(1).cumsum(1)
        median = (cumulative < 0.5).sum(1, keepdim=True).clamp(max=output.shape[1] - 1)
        super().add(median, y.reshape(-1, 1))

    def result(self) -> dict[str, float]:
        from sklearn.metrics import cohen_kappa_score

        metrics = super().result()
        truth = torch.cat(self.truth)[:, 0].long().numpy()
        predicted = torch.cat(self.predicted)[:, 0].long().numpy()
        metrics["accuracy"] = 100 * float((truth == predicted).mean())
        if len({*truth, *predicted}) > 1:
            metrics["kappa"] = float(cohen_kappa_score(truth, predicted, weights="quadratic"))
        return metrics
