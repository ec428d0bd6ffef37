"""FedProx (Li 2020): FedAvg whose clients are held near the parameters they were sent."""

from dataclasses import dataclass

from torch import Tensor

from unalike.methods.averaging import Averaging, AveragingProgram


@dataclass
class FedProx(Averaging):
    """Local loss + mu / 2 * ||w - w_sent||^2 (eq. 2)."""

    mu: float = 0.01

    class Program(AveragingProgram):
        algorithm: "FedProx"

        def loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
            return super().loss(x, y) + self.algorithm.mu / 2 * self.drift()
