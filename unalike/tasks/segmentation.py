"""One label for every pixel. Knows nothing of where the images come from."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unalike.tasks.task import Labels, Task, check_whole


@dataclass(frozen=True)
class Segmentation(Task):
    """Output (B, classes, h, w) logits, labels (B, H, W) whole numbers, `ignore` where unknown.

    Where the sizes differ, loss and meter stretch the output to the labels.
    """

    ignore: int = 255

    name: ClassVar[str] = "segmentation"
    metric: ClassVar[str] = "miou"
    classifies: ClassVar[bool] = True
    dense: ClassVar[bool] = True

    if TYPE_CHECKING:  # labels may be a number; they are stored as names

        def __init__(self, labels: Labels, ignore: int = 255) -> None: ...

    def __post_init__(self):
        super().__post_init__()
        if 0 <= self.ignore < len(self.labels):
            raise ValueError(
                f"segmentation ignores label {self.ignore}, which is class {self.labels[self.ignore]!r}: choose one "
                f"outside 0 to {len(self.labels) - 1}"
            )

    def head(self, width: int, size: tuple[int, int] | None = None) -> nn.Module:
        """From a feature map (B, width, h, w) to (B, classes, h, w), or to (B, classes, *size) where a size is given."""
        layers = [nn.Conv2d(width, width, 1), nn.ReLU(), nn.Conv2d(width, len(self.labels), 1)]
        if size is not None:
            layers.append(nn.Upsample(size=tuple(size), mode="bilinear", align_corners=False))
        return nn.Sequential(*layers)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Cross entropy, mean over the known pixels; 0 where none is known."""
        total = F.cross_entropy(
            stretch(output, y), y.long(), ignore_index=self.ignore, reduction="sum"
        )
        return total / (y != self.ignore).sum().clamp(min=1)

    def imitate(self, output: Tensor, teacher: Tensor) -> Tensor:
        return -(teacher.softmax(1) * stretch(output, teacher).log_softmax(1)).sum(1).mean()

    @property
    def unknown_label(self) -> int:
        return self.ignore

    def probabilities(self, output: Tensor) -> Tensor:
        return output.softmax(1)

    def label_matrix(self, y: Tensor) -> Tensor:
        classes = torch.arange(len(self.labels), device=y.device)
        return (y.flatten(1)[:, :, None] == classes).any(1)

    def meter(self) -> "SegmentationMeter":
        return SegmentationMeter(len(self.labels), self.ignore)

    def check(self, y: Tensor) -> None:
        check_whole(y, self.name, ("n", "h", "w"))
        classes = len(self.labels)
        wrong = y[((y < 0) | (y >= classes)) & (y != self.ignore)]
        if len(wrong):
            raise ValueError(
                f"pixel label {int(wrong[0])} does not fit {classes} classes: labels run from 0 to {classes - 1}, "
                f"and {self.ignore} where unknown"
            )

    def unmeasured(self, y: Tensor) -> str | None:
        return None if bool((y != self.ignore).any()) else "no pixel of them is labelled"


def stretch(output: Tensor, like: Tensor) -> Tensor:
    """The output (B, classes, h, w) at the height and width of `like`, bilinearly."""
    if output.shape[-2:] == like.shape[-2:]:
        return output
    return F.interpolate(output, size=like.shape[-2:], mode="bilinear", align_corners=False)


class SegmentationMeter:
    """Keeps one confusion matrix, truth by guess. miou is the mean over classes seen in either; log_loss is per pixel."""

    def __init__(self, classes: int, ignore: int):
        self.classes, self.ignore = classes, ignore
        self.confusion, self.nll = torch.zeros(classes, classes, dtype=torch.int64), 0.0

    def add(self, output: Tensor, y: Tensor) -> None:
        from torchmetrics.functional.classification import multiclass_confusion_matrix

        output, y = (
            stretch(output.detach().to(torch.promote_types(output.dtype, torch.float32)), y),
            y.long(),
        )
        guess = output.max(1).indices  # faster than argmax
        self.confusion += multiclass_confusion_matrix(
            guess, y, self.classes, ignore_index=self.ignore, validate_args=False
        ).cpu()
        self.nll += (
            F.cross_entropy(output, y, ignore_index=self.ignore, reduction="none")
            .sum(dtype=torch.float64)
            .item()
        )

    def result(self) -> dict[str, float]:
        pixels = self.confusion.sum().item()
        if not pixels:
            raise ValueError("nothing to measure: the meter was given no labelled pixel")
        right = self.confusion.diagonal().double()
        union = self.confusion.sum(0) + self.confusion.sum(1) - right
        return {
            "miou": 100 * (right / union)[union > 0].mean().item(),
            "pixel_accuracy": 100 * right.sum().item() / pixels,
            "log_loss": self.nll / pixels,
        }
