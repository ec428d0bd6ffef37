"""A small model that clients of different architectures with inputs of one shape have in common."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from unalike.core.program import ClientProgram
from unalike.methods.personal import SecondModel, SecondModelProgram
from unalike.models.encoders import CNN, MLP
from unalike.models.model import Model
from unalike.tasks import Task


def build_common_encoder(program: ClientProgram, width: int) -> nn.Module:
    """A small encoder for the client's inputs: a CNN for images, an MLP for other numbers.

    Inputs by modality, and token numbers, get an encoder of the client's own architecture.

    Args:
        width: of its features; with an encoder of the client's own, what that one has.
    """
    x = program.client.to_device(program.client.train.rows(torch.arange(1))[0])
    if isinstance(x, dict) or not x.is_floating_point():
        return program.client.encoder(program.seed)
    shape = tuple(x.shape[1:])
    if len(shape) == 3 and min(shape[1:]) >= 2:
        return CNN(shape, width=width)
    return MLP(shape, (width,), width)


class CommonModelProgram(SecondModelProgram):
    """Exchanges a small model of the common architecture, and trains it together with its own."""

    algorithm: Any
    exchanged: Model

    def build_exchanged(self) -> Model:
        encoder = build_common_encoder(self, self.algorithm.width)
        encoder = encoder.to(self.client.device, self.client.dtype)
        head = self.client.task.head(self.encoder_width(encoder))
        return Model(encoder, nn.Identity(), head)

    def train_round(self) -> float:
        return self.train_together()

    def train_together(self, *modules: nn.Module) -> float:
        """The local epochs of the own and the common model, and of further modules.

        In `loss` the own model is `self.own`.
        """
        self.own = self.model
        with self.training_of(nn.ModuleList([self.own, self.exchanged, *modules])):
            return self.learn(optimizer=self.optimizer(fresh=True))


@dataclass
class CommonModel(SecondModel):
    """A small model for inputs of one shape is averaged; clients keep their own, of any kind."""

    Program: ClassVar[type[ClientProgram]] = CommonModelProgram

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return task.labelled and not (task.paired or task.dense or task.headless)
