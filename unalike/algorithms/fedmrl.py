"""FedMRL: the features of a common small model and of the client's own are fused.

Yi et al., "Federated Model Heterogeneous Matryoshka Representation Learning", NeurIPS 2024,
https://arxiv.org/abs/2406.00488.

A client joins the features of both encoders and projects them (eq. 5). The common head predicts
from the first `sub_width` entries, the own head from all (eq. 6); the loss is the sum of both
(eq. 7). The common encoder and head are averaged; the projection is the client's. Predictions are
the own head's. Nothing is left out.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from unalike.methods.averaging import Averaging, AveragingProgram
from unalike.methods.common_model import build_common_encoder
from unalike.models.model import Model
from unalike.tasks import Task
from unalike.training.loop import Positive


class FusedModel(Model):
    """An own and a common encoder, whose features are joined and projected."""

    def __init__(
        self,
        model: Model,
        projection: nn.Module,
        common_encoder: nn.Module,
        common_head: nn.Module,
    ):
        super().__init__(model.encoder, projection, model.head)
        self.common_encoder = common_encoder
        self.common_head = common_head

    def features(self, x: Tensor | dict) -> Tensor:
        return self.projection(torch.cat([self.common_encoder(x), self.encoder(x)], -1))


@dataclass
class FedMRL(Averaging):
    """Matryoshka representations of two models.

    Args:
        sub_width: of the common model's features, and of its part of the fused ones.
    """

    personalised: ClassVar[bool] = True

    sub_width: Positive = 128

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return task.labelled and not (task.paired or task.dense or task.headless)

    def shares(self, name: str) -> bool:
        return name.startswith("common_")

    class Program(AveragingProgram):
        algorithm: "FedMRL"
        model: FusedModel

        def build(self, encoder: nn.Module) -> Model:
            model = super().build(encoder)
            own = self.encoder_width(encoder)
            common_encoder = build_common_encoder(self, self.algorithm.sub_width)
            common = self.encoder_width(common_encoder.to(self.client.device, self.client.dtype))
            head = self.client.task.head(min(self.algorithm.sub_width, own))
            return FusedModel(model, nn.Linear(common + own, own), common_encoder, head)

        def loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
            z = self.model.features(x)
            coarse = z[:, : self.algorithm.sub_width]
            return self.error(self.model.head(z), y) + self.error(self.model.common_head(coarse), y)
