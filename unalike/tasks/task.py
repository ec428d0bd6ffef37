"""What every task offers: a head, a loss, a meter and a check of its labels. Knows nothing of clients, encoders or training."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn


class Meter(Protocol):
    """Counts over batches: `add` each batch, then ask for the `result`. Batches lie on the processor, of dense tasks on the GPU."""

    def add(self, output: Tensor, y: Tensor) -> None: ...

    def result(self) -> dict[str, float]:
        """Every metric in percent, and `log_loss` in nats."""
        ...


@dataclass(frozen=True)
class Task:
    """What a client learns. `labels` names the classes; a number n stands for the names "0" to "n-1".

    `loss` and `imitate` return a scalar and may run for many clients at once under `torch.func.vmap`.
    """

    labels: tuple[str, ...]

    name: ClassVar[str]
    metric: ClassVar[str]  # the one number a table shows
    dense: ClassVar[bool] = False  # True: the head takes a feature map (B, width, h, w)
    labelled: ClassVar[bool] = True  # False: nothing is learnt from labels, which only score

    def __post_init__(self):
        object.__setattr__(self, "labels", label_names(self.labels))

    def head(self, width: int) -> nn.Module:
        """From features (B, width) to the task's output: two linear layers, as in FedMuscle."""
        return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, len(self.labels)))

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """How far the output is from the labels; unknown labels count for nothing."""
        raise NotImplementedError

    def imitate(self, output: Tensor, teacher: Tensor) -> Tensor:
        """How far the output is from a teacher's output: soft cross entropy; detach the teacher to hold it still."""
        raise NotImplementedError

    def meter(self) -> Meter:
        raise NotImplementedError

    def check(self, y: Tensor) -> None:
        """Raises ValueError where the labels do not fit the task."""
        raise NotImplementedError

    def unmeasured(self, y: Tensor) -> str | None:
        """Why its metric has no value on samples with these labels, whatever is guessed; None: it has."""
        return None


def label_names(labels: int | Sequence[str]) -> tuple[str, ...]:
    """The names as a tuple; a number n gives "0" to "n-1".

    >>> label_names(3)
    ('0', '1', '2')
    """
    if isinstance(labels, int) and not isinstance(labels, bool):
        labels = tuple(str(label) for label in range(labels))
    if (
        not isinstance(labels, Sequence)
        or isinstance(labels, str)
        or not all(isinstance(label, str) for label in labels)
    ):
        raise ValueError(f"a task's labels are a list of names or their number, got {labels!r}")
    if not labels:
        raise ValueError("a task needs at least one label, got none")
    twice = sorted({label for label in labels if list(labels).count(label) > 1})
    if twice:
        raise ValueError(f"a task's labels must differ, got more than once: {', '.join(twice)}")
    return tuple(labels)


def check_whole(y: Tensor, name: str, axes: tuple[str, ...]) -> None:
    """Raises ValueError unless `y` holds whole numbers along the axes named, as ("n", "h", "w")."""
    if y.ndim != len(axes):
        raise ValueError(
            f"{name} labels have {len(axes)} axes ({', '.join(axes)}), got shape {tuple(y.shape)}"
        )
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise ValueError(f"{name} labels are whole numbers (torch.int64), got {y.dtype}")
