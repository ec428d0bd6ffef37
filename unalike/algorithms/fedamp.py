"""FedAMP: clients with similar models help each other most, by attentive message passing.

Huang et al., "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021,
https://arxiv.org/abs/2007.03797.

The server keeps everyone's model and sends client i the mixture u_i = sum_j xi_ij w_j with
xi_ij = alpha_k A'(||w_i - w_j||^2) for j != i and the rest for itself (eq. 4 and 5),
A(x) = 1 - exp(-x / sigma). The client minimises F(w) + lambda / (2 alpha_k) ||w - u_i||^2 (eq. 6).
alpha_k is constant here, without the paper's decay; weights of others that exceed 1 together are
scaled to 1. Left out: HeurFedAMP's cosine weights.
"""

from dataclasses import dataclass
from math import exp
from typing import Annotated, ClassVar

from pydantic import Field, NonNegativeFloat
from torch import Tensor

from unalike.base.message import Value
from unalike.base.types import Parameters
from unalike.core.federation import Federation
from unalike.methods.averaging import mean_states
from unalike.methods.personal import PersonalModel, PersonalProgram, squared_distance

PositiveFloat = Annotated[float, Field(gt=0)]


@dataclass
class FedAMP(PersonalModel):
    """A mixture of all models for each client, weighted by similarity of parameters.

    Args:
        lam: lambda, the pull towards the mixture.
        alpha: alpha_k, the step size of the server.
        sigma: distance scale of the similarity A.
    """

    merges: ClassVar[bool] = False

    lam: NonNegativeFloat = 1.0
    alpha: PositiveFloat = 1e4
    sigma: PositiveFloat = 1e6

    def aggregate(
        self, fed: Federation, group: str, states: dict[str, Parameters], weights: dict[str, float]
    ) -> None:
        """Keep the members' models; mixtures are made when they are sent."""
        fed.state.setdefault("members", {}).setdefault(group, {}).update(states)

    def build_messages(self, fed: Federation, clients: list[str]) -> dict[str, dict[str, Value]]:
        members = fed.state.get("members", {})
        messages: dict[str, dict[str, Value]] = {}
        for client in clients:
            group = fed.state["group"][client]
            models = members.get(group, {})
            if client in models:
                shares = self.attention(models, client)
                messages[client] = {"parameters": mean_states(models, shares)}
            else:
                messages[client] = {"parameters": fed.state["models"][group]}
        return messages

    def attention(self, models: dict[str, Parameters], client: str) -> dict[str, float]:
        """xi_i: the weight of each model in the mixture of a client; they sum to 1."""
        shares = {}
        for other, model in models.items():
            if other != client:
                distance = squared_distance(models[client], model)
                shares[other] = self.alpha * exp(-distance / self.sigma) / self.sigma
        total = sum(shares.values())
        if total > 1:
            shares = {other: share / total for other, share in shares.items()}
        shares[client] = 1 - sum(shares.values())
        return shares

    class Program(PersonalProgram):
        algorithm: "FedAMP"

        def loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
            method = self.algorithm
            return super().loss(x, y) + method.lam / (2 * method.alpha) * self.squared_drift()
