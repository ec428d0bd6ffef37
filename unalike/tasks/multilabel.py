"""Multi-label classification: a sample has any number of labels, some perhaps unknown."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unalike.losses.multilabel import asymmetric, binary_cross_entropy, focal, known_mean
from unalike.tasks.counts import area_under_roc, average_precision
from unalike.tasks.task import FederationLike, Labels, LossFunction, MetricFunction, Task

CRITERIA: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bce": binary_cross_entropy,
    "focal": focal,
    "asymmetric": asymmetric,
}


THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # of `best_macro_f1`

# Drawn for each label and client.
LABEL_FIGURES = {"f1": "F1 of each label", "auc": "AUC of each label"}
MAX_CLIENTS = 32  # whose metrics of each label are recorded

Criterion = Literal["bce", "focal", "asymmetric"]


@dataclass(frozen=True)
class MultiLabel(Task):
    """Output (B, labels) logits; labels (B, labels) floats: 1 present, 0 absent, NaN or -1 unknown.

    Args:
        labels: names of the labels, or their number.
        criterion: what training minimises, one of these names or a function of your own; metrics
            do not depend on it.
        wide_head: a hidden layer of twice the width, layer norm and GELU before the output, as
            FedNCA's authors have for FedAvg; the default is that of all tasks.
    """

    criterion: Criterion | LossFunction = "bce"  # type: ignore[assignment]
    wide_head: bool = field(default=False, kw_only=True)

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
            wide_head: bool = False,
            score: str | MetricFunction | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.criterion not in CRITERIA and not callable(self.criterion):
            raise ValueError(
                f"the criterion of a multilabel task is a function or one of "
                f"{', '.join(CRITERIA)}, got {self.criterion!r}"
            )

    def head(self, width: int) -> nn.Module:
        if not self.wide_head:
            return super().head(width)
        hidden = nn.Linear(width, 2 * width)
        output = nn.Linear(2 * width, len(self.labels))
        return nn.Sequential(hidden, nn.LayerNorm(2 * width), nn.GELU(), output)

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

    @classmethod
    def finish(cls, fed: FederationLike) -> dict[str, Any] | None:
        """Record the metrics of every label: means over clients, and a figure of each client's."""
        infos = {c: fed.infos[c] for c in fed.clients if fed.infos[c].task == cls.name}
        own = fed.algorithm.keeps_own_models()
        common = not own and all(info.tested_on == "common" for info in infos.values())
        asked = list(infos)[:MAX_CLIENTS]
        if common:  # one model, one test set: the first client of each architecture answers
            asked = list({info.model: c for c, info in reversed(infos.items())}.values())
        replies = fed.call("label_metrics", clients=asked, quorum=0, common=common)
        answers = {client: reply for client, reply in replies.items() if reply}
        by_label = _mean_by_label(list(answers.values()))
        if not by_label:
            return None
        labels = list(by_label)
        for name, title in LABEL_FIGURES.items():
            matrix = torch.zeros(len(answers), len(labels))
            for row, reply in zip(matrix, answers.values(), strict=True):
                row[:] = torch.tensor([reply.get(label, {}).get(name, 0.0) for label in labels])
            fed.log_figure(title, matrix=matrix, rows=list(answers), columns=labels)
        return {"by_label": by_label}


def _mean_by_label(replies: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """{label: {metric: mean over the clients that have it}}, from such a dict of each client."""
    values: dict[str, dict[str, list[float]]] = {}
    for reply in replies:
        for label, metrics in reply.items():
            of_label = values.setdefault(label, {})
            for name, value in metrics.items():
                of_label.setdefault(name, []).append(value)
    means = {}
    for label, of_label in values.items():
        means[label] = {name: mean(own) for name, own in of_label.items()}
    return means


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

    def by_label(self) -> list[dict[str, float]]:
        """Metrics of each label in percent, NaN where undefined, and its `positives`."""
        scores = torch.cat(self.scores).numpy()
        truth = torch.cat(self.truth).numpy()
        labels = label_counts(scores, truth)
        for label in labels:
            for name in label.keys() - {"positives"}:
                label[name] *= 100
        return labels

    def result(self) -> dict[str, float]:
        if not any((y >= 0).any() for y in self.truth):
            raise ValueError("nothing to measure: the meter was given no labelled sample")
        scores = torch.cat(self.scores).numpy()
        truth = torch.cat(self.truth).numpy()
        known = truth >= 0
        predicted = scores > 0
        present = truth == 1
        by_label = label_counts(scores, truth)
        f1, auc, precision, recall, ranked = (
            _defined(by_label, name)
            for name in ("f1", "auc", "precision", "recall", "average_precision")
        )
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
            "mAP": mean(ranked),
            "micro_auc": micro_auc,
            "macro_auc": mean(auc),
            "exact": exact,
        }
        metrics = {name: 100 * float(share) for name, share in shares.items()}
        metrics["best_macro_f1"] = 100 * best_macro_f1(scores, present, known)
        metrics["undefined_classes"] = float(truth.shape[1] - len(auc))
        metrics["log_loss"] = self.log_loss / int(labelled.sum())
        return metrics


def _defined(by_label: list[dict[str, float]], name: str) -> list[float]:
    """A metric of all labels for which it is defined."""
    return [label[name] for label in by_label if not math.isnan(label[name])]


def label_counts(scores: np.ndarray, truth: np.ndarray) -> list[dict[str, float]]:
    """F1, AUC, average precision, precision and recall of each label, NaN where undefined.

    Args:
        scores: logits (n, labels).
        truth: 1 present, 0 absent, else unknown, (n, labels).
    Returns: for each label its metrics as shares, and its number of `positives`.
    """
    nan = float("nan")
    found = []
    for label in range(truth.shape[1]):
        rows = truth[:, label] >= 0
        present, logits = truth[rows, label] == 1, scores[rows, label]
        guessed = logits > 0
        positives, guesses = int(present.sum()), int(guessed.sum())
        hits = int((present & guessed).sum())
        ranked = bool(0 < positives < len(present))
        found.append(
            {
                "f1": 2 * hits / (positives + guesses) if positives + guesses else nan,
                "auc": float(area_under_roc(present, logits)) if ranked else nan,
                "average_precision": float(average_precision(present, logits))
                if positives
                else nan,
                "precision": hits / max(guesses, 1) if positives else nan,
                "recall": hits / positives if positives else nan,
                "positives": float(positives),
            }
        )
    return found


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
