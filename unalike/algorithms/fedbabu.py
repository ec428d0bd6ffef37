"""FedBABU: the body is trained and averaged with a fixed random head, then all is fine-tuned.

Oh, Kim and Yun, "FedBABU: Toward Enhanced Representation for Federated Image Classification",
ICLR 2022, https://arxiv.org/abs/2106.06042.

All clients with the same labels have the same initial head, which is neither trained nor sent
during the rounds (Algorithm 1). At the end every client fine-tunes the whole model (Sec. 4.3).
Left out: fine-tuning of the head alone.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from unalike.base.randomness import scope
from unalike.methods.personal import FineTuning, FineTuningProgram, frozen
from unalike.models.model import Model


@dataclass
class FedBABU(FineTuning):
    """Body aggregation and body update, with fine-tuning of the whole model at the end."""

    needs_head: ClassVar[bool] = True

    def shares(self, name: str) -> bool:
        return not name.startswith("head.")

    class Program(FineTuningProgram):
        algorithm: "FedBABU"

        def build(self, encoder: nn.Module) -> Model:
            model = super().build(encoder)
            task = self.client.task
            with scope(self.seed, "head", task.name, *task.labels):
                model.head = self.head(self.encoder_width(encoder))
            return model

        def train_round(self) -> float:
            with frozen(self.model.head):
                return self.learn(optimizer=self.optimizer(fresh=True))
