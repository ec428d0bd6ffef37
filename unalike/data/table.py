"""A dataset with several possible targets, each with its task. Knows nothing of who gets which rows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from unalike.tasks import Task


@dataclass(frozen=True, eq=False)
class Table:
    """Inputs x (n, channels, height, width) float32, targets with n rows each and a task of the same name, and two sets of rows.

    `train` and `test` are row numbers (int64) without overlap.
    """

    x: Tensor
    targets: dict[str, Tensor]
    tasks: dict[str, Task]
    train: Tensor
    test: Tensor

    def __post_init__(self):
        if self.targets.keys() != self.tasks.keys():
            raise ValueError(f"every target needs a task: targets are {sorted(self.targets)}, tasks are {sorted(self.tasks)}")
        for name, y in self.targets.items():
            if len(y) != len(self.x):
                raise ValueError(f"target {name!r} has {len(y)} rows for {len(self.x)} inputs")
            self.tasks[name].check(y)
        rows = torch.cat([self.train, self.test])
        if len(rows.unique()) != len(rows) or (rows < 0).any() or (rows >= len(self.x)).any():
            raise ValueError(f"train and test are different rows from 0 to {len(self.x) - 1}, got some twice or outside")
