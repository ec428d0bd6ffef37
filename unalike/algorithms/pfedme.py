"""pFedMe: personal models as Moreau envelopes of the local losses.

Dinh, Tran and Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020,
https://arxiv.org/abs/2006.08848.

For each batch the personal model theta takes K gradient steps on f(theta) + lambda / 2
||theta - w||^2 (eq. 7), then the exchanged model w follows the envelope's gradient
lambda (w - theta) (eq. 5 and Algorithm 1). The server moves by beta towards the mean. The paper's
personal learning rates are from 0.005 to 0.1, by dataset. Nothing of it is left out.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from unalike.base.types import Parameters
from unalike.core.federation import Federation
from unalike.methods.averaging import mean_states
from unalike.methods.personal import SecondModel, SecondModelProgram
from unalike.tasks import Task
from unalike.training.loop import Positive

PositiveFloat = Annotated[float, Field(gt=0)]


@dataclass
class PFedMe(SecondModel):
    """Exchanged models follow the gradient of the Moreau envelopes.

    Args:
        lam: lambda, the pull of the personal model towards the exchanged one.
        steps: K, gradient steps of the personal model per batch.
        personal_lr: learning rate of the personal model.
        beta: step of the server towards the mean.
    """

    lam: PositiveFloat = 15.0
    steps: Positive = 5
    personal_lr: PositiveFloat = 0.03
    beta: PositiveFloat = 1.0

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return task.labelled and not task.paired

    def aggregate(
        self, fed: Federation, group: str, states: dict[str, Parameters], weights: dict[str, float]
    ) -> None:
        """w = (1 - beta) w + beta mean."""
        previous, mean = fed.state["models"][group], self.average(states, weights)
        shares = {"previous": 1 - self.beta, "mean": self.beta}
        fed.state["models"][group] = mean_states({"previous": previous, "mean": mean}, shares)

    class Program(SecondModelProgram):
        algorithm: "PFedMe"

        def train_round(self) -> float:
            self.personal = self.model.train()
            with self.training_of(self.exchanged):
                loss = self.learn(optimizer=self.optimizer(fresh=True), loss=Envelope(self).loss)
            for name, buffer in self.personal.named_buffers():
                self.exchanged.get_buffer(name).copy_(buffer)
            self.work += len(self.client.train) * self.training.epochs * (self.algorithm.steps - 1)
            return loss

        def loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
            """lambda / 2 ||w - theta||^2, whose gradient is the envelope's, after K steps."""
            lam = self.algorithm.lam
            pairs = [
                (theta, w)
                for theta, w in zip(
                    self.personal.parameters(), self.exchanged.parameters(), strict=True
                )
                if theta.requires_grad
            ]
            for _ in range(self.algorithm.steps):
                task_loss = self.error(self.personal(x), y)
                gradients = torch.autograd.grad(
                    task_loss, [theta for theta, _ in pairs], allow_unused=True
                )
                with torch.no_grad():
                    for (theta, w), gradient in zip(pairs, gradients, strict=True):
                        pull = lam * (theta - w)
                        step = pull if gradient is None else gradient + pull
                        theta.sub_(self.algorithm.personal_lr * step)
            return (
                lam
                / 2
                * torch.stack([((w - theta.detach()) ** 2).sum() for theta, w in pairs]).sum()
            )


class Envelope:
    """A program's loss for `learn`. It moves theta, so it must not be stacked with others' losses,
    as the program's own methods are."""

    def __init__(self, program: PFedMe.Program):
        self.program = program

    def loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
        return self.program.loss(x, y)
