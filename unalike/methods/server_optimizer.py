"""Server optimizers: the change of the mean model is a pseudo-gradient for the server's own step.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 1,
https://arxiv.org/abs/2003.00295.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from unalike.base.types import Parameters
from unalike.core.federation import Federation
from unalike.methods.averaging import Averaging

Decay = Annotated[float, Field(ge=0, lt=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
STATISTICS = ("running_mean", "running_var")  # of batch norm, which are averaged as they are


def is_optimized(name: str, tensor: Tensor) -> bool:
    """Whether a tensor of a model is a parameter; counters and batch-norm statistics are not."""
    return tensor.is_floating_point() and not name.endswith(STATISTICS)


@dataclass
class ServerOptimizer(Averaging):
    """The server moves its model by `step` of the change Delta that clients propose."""

    def aggregate(
        self, fed: Federation, group: str, states: dict[str, Parameters], weights: dict[str, float]
    ) -> None:
        """x + step(mean - x), for each parameter."""
        model = fed.state["models"][group]
        mean = self.average(states, weights)
        slots = fed.state.setdefault("server_optimizer", {}).setdefault(group, {})
        for name, tensor in mean.items():
            if is_optimized(name, tensor):
                current = model[name].to(tensor.device)
                slot = slots.setdefault(name, {})
                mean[name] = current + self.step(slot, tensor - current).to(tensor.dtype)
        fed.state["models"][group] = mean

    def step(self, slot: dict[str, Tensor], delta: Tensor) -> Tensor:
        """The change of a parameter.

        Args:
            slot: what the optimizer remembers of this parameter; changed in place.
            delta: the mean change by clients.
        """
        raise NotImplementedError(f"{type(self).__name__} has no server step: write step(...)")


@dataclass
class AdaptiveServer(ServerOptimizer):
    """Algorithm 2: m = beta1 m + (1 - beta1) Delta; x = x + eta m / (sqrt(v) + tau).

    Args:
        mean: weight of a client: the same for all ("uniform"), or its number of "samples".
        server_lr: eta, the server's learning rate.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        tau: degree of adaptivity.
    """

    mean: Literal["samples", "uniform"] = "uniform"
    server_lr: PositiveFloat = 0.01
    beta1: Decay = 0.9
    beta2: Decay = 0.99
    tau: PositiveFloat = 1e-3

    def step(self, slot: dict[str, Tensor], delta: Tensor) -> Tensor:
        momentum = slot.get("momentum", torch.zeros_like(delta)).to(delta)
        second = slot.get("second", torch.full_like(delta, self.tau**2)).to(delta)
        slot["momentum"] = self.beta1 * momentum + (1 - self.beta1) * delta
        slot["second"] = self.second_moment(second, delta**2)
        return self.server_lr * slot["momentum"] / (slot["second"].sqrt() + self.tau)

    def second_moment(self, second: Tensor, square: Tensor) -> Tensor:
        """v after a round.

        Args:
            second: v before; tau^2 at first.
            square: Delta^2.
        """
        raise NotImplementedError(f"{type(self).__name__} has no v: write second_moment(...)")
