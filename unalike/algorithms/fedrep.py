"""FedRep: the head is trained first, then the body, and only the body is averaged.

Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021,
https://arxiv.org/abs/2102.07078.

In a round a client trains its head for `head_epochs` with the body that it was sent frozen, then
the body for the round's local epochs with the head frozen (Algorithm 1). Left out: further head
updates of new clients after the last round.
"""

from dataclasses import dataclass

from unalike.methods.averaging import AveragingProgram
from unalike.methods.personal import SharedBody, frozen
from unalike.tasks import Task
from unalike.training.loop import Positive


@dataclass
class FedRep(SharedBody):
    """Alternating training of head and body.

    Args:
        head_epochs: epochs of the head, before the local epochs of the body.
    """

    head_epochs: Positive = 10

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return task.labelled and not task.paired and not task.headless

    class Program(AveragingProgram):
        algorithm: "FedRep"

        def train_round(self) -> float:
            model = self.model
            head_epochs = range(
                self.training.epochs, self.training.epochs + self.algorithm.head_epochs
            )
            with frozen(model.encoder), frozen(model.projection):
                self.learn(head_epochs, self.optimizer(fresh=True))
            with frozen(model.head):
                return self.learn(optimizer=self.optimizer(fresh=True))
