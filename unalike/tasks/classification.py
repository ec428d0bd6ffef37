"""One label of several. Knows nothing of where the samples come from."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from unalike.tasks.task import UNKNOWN, Labels, Task, check_whole


@dataclass(frozen=True)
class Classification(Task):
    """Output (B, classes) logits, labels (B,) whole numbers."""

    name: ClassVar[str] = "classification"
    metric: ClassVar[str] = "accuracy"
    classifies: ClassVar[bool] = True
    single_label: ClassVar[bool] = True

    if TYPE_CHECKING:  # labels may be a number; they are stored as names

        def __init__(self, labels: Labels) -> None: ...

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Cross entropy, mean over the known labels; 0 where none is known.

        >>> round(Classification(4).loss(torch.zeros(2, 4), torch.tensor([0, 3])).item(), 3)
        1.386
        """
        total = F.cross_entropy(output, y.long(), ignore_index=UNKNOWN, reduction="sum")
        return total / (y != UNKNOWN).sum().clamp(min=1)

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
        wrong = y[(y < 0) | (y >= classes)]
        if len(wrong):
            raise ValueError(
                f"label {int(wrong[0])} does not fit {classes} classes: labels run from 0 to {classes - 1}"
            )


class ClassificationMeter:
    """Keeps truth and guess of every sample. macro_f1 is the mean over classes seen in either."""

    def __init__(self):
        self.truth, self.guess, self.nll = [], [], 0.0

    def add(self, output: Tensor, y: Tensor) -> None:
        output, y = output.detach(), y.long()
        known = y != UNKNOWN
        output, y = output[known], y[known]
        self.truth.append(y.cpu())
        self.guess.append(output.argmax(-1).cpu())
        self.nll += F.cross_entropy(output.double(), y, reduction="sum").item()

    def result(self) -> dict[str, float]:
        from sklearn.metrics import accuracy_score, f1_score

        if not sum(map(len, self.truth)):
            raise ValueError("nothing to measure: the meter was given no labelled sample")
        truth, guess = torch.cat(self.truth).numpy(), torch.cat(self.guess).numpy()
        return {
            "accuracy": 100 * float(accuracy_score(truth, guess)),
            "macro_f1": 100 * float(f1_score(truth, guess, average="macro", zero_division=0)),
            "log_loss": self.nll / len(truth),
        }
