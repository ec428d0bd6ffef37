"""FCCL: logits on public data are decorrelated across classes, and local training forgets little.

Huang, Ye and Du, "Learn from Others and Be Yourself in Heterogeneous Federated Learning", CVPR
2022; extended in https://arxiv.org/abs/2309.16286.

On public rows a client learns the cross-correlation M of its logits with the mean of all clients',
both normalised over the batch: sum_i (1 - M_ii)^2 + off_diagonal sum_{i != j} (1 + M_ij)^2 (eq. 3).
Locally it minimises CE + the divergence from its model before the local epochs (inter-domain
teacher) and from its own first local model (intra-domain teacher) (eq. 6 to 8). The first round's
local epochs stand for the paper's local pretraining. Labels are matched by name.
"""

import copy
from dataclasses import dataclass

import torch
from pydantic import NonNegativeFloat
from torch import Tensor

from unalike.core.federation import Federation
from unalike.core.operations import graph_safe, operation
from unalike.methods.distillation import DistillationProgram, distill_public
from unalike.methods.public_data import PublicTraining
from unalike.models.model import Model
from unalike.tasks import Task

EPSILON = 1e-5  # added to variances, as in batch norm
INTRA = "intra"  # in a program's memory: the model after the first local epochs


@dataclass
class FCCL(PublicTraining):
    """Federated cross-correlation and continual learning.

    Args:
        off_diagonal: weight of the correlations between different labels (eq. 3).
        dual: weight of each of the two teachers.
    """

    off_diagonal: NonNegativeFloat = 0.0051
    dual: NonNegativeFloat = 1.0

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return task.single_label and not task.dense

    def learn_from_public(self, fed: Federation, round: int) -> dict[str, float | None]:
        return distill_public(fed)

    class Program(DistillationProgram):
        algorithm: "FCCL"

        @graph_safe
        def distillation_loss(self, x: Tensor | dict, teacher: Tensor) -> Tensor:
            return correlation_loss(self.model(x), teacher, self.algorithm.off_diagonal)

        @operation
        def train(self, epoch: int | None = None) -> float:
            """The round's local epochs, with two teachers once there are any."""
            self.teachers: list[Model] = []
            if INTRA in self.memory:
                inter, intra = copy.deepcopy(self.model), copy.deepcopy(self.model)
                intra.load_state_dict(self.memory[INTRA])
                self.teachers = [teacher.eval().requires_grad_(False) for teacher in (inter, intra)]
            loss = self.learn(None if epoch is None else range(epoch, epoch + 1))
            if INTRA not in self.memory:
                state = self.model.state_dict()
                self.memory[INTRA] = {name: tensor.clone() for name, tensor in state.items()}
            return loss

        def loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
            output = self.model(x)
            loss = self.error(output, y)
            for teacher in self.teachers:
                with torch.no_grad():
                    target = teacher(x)
                loss = loss + self.algorithm.dual * self.client.task.imitate(output, target)
            return loss


def correlation_loss(output: Tensor, mean: Tensor, off_diagonal: float) -> Tensor:
    """Eq. 3 of logits (n, labels) and the mean logits of all clients, same shape."""
    correlation = normalise(output).mT @ normalise(mean) / len(output)  # (labels, labels)
    diagonal = torch.eye(len(correlation), dtype=torch.bool, device=output.device)
    own = ((1 - correlation) ** 2)[diagonal].sum()
    return own + off_diagonal * ((1 + correlation) ** 2)[~diagonal].sum()


def normalise(logits: Tensor) -> Tensor:
    """Mean 0 and variance 1 of each column."""
    centred = logits - logits.mean(0)
    return centred / (centred.square().mean(0) + EPSILON).sqrt()
