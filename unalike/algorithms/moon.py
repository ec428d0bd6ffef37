"""MOON: local representations stay near the global model's and away from the last local one's.

Li, He and Song, "Model-Contrastive Federated Learning", CVPR 2021,
https://arxiv.org/abs/2103.16257.

Federated averaging with the local loss CE + mu l_con (eq. 4), l_con the contrast of eq. 3: z of the
model in training is positive with z of the model that was sent, negative with z of the client's
model after its last round. The first round of a client has no contrast. Left out: the projection
head; z is the head's input.
"""

import copy
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor
from torch.nn.functional import softplus

from unalike.methods.averaging import Averaging, AveragingProgram
from unalike.models.model import Model


@dataclass
class MOON(Averaging):
    """Model-contrastive learning.

    Args:
        mu: weight of the contrast.
        temperature: of the contrast.
    """

    needs_head: ClassVar[bool] = True

    mu: NonNegativeFloat = 1.0
    temperature: Annotated[float, Field(gt=0)] = 0.5

    class Program(AveragingProgram):
        algorithm: "MOON"

        def train_round(self) -> float:
            self.sent: Model = copy.deepcopy(self.model).eval().requires_grad_(False)
            self.previous: Model | None = None
            if "previous" in self.memory:
                self.previous = copy.deepcopy(self.sent)
                self.previous.load_state_dict(self.memory["previous"])
            loss = super().train_round()
            state = self.model.state_dict()
            self.memory["previous"] = {name: tensor.clone() for name, tensor in state.items()}
            return loss

        def loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
            """Eq. 4 of a batch."""
            task_loss = super().loss(x, y)
            if self.previous is None:
                return task_loss
            z = self.model.represent(x)
            with torch.no_grad():
                positive, negative = self.sent.represent(x), self.previous.represent(x)
            # -log(e^a / (e^a + e^b)) = softplus(b - a), a and b the cosines over the temperature
            gap = (z * (negative - positive)).sum(-1) / self.algorithm.temperature
            return task_loss + self.algorithm.mu * softplus(gap).mean()
