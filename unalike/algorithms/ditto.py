"""Ditto: a personal model for each client, kept near the federated one.

Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021,
https://arxiv.org/abs/2012.04221.

Each round a client trains the exchanged model w as in FedAvg, and its own model v on
h(v; w_t) = F(v) + lambda / 2 ||v - w_t||^2 (eq. Ditto and Algorithm 1), w_t what it was sent. Left
out: other solvers of the global objective than FedAvg, and a lambda chosen by each client.
"""

from dataclasses import dataclass

from pydantic import NonNegativeFloat
from torch import Tensor

from unalike.methods.personal import SecondModel, SecondModelProgram


@dataclass
class Ditto(SecondModel):
    """FedAvg of one model, and a second one that stays near it.

    Args:
        lam: lambda, the pull of the personal model towards the common one.
    """

    lam: NonNegativeFloat = 1.0

    class Program(SecondModelProgram):
        algorithm: "Ditto"

        def train_round(self) -> float:
            with self.training_of(self.exchanged):
                self.learn(optimizer=self.optimizer(fresh=True), loss=self.task_loss)
            return self.learn(optimizer=self.optimizer(fresh=True))

        def loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
            """h(v; w_t) of a batch."""
            return super().loss(x, y) + self.algorithm.lam / 2 * self.squared_drift()
