"""A dataset with several possible targets, each with its task."""

from dataclasses import dataclass

import torch
from torch import Tensor

from unalike.base.errors import UserError
from unalike.data.samples import Inputs
from unalike.tasks import Task


@dataclass(frozen=True, eq=False)
class Table:
    """What a dataset's loader returns. Which client gets which rows is decided elsewhere.

    Args:
        x: inputs (n, channels, height, width), float32 or bytes (uint8) that stand for brightness
            from 0 to 1; other shapes for other inputs; a dict of n rows each for modalities.
        targets: labels by name, n rows each.
        tasks: a task for each target, by the same names.
        train, test: row numbers (int64), disjoint unless `overlap`.
        overlap: rows may be trained on and scored, as where nothing is learned from labels.
    """

    x: Inputs
    targets: dict[str, Tensor]
    tasks: dict[str, Task]
    train: Tensor
    test: Tensor
    overlap: bool = False

    def __post_init__(self) -> None:
        if self.targets.keys() != self.tasks.keys():
            raise UserError(
                f"every target needs a task: targets are {sorted(self.targets)}, "
                f"tasks are {sorted(self.tasks)}"
            )
        modalities = self.x if isinstance(self.x, dict) else {"x": self.x}
        if not modalities:
            raise UserError("a table needs one modality or more, got none")
        sizes = {name: len(rows) for name, rows in modalities.items()}
        if len(set(sizes.values())) > 1:
            raise UserError(f"modalities need the same number of rows, got {sizes}")
        for name, y in self.targets.items():
            if len(y) != len(self):
                raise UserError(f"target {name!r} has {len(y)} rows for {len(self)} inputs")
            self.tasks[name].check(y)
        parts = [self.train, self.test] if self.overlap else [torch.cat([self.train, self.test])]
        for rows in parts:
            if len(rows.unique()) != len(rows) or (rows < 0).any() or (rows >= len(self)).any():
                raise UserError(
                    f"train and test are different rows from 0 to {len(self) - 1}, "
                    "got some twice or outside"
                )

    def __len__(self) -> int:
        return len(next(iter(self.x.values())) if isinstance(self.x, dict) else self.x)
