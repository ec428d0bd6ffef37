"""Any number of labels at once, some of them perhaps unknown. Knows nothing of where the samples come from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from unalike.losses.multilabel import asymmetric, binary_cross_entropy, focal, known_mean
from unalike.tasks.task import Labels, Task

CRITERIA: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bce": binary_cross_entropy,
    "focal": focal,
    "asymmetric": asymmetric,
}


Criterion = Literal["bce", "focal", "asymmetric"]


@dataclass(frozen=True)
class MultiLabel(Task):
    """Output (B, labels) logits, labels (B, labels) floats: 1 present, 0 absent, NaN or -1 unknown.

    `criterion` is what training minimises; metrics do not depend on it.
    """

    criterion: Criterion = "bce"

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

        def __init__(self, labels: Labels, criterion: Criterion = "bce") -> None: ...

    def __post_init__(self):
        super().__post_init__()
        if self.criterion not in CRITERIA:
            raise ValueError(
                f"the criterion of a multilabel task is one of {', '.join(CRITERIA)}, got {self.criterion!r}"
            )

    def costs(self, output: Tensor, y: Tensor) -> Tensor:
        """What each entry costs, like `y`; 0 where the label is unknown."""
        return CRITERIA[self.criterion](output, y)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """The criterion, mean over the known entries; 0 where none is known.

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
        wrong = y[~((y == 0) | (y == 1) | (y == -1) | y.isnan())]
        if len(wrong):
            raise ValueError(
                f"a multilabel label is 1, 0, or -1 or NaN where unknown, got {float(wrong[0]):g}"
            )

    def unmeasured(self, y: Tensor) -> str | None:
        return None if bool((y == 1).any()) else "no label is present in any of them"


class MultiLabelMeter:
    """Keeps score and truth of every sample; a label counts as given above probability 0.5, unknown labels count nowhere.

    Means over labels leave out those where they are undefined: macro_f1 labels neither present nor given, mAP, CF1 and its parts labels
    never present, macro_auc labels that are not both present and absent; `undefined_classes` counts these last. CF1 is the harmonic mean
    of the labels' mean precision and mean recall. OF1 is micro_f1 by the name of the multi-label literature. exact is the share of
    samples with every known label right; log_loss is the sum over a sample's labels, mean over samples.
    """

    def __init__(self):
        self.scores, self.truth, self.nll = [], [], 0.0

    def add(self, output: Tensor, y: Tensor) -> None:
        output = output.detach()
        self.scores.append(output.cpu().double())
        self.truth.append(y.cpu().double())
        self.nll += binary_cross_entropy(output.double(), y.to(output.device)).sum().item()

    def result(self) -> dict[str, float]:
        from sklearn.metrics import average_precision_score, roc_auc_score

        if not any((y >= 0).any() for y in self.truth):
            raise ValueError("nothing to measure: the meter was given no labelled sample")
        scores, truth = torch.cat(self.scores).numpy(), torch.cat(self.truth).numpy()
        known, guess = truth >= 0, scores > 0
        there, given, hits = (
            (which & known).sum(0) for which in (truth == 1, guess, (truth == 1) & guess)
        )  # (labels,) each
        known_of = [(truth[known[:, k], k], scores[known[:, k], k]) for k in range(truth.shape[1])]
        labelled = known.any(1)
        right = ((guess == truth) | ~known).all(1)[labelled]
        ranked = [average_precision_score(y, s) for (y, s), count in zip(known_of, there) if count]
        parted = [
            roc_auc_score(y, s) for (y, s), count in zip(known_of, there) if 0 < count < len(y)
        ]
        f1 = [2 * hit / (t + g) for hit, t, g in zip(hits, there, given) if t + g]
        precision = [hit / max(g, 1) for hit, t, g in zip(hits, there, given) if t]
        recall = [hit / t for hit, t in zip(hits, there) if t]
        micro_f1 = 2 * hits.sum() / max(there.sum() + given.sum(), 1)
        return {
            name: 100 * float(value)
            for name, value in {
                "micro_f1": micro_f1,
                "macro_f1": mean(f1),
                "OF1": micro_f1,
                "CF1": 2
                * mean(precision)
                * mean(recall)
                / max(mean(precision) + mean(recall), 1e-12),
                "mAP": mean(ranked),
                "micro_auc": roc_auc_score(truth[known], scores[known])
                if 0 < there.sum() < known.sum()
                else float("nan"),
                "macro_auc": mean(parted),
                "exact": right.mean(),
            }.items()
        } | {
            "undefined_classes": float(truth.shape[1] - len(parted)),
            "log_loss": self.nll / int(labelled.sum()),
        }


def mean(values: list[float]) -> float:
    """NaN where there are none."""
    return sum(values) / len(values) if values else float("nan")
