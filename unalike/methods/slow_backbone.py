"""Local epochs that move the backbone (encoder and projection) more slowly than the head, or not
at all: a few labels would soon move it away from what alignment reached."""

from typing import Any

import torch
from torch import Tensor

from unalike.core.operations import graph_safe, operation
from unalike.core.program import ClientProgram

SLOW_BACKBONE = "gently"  # name of the optimizer


class SlowBackboneProgram(ClientProgram):
    """Trains its backbone at `backbone_lr_scale` times the learning rate of the head."""

    algorithm: Any

    @operation
    def train_gently(self, epoch: int | None = None) -> float:
        """The round's local epochs, or one of them, with a slower or frozen backbone."""
        epochs = None if epoch is None else range(epoch, epoch + 1)
        loss = self.task_loss if self.algorithm.backbone_lr_scale else self.head_loss
        return self.learn(epochs, self.optimizer(SLOW_BACKBONE), loss)

    @graph_safe
    def head_loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
        """The task's loss with a frozen backbone, batch statistics included."""
        self.model.encoder.eval()
        with torch.no_grad():
            features = self.model.features(x)
        self.model.encoder.train()
        return self.error(self.model.head(features), y)

    def optimizer(
        self, name: str = "task", rate: float | None = None, fresh: bool = False
    ) -> torch.optim.Optimizer:
        optimizer = super().optimizer(name, rate, fresh)
        if name == SLOW_BACKBONE and len(optimizer.param_groups) == 1:
            self.slow_down_backbone(optimizer)
        return optimizer

    def slow_down_backbone(self, optimizer: torch.optim.Optimizer) -> None:
        """Split the optimizer's only group into the head's and, at a lower rate, the backbone's."""
        (group,) = optimizer.param_groups
        head = {id(p) for p in self.model.head.parameters()}
        slower = dict(group)
        for rate in ("lr", "initial_lr"):
            if rate in group:
                slower[rate] = group[rate] * self.algorithm.backbone_lr_scale
        optimizer.param_groups[:] = [
            {**group, "params": [p for p in group["params"] if id(p) in head]},
            {**slower, "params": [p for p in group["params"] if id(p) not in head]},
        ]
