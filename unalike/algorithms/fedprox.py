"""FedProx: federated averaging with a proximal term.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020,
https://arxiv.org/abs/1812.06127.

As FedAvg, but a client is kept near the parameters w_t that it was sent. It minimises
h(w; w_t) = F(w) + mu / 2 ||w - w_t||^2 (eq. 2), F its task loss. Left out: a number of local
epochs that differs from client to client (gamma-inexact solutions).
"""

from dataclasses import dataclass

from pydantic import NonNegativeFloat
from torch import Tensor

from unalike.methods.averaging import Averaging, AveragingProgram


@dataclass
class FedProx(Averaging):
    """FedAvg whose local loss has the proximal term of eq. 2.

    Args:
        mu: weight of the proximal term.
    """

    mu: NonNegativeFloat = 0.01

    class Program(AveragingProgram):
        algorithm: "FedProx"

        def loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
            return super().loss(x, y) + self.algorithm.mu / 2 * self.squared_drift()
