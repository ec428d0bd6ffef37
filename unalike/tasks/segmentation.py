"""Semantic segmentation: one class for every pixel."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unalike.tasks.counts import confusion_matrix
from unalike.tasks.task import Labels, Task, check_whole


@dataclass(frozen=True)
class Segmentation(Task):
    """Output (B, classes, h, w) logits; labels (B, H, W) integers, `ignore` where unknown.

    If the sizes differ, loss and meter resize the output to the labels.

    Args:
        labels: names of the classes, or their number.
        ignore: the label of unknown pixels.
    """

    ignore: int = 255

    name: ClassVar[str] = "segmentation"
    metric: ClassVar[str] = "miou"
    classifies: ClassVar[bool] = True
    dense: ClassVar[bool] = True
    place: ClassVar[str] = "pixel"  # what has a label, for messages
    axes: ClassVar[tuple[str, ...]] = ("n", "h", "w")  # of the labels

    if TYPE_CHECKING:  # labels may be a number; they are stored as names

        def __init__(self, labels: Labels, ignore: int = 255) -> None: ...

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 <= self.ignore < len(self.labels):
            raise ValueError(
                f"{self.name} ignores label {self.ignore}, which is class "
                f"{self.labels[self.ignore]!r}: choose one outside 0 to {len(self.labels) - 1}"
            )

    def head(self, width: int, size: tuple[int, int] | None = None) -> nn.Module:
        """Build a head from a feature map (B, width, h, w) to (B, classes, h, w).

        Args:
            size: resize the output to (B, classes, *size).
        """
        layers = [nn.Conv2d(width, width, 1), nn.ReLU(), nn.Conv2d(width, len(self.labels), 1)]
        if size is not None:
            layers.append(nn.Upsample(size=tuple(size), mode="bilinear", align_corners=False))
        return nn.Sequential(*layers)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the cross entropy, mean over known places; 0 if none is known."""
        logits = resize_to(output, y)
        total = F.cross_entropy(logits, y.long(), ignore_index=self.ignore, reduction="sum")
        return total / (y != self.ignore).sum().clamp(min=1)

    def imitate(self, output: Tensor, teacher: Tensor) -> Tensor:
        return -(teacher.softmax(1) * resize_to(output, teacher).log_softmax(1)).sum(1).mean()

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
        check_whole(y, self.name, self.axes)
        classes = len(self.labels)
        outside = y[((y < 0) | (y >= classes)) & (y != self.ignore)]
        if len(outside):
            raise ValueError(
                f"{self.place} label {int(outside[0])} does not fit {classes} classes: "
                f"labels run from 0 to {classes - 1}, and {self.ignore} where unknown"
            )

    def unmeasured(self, y: Tensor) -> str | None:
        return None if bool((y != self.ignore).any()) else f"no {self.place} of them is labelled"


def resize_to(output: Tensor, target: Tensor) -> Tensor:
    """Return an output (B, classes, h, w) at the height and width of `target`, bilinearly.

    Of a sequence, (B, classes, steps), at its number of steps.
    """
    size = target.shape[2 - output.dim() :]
    if output.shape[2:] == size:
        return output
    mode = "bilinear" if output.dim() == 4 else "linear"
    return F.interpolate(output, size=size, mode=mode, align_corners=False)


class SegmentationMeter:
    """Accumulates a confusion matrix.

    `miou` is the mean over classes that occur in labels or predictions; `log_loss` is per pixel.
    """

    def __init__(self, classes: int, ignore: int):
        self.classes = classes
        self.ignore = ignore
        self.confusion = torch.zeros(classes, classes, dtype=torch.int64)  # truth by prediction
        self.log_loss = 0.0  # sum over pixels

    def add(self, output: Tensor, y: Tensor) -> None:
        y = y.long()
        at_least_float32 = torch.promote_types(output.dtype, torch.float32)
        output = resize_to(output.detach().to(at_least_float32), y)
        predicted = output.max(1).indices  # faster than argmax
        losses = F.cross_entropy(output, y, ignore_index=self.ignore, reduction="none")
        self.log_loss += losses.sum(dtype=torch.float64).item()
        known = y != self.ignore
        self.confusion += confusion_matrix(y[known], predicted[known], self.classes).cpu()

    def result(self) -> dict[str, float]:
        pixels = self.confusion.sum().item()
        if not pixels:
            raise ValueError("nothing to measure: the meter was given no labelled pixel")
        correct = self.confusion.diagonal().double()
        union = self.confusion.sum(0) + self.confusion.sum(1) - correct
        return {
            "miou": 100 * (correct / union)[union > 0].mean().item(),
            "pixel_accuracy": 100 * correct.sum().item() / pixels,
            "log_loss": self.log_loss / pixels,
        }
