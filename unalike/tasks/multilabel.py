"""Multi-label classification: a sample has any number of labels, some perhaps unknown."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from unalike.losses.multilabel import asymmetric, binary_cross_entropy, focal, known_mean
from unalike.tasks.counts import area_under_roc, average_precision
from unalike.tasks.task import Labels, LossFunction, MetricFunction, Task

CRITERIA: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bce": binary_cross_entropy,
    "focal": focal,
    "asymmetric": asymmetric,
}


THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # of `best_macro_f1`

Criterion = Literal["bce", "focal", "asymmetric"]


@dataclass(frozen=True)
class MultiLabel(Task):
    """Output (B, labels) logits; labels (B, labels) floats: 1 present, 0 absent, NaN or -1 unknown.

    Args:
        labels: names of the labels, or their number.
        criterion: what training minimises, one of these names or a function of your own; metrics
            do not depend on it.
    """

    criterion: Criterion | LossFunction = "bce"  # type: ignore[assignment]

    name: ClassVar[str] = "multilabel"
    metric: ClassVar[str] = "micro_f1"
    federation_metrics: ClassVar[tuple[str, ...]] = (
        "macro_f1",
        "macro_auc",
        "mAP",
        "CF1",
        "micro_auc",
    )
    classifies: ClassVar[bool] = True
    multilabel: ClassVar[bool] = True

    if TYPE_CHECKING:  # labels may be a number; they are stored as names

        def __init__(
            self,
            labels: Labels,
            criterion: Criterion | LossFunction = "bce",
            *,
            score: str | MetricFunction | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.criterion not in CRITERIA and not callable(self.criterion):
            raise ValueError(
                f"the criterion of a multilabel task is a function or one of "
                f"{', '.join(CRITERIA)}, got {self.criterion!r}"
            )

    def costs(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the criterion of each entry, like `y`; 0 where the label is unknown."""
        if callable(self.criterion):
            raise ValueError(
                "the criterion of each entry is needed here, and a function of your own gives "
                f"their mean only: take one of {', '.join(CRITERIA)}"
            )
        return CRITERIA[self.criterion](output, y)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the criterion, mean over known entries; 0 if none is known.

        >>> round(MultiLabel(2).loss(torch.zeros(1, 2), torch.tensor([[1.0, -1.0]])).item(), 3)
        0.693
        """
        return known_mean(self.costs(output, y), y)

    def imitate(self, output: Tensor, teacher: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(output, teacher.sigmoid())

    def probabilities(self, output: Tensor) -> Tensor:
        return output.sigmoid()

    def label_matrix(self, y: Tensor) -> Tensor:
        return y > 0

    def meter(self) -> "MultiLabelMeter":
        return MultiLabelMeter()

    def check(self, y: Tensor) -> None:
        labels = len(self.labels)
        if y.ndim != 2 or y.shape[1] != labels:
            raise ValueError(f"multilabel labels have shape (n, {labels}), got {tuple(y.shape)}")
        if not y.is_floating_point():
            raise ValueError(f"multilabel labels are floats (torch.float32), got {y.dtype}")
        invalid = y[~((y == 0) | (y == 1) | (y == -1) | y.isnan())]
        if len(invalid):
            raise ValueError(
                f"a multilabel label is 1, 0, or -1 or NaN where unknown, got {float(invalid[0]):g}"
            )

    def unmeasured(self, y: Tensor) -> str | None:
        return None if bool((y == 1).any()) else "no label is present in any of them"


class MultiLabelMeter:
    """Collects scores and labels; a label is predicted above probability 0.5.

    Unknown labels count nowhere. Means over labels leave out those where they are undefined:
    `macro_f1` labels neither present nor predicted; `mAP` and `CF1` labels never present;
    `macro_auc` labels that are not both present and absent, which `undefined_classes` counts.
    `CF1` is the harmonic mean of the labels' mean precision and mean recall, `OF1` another name
    of micro_f1 in the multi-label literature, `exact` the share of samples with every known label
    right. `best_macro_f1` is macro_f1 at the best of nine thresholds, chosen on these very
    samples: some papers report it, and it is no estimate for new ones. `log_loss` is the sum over a
    sample's labels, mean over samples.
    """

    def __init__(self) -> None:
        self.scores: list[Tensor] = []
        self.truth: list[Tensor] = []
        self.log_loss = 0.0  # sum over samples and labels

    def add(self, output: Tensor, y: Tensor) -> None:
        output = output.detach()
        self.scores.append(output.cpu().double())
        self.truth.append(y.cpu().double())
        self.log_loss += binary_cross_entropy(output.double(), y.to(output.device)).sum().item()

    def result(self) -> dict[str, float]:
        if not any((y >= 0).any() for y in self.truth):
            raise ValueError("nothing to measure: the meter was given no labelled sample")
        scores = torch.cat(self.scores).numpy()
        truth = torch.cat(self.truth).numpy()
        known = truth >= 0
        predicted = scores > 0
        present = truth == 1
        precision: list[float] = []
        recall: list[float] = []
        f1: list[float] = []
        precisions: list[float] = []
        auc: list[float] = []
        for label in range(truth.shape[1]):
            rows = known[:, label]
            positives = present[rows, label].sum()
            guesses = predicted[rows, label].sum()
            hits = (present & predicted)[rows, label].sum()
            if positives + guesses:
                f1.append(2 * hits / (positives + guesses))
            if positives:
                precision.append(hits / max(guesses, 1))
                recall.append(hits / positives)
                ranked = average_precision(present[rows, label], scores[rows, label])
                precisions.append(ranked)
            if 0 < positives < rows.sum():
                auc.append(area_under_roc(present[rows, label], scores[rows, label]))
        labelled = known.any(1)
        exact = ((predicted == truth) | ~known).all(1)[labelled].mean()
        positives = (present & known).sum()
        guesses = (predicted & known).sum()
        micro_f1 = 2 * (present & predicted & known).sum() / max(positives + guesses, 1)
        micro_auc = float("nan")
        if 0 < positives < known.sum():
            micro_auc = area_under_roc(present[known], scores[known])
        shares = {
            "micro_f1": micro_f1,
            "macro_f1": mean(f1),
            "OF1": micro_f1,
            "CF1": harmonic_mean(mean(precision), mean(recall)),
            "mAP": mean(precisions),
            "micro_auc": micro_auc,
            "macro_auc": mean(auc),
            "exact": exact,
        }
        metrics = {name: 100 * float(share) for name, share in shares.items()}
        metrics["best_macro_f1"] = 100 * best_macro_f1(scores, present, known)
        metrics["undefined_classes"] = float(truth.shape[1] - len(auc))
        metrics["log_loss"] = self.log_loss / int(labelled.sum())
        return metrics


def best_macro_f1(scores: np.ndarray, present: np.ndarray, known: np.ndarray) -> float:
    """Return the mean F1 over labels at the best of the thresholds 0.1 to 0.9 of probability.

    Args:
        scores: logits (n, labels).
        present, known: which labels are present, and whose presence is known, (n, labels).
    """
    best = 0.0
    for threshold in THRESHOLDS:
        predicted = (scores > np.log(threshold / (1 - threshold))) & known
        hits = (present & predicted).sum(0)
        total = (present & known).sum(0) + predicted.sum(0)
        defined = total > 0
        if defined.any():
            best = max(best, float((2 * hits[defined] / total[defined]).mean()))
    return best


def mean(values: list[float]) -> float:
    """Return the mean, NaN of no values."""
    return sum(values) / len(values) if values else float("nan")


def harmonic_mean(one: float, other: float) -> float:
    """Return the harmonic mean; 0 if both are."""
    return 2 * one * other / max(one + other, 1e-12)
