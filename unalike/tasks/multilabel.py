"""Any number of labels at once, some of them perhaps unknown. Knows nothing of where the samples come from."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from unalike.tasks.task import Task


@dataclass(frozen=True)
class MultiLabel(Task):
    """Output (B, labels) logits, labels (B, labels) floats: 1 present, 0 absent, NaN or -1 unknown."""

    name: ClassVar[str] = "multilabel"
    metric: ClassVar[str] = "micro_f1"

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Binary cross entropy, mean over the known entries; 0 where none is known.

        >>> round(MultiLabel(2).loss(torch.zeros(1, 2), torch.tensor([[1.0, -1.0]])).item(), 3)
        0.693
        """
        entries, known = known_losses(output, y)
        return entries.sum() / known.sum().clamp(min=1)

    def imitate(self, output: Tensor, teacher: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(output, teacher.sigmoid())

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
            raise ValueError(f"a multilabel label is 1, 0, or -1 or NaN where unknown, got {float(wrong[0]):g}")


def known_losses(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Binary cross entropy of every entry, 0 where the label is unknown, and which are known; both like `y`."""
    known = y >= 0  # false for -1 and for NaN
    target = torch.where(known, y, torch.zeros_like(y)).to(output.dtype)
    return F.binary_cross_entropy_with_logits(output, target, reduction="none") * known, known


class MultiLabelMeter:
    """Keeps score and truth of every sample; a label counts as given above probability 0.5, unknown labels count nowhere.

    macro_f1 is the mean over labels known for some sample (0 for one neither present nor given, as in scikit-learn);
    exact is the share of samples with every known label right; mAP is the mean over labels present in some sample,
    and `undefined_classes` counts the others; log_loss is the sum over a sample's labels, mean over samples.
    """

    def __init__(self):
        self.scores, self.truth, self.nll = [], [], 0.0

    def add(self, output: Tensor, y: Tensor) -> None:
        output = output.detach()
        self.scores.append(output.cpu().double())
        self.truth.append(y.cpu().double())
        self.nll += known_losses(output.double(), y)[0].sum().item()

    def result(self) -> dict[str, float]:
        from sklearn.metrics import average_precision_score, f1_score

        if not any((y >= 0).any() for y in self.truth):
            raise ValueError("nothing to measure: the meter was given no labelled sample")
        scores, truth = torch.cat(self.scores).numpy(), torch.cat(self.truth).numpy()
        known, guess = truth >= 0, scores > 0
        labels = range(truth.shape[1])
        f1 = [f1_score(truth[known[:, k], k], guess[known[:, k], k], zero_division=0) for k in labels if known[:, k].any()]
        present = [k for k in labels if (truth[:, k] == 1).any()]
        precision = [average_precision_score(truth[known[:, k], k], scores[known[:, k], k]) for k in present]
        labelled = known.any(1)
        right = ((guess == truth) | ~known).all(1)[labelled]
        return {
            "micro_f1": 100 * float(f1_score(truth[known], guess[known], zero_division=0)),
            "macro_f1": 100 * float(sum(f1) / len(f1)),
            "exact": 100 * float(right.mean()),
            "mAP": 100 * float(sum(precision) / len(precision)) if precision else float("nan"),
            "undefined_classes": float(truth.shape[1] - len(present)),
            "log_loss": self.nll / int(labelled.sum()),
        }
