"""FedRoD: a generic head that is averaged, and a personal head on top of its logits.

Chen and Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification",
ICLR 2022, https://arxiv.org/abs/2107.00778.

Body and generic head are trained with the balanced softmax loss (eq. 8: logits + log of the number
of samples of their class) and averaged. The personal head, trained on the empirical loss, corrects
the generic logits of fixed features: h_G(z) + h_P(z) (eq. 9). A client ends with that sum. Left
out: the hypernetwork that makes personal heads, and other class-balanced losses. Tasks other than
classification have the plain loss for both.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import Tensor, nn

from unalike.methods.averaging import Averaging, AveragingProgram
from unalike.methods.prototypes import count_labels
from unalike.models.model import Model
from unalike.tasks import Task


class TwoHeads(Model):
    """A model whose output is the sum of a generic and a personal head."""

    def __init__(self, model: Model, personal_head: nn.Module):
        super().__init__(model.encoder, model.projection, model.head, model.dense)
        self.personal_head = personal_head

    def forward(self, x: Tensor | dict) -> Tensor:
        z = self.features(x)
        return self.head(z) + self.personal_head(z)


@dataclass
class FedRoD(Averaging):
    """Robust decoupling: two heads with two losses."""

    personalised: ClassVar[bool] = True

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return task.labelled and not task.paired and not task.headless

    def shares(self, name: str) -> bool:
        return not name.startswith("personal_head.")

    class Program(AveragingProgram):
        algorithm: "FedRoD"
        model: TwoHeads

        def build(self, encoder: nn.Module) -> Model:
            return TwoHeads(super().build(encoder), self.head(self.encoder_width(encoder)))

        @cached_property
        def log_counts(self) -> Tensor | float:
            """(labels,): log of the number of samples of each class; -inf where there are none."""
            if not self.client.task.single_label or self.client.task.dense:
                return 0.0
            return count_labels(self).log()

        def loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
            z = self.model.features(x)
            generic = self.model.head(z)
            personal = generic.detach() + self.model.personal_head(z.detach())
            return self.error(generic + self.log_counts, y) + self.error(personal, y)
