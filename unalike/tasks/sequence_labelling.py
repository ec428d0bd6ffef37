"""Sequence labelling: one class for every step of a sequence, such as a word or a second."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from unalike.base.errors import UserError
from unalike.tasks.segmentation import Segmentation, SegmentationMeter
from unalike.tasks.task import Labels


@dataclass(frozen=True)
class SequenceLabelling(Segmentation):
    """Output (B, classes, steps) logits; labels (B, steps) integers, `ignore` where unknown.

    Padding is ignored by the same mark. If an encoder has fewer steps than there are labels, loss
    and meter stretch the output.

    Args:
        labels: names of the classes, or their number.
        ignore: the label of steps that count for nothing.
    """

    ignore: int = -100  # as in PyTorch and Hugging Face

    name: ClassVar[str] = "sequence_labelling"
    metric: ClassVar[str] = "accuracy"
    dense_axes: ClassVar[int] = 1
    place: ClassVar[str] = "step"
    axes: ClassVar[tuple[str, ...]] = ("n", "steps")

    if TYPE_CHECKING:  # labels may be a number; they are stored as names

        def __init__(self, labels: Labels, ignore: int = -100) -> None: ...

    def head(self, width: int) -> nn.Module:  # type: ignore[override]
        """Build a head from a feature map (B, width, steps) to (B, classes, steps)."""
        return StepHead(
            nn.Conv1d(width, width, 1), nn.ReLU(), nn.Conv1d(width, len(self.labels), 1)
        )

    def meter(self) -> "SequenceMeter":
        return SequenceMeter(len(self.labels), self.ignore)


class StepHead(nn.Sequential):
    """Layers over the steps of a sequence."""

    def forward(self, features: Tensor) -> Tensor:
        if features.dim() != 3:
            raise UserError(
                "sequence labelling needs an encoder whose grid(x) is (n, width, steps), such as "
                f"cnn1d, gru1d or transformer1d; got {tuple(features.shape)}"
            )
        return super().forward(features)


class SequenceMeter(SegmentationMeter):
    """`accuracy` over steps, `macro_f1` over classes that occur, both in percent; `log_loss`."""

    def result(self) -> dict[str, float]:
        metrics = super().result()
        hits = self.confusion.diagonal().double()
        occurrences = self.confusion.sum(0) + self.confusion.sum(1)
        f1 = (2 * hits / occurrences)[occurrences > 0]
        return {
            "accuracy": metrics["pixel_accuracy"],
            "macro_f1": 100 * torch.mean(f1).item(),
            "log_loss": metrics["log_loss"],
        }
