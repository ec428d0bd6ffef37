"""FedAvgM: federated averaging with momentum at the server.

Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", 2019, https://arxiv.org/abs/1909.06335.

The server keeps v = beta v + Delta and moves by v (Sec. 4.3), Delta the mean change of the clients'
models. Nothing is left out.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from unalike.methods.server_optimizer import Decay, ServerOptimizer


@dataclass
class FedAvgM(ServerOptimizer):
    """Momentum of the mean change.

    Args:
        momentum: beta, of the server.
    """

    momentum: Decay = 0.9

    def step(self, slot: dict[str, Tensor], delta: Tensor) -> Tensor:
        velocity = slot.get("velocity", torch.zeros_like(delta)).to(delta)
        slot["velocity"] = self.momentum * velocity + delta
        return slot["velocity"]
