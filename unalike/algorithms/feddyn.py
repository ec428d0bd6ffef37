"""FedDyn: a dynamic regulariser makes local optima agree with the global one.

Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021,
https://arxiv.org/abs/2111.04263.

Client k minimises L_k(w) - <g_k, w> + alpha / 2 ||w - w_t||^2 (eq. 1) and then sets
g_k = g_k - alpha (w_k - w_t). The server keeps h = h - alpha / m sum_k (w_k - w_t) over the m
clients of a group, and sends mean(w_k) - h / alpha (Algorithm 1). Nothing is left out.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from unalike.base.types import Parameters
from unalike.core.federation import Federation
from unalike.methods.averaging import Averaging, AveragingProgram
from unalike.methods.server_optimizer import is_optimized


@dataclass
class FedDyn(Averaging):
    """Averaging with linear and quadratic terms that change every round.

    Args:
        mean: weight of a client: the same for all ("uniform"), or its number of "samples".
        alpha: weight of the quadratic term.
    """

    mean: Literal["samples", "uniform"] = "uniform"
    alpha: Annotated[float, Field(gt=0)] = 0.01

    def aggregate(
        self, fed: Federation, group: str, states: dict[str, Parameters], weights: dict[str, float]
    ) -> None:
        model = fed.state["models"][group]
        mean = self.average(states, weights)
        drift = fed.state.setdefault("drift", {}).setdefault(group, {})  # h
        members = sum(key == group for key in fed.state["group"].values())
        for name, tensor in mean.items():
            if is_optimized(name, tensor):
                start = model[name].to(tensor)
                change = torch.stack([state[name].to(tensor) - start for state in states.values()])
                before = drift.get(name, torch.zeros_like(tensor)).to(tensor)
                drift[name] = before - self.alpha / members * change.sum(0)
                mean[name] = tensor - drift[name] / self.alpha
        fed.state["models"][group] = mean

    class Program(AveragingProgram):
        algorithm: "FedDyn"

        def train_round(self) -> float:
            alpha = self.algorithm.alpha
            trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
            zeros = {n: torch.zeros_like(p) for n, p in trained.items()}
            self.gradient: Parameters = self.memory.get("gradient", zeros)  # g_k
            loss = super().train_round()
            self.memory["gradient"] = {
                n: self.gradient[n] - alpha * (p.detach() - self.round_start[n].to(p))
                for n, p in trained.items()
            }
            return loss

        def loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
            """Eq. 1 of a batch."""
            parameters = dict(self.model.named_parameters())
            linear = sum((g * parameters[n]).sum() for n, g in self.gradient.items())
            quadratic = self.algorithm.alpha / 2 * self.squared_drift()
            return super().loss(x, y) - linear + quadratic
