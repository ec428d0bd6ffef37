"""Classification: each sample has exactly one of several classes."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from unalike.tasks.counts import confusion_matrix
from unalike.tasks.task import (
    UNKNOWN,
    Labels,
    LossFunction,
    MetricFunction,
    Task,
    check_whole,
)

ClassWeights = tuple[float, ...] | Literal["balanced"]


@dataclass(frozen=True)
class Classification(Task):
    """Output (B, classes) logits; labels (B,) integers, -1 where unknown.

    Args:
        labels: names of the classes, or their number.
        class_weights: of each class in the training loss, or "balanced": inversely to how often a
            client has it (rows / (classes it has * rows of the class)).
        label_smoothing: share of the target that is spread over all classes, in [0, 1).
    """

    class_weights: ClassWeights | None = field(default=None, kw_only=True)
    label_smoothing: float = field(default=0.0, kw_only=True)

    name: ClassVar[str] = "classification"
    metric: ClassVar[str] = "accuracy"
    classifies: ClassVar[bool] = True
    single_label: ClassVar[bool] = True

    if TYPE_CHECKING:  # labels may be a number; they are stored as names

        def __init__(
            self,
            labels: Labels,
            *,
            class_weights: ClassWeights | None = None,
            label_smoothing: float = 0.0,
            criterion: LossFunction | None = None,
            score: str | MetricFunction | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(
                f"label_smoothing must be at least 0 and below 1, got {self.label_smoothing}"
            )
        weights = self.class_weights
        if weights is None or weights == "balanced":
            return
        classes = len(self.labels)
        if isinstance(weights, str) or len(weights) != classes:
            got = repr(weights) if isinstance(weights, str) else str(len(weights))
            raise ValueError(
                f'class_weights are "balanced" or one number for each of {classes} classes, '
                f"got {got}"
            )
        if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
            raise ValueError(
                f"class_weights are finite numbers of at least 0, not all 0, got {weights}"
            )
        object.__setattr__(self, "class_weights", tuple(float(weight) for weight in weights))

    def fit_to_labels(self, read_labels: Callable[[], Tensor]) -> "Classification":
        if self.class_weights != "balanced":
            return self
        y = read_labels()
        counts = y[y != UNKNOWN].long().bincount(minlength=len(self.labels)).double()
        present = counts > 0
        weights = counts.sum() / (present.sum() * counts)
        weights[~present] = 1.0  # they do not occur
        return replace(self, class_weights=tuple(weights.tolist()))

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the cross entropy, weighted mean over known labels; 0 if none is known.

        >>> round(Classification(4).loss(torch.zeros(2, 4), torch.tensor([0, 3])).item(), 3)
        1.386
        """
        known = y != UNKNOWN
        weight = None
        amount = known.sum().clamp(min=1)
        if self.class_weights is not None:
            weight = output.new_tensor(self.class_weights)
            amount = (weight[y.long().clamp(min=0)] * known).sum().clamp(min=1e-12)
        total = F.cross_entropy(
            output,
            y.long(),
            weight=weight,
            ignore_index=UNKNOWN,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )
        return total / amount

    def imitate(self, output: Tensor, teacher: Tensor) -> Tensor:
        return -(teacher.softmax(-1) * output.log_softmax(-1)).sum(-1).mean()

    def probabilities(self, output: Tensor) -> Tensor:
        return output.softmax(1)

    def label_matrix(self, y: Tensor) -> Tensor:
        return y[:, None] == torch.arange(len(self.labels), device=y.device)

    def meter(self) -> "ClassificationMeter":
        return ClassificationMeter()

    def check(self, y: Tensor) -> None:
        check_whole(y, self.name, ("n",))
        classes = len(self.labels)
        outside = y[(y < 0) | (y >= classes)]
        if len(outside):
            raise ValueError(
                f"label {int(outside[0])} does not fit {classes} classes: "
                f"labels run from 0 to {classes - 1}"
            )


class ClassificationMeter:
    """Counts labels and predictions.

    `macro_f1` is the mean over classes that occur in either; `log_loss` is in nats.
    """

    def __init__(self) -> None:
        self.confusion = torch.zeros(0, 0, dtype=torch.int64)  # truth by prediction
        self.log_loss = 0.0  # sum over samples

    def add(self, output: Tensor, y: Tensor) -> None:
        y = y.long()
        known = y != UNKNOWN
        output = output.detach()[known]
        y = y[known]
        self.log_loss += F.cross_entropy(output.double(), y, reduction="sum").item()
        if not len(self.confusion):
            self.confusion = torch.zeros(output.shape[1], output.shape[1], dtype=torch.int64)
        self.confusion += confusion_matrix(y, output.argmax(-1), output.shape[1]).cpu()

    def result(self) -> dict[str, float]:
        samples = int(self.confusion.sum())
        if not samples:
            raise ValueError("nothing to measure: the meter was given no labelled sample")
        correct = self.confusion.diagonal().double()
        occurrences = self.confusion.sum(0) + self.confusion.sum(1)
        f1 = (2 * correct / occurrences)[occurrences > 0]
        return {
            "accuracy": 100 * (correct.sum().item() / samples),
            "macro_f1": 100 * f1.mean().item(),
            "log_loss": self.log_loss / samples,
        }
