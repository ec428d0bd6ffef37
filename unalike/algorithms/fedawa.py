"""FedAWA: the server learns how much each client counts, from the directions of their updates.

Shi et al., "FedAWA: Adaptive Optimization of Aggregation Weights in Federated Learning Using Client
Vectors", CVPR 2025, https://arxiv.org/abs/2503.15842.

With client vectors tau_k = w_k - w, the server takes some steps of Adam on logits whose softmax is
the weights lambda, to minimise sum_k lambda_k (||tau_k - sum_j lambda_j tau_j|| + 1 - cos(w_k, w)),
and averages with these. A client's logit is kept between rounds; it starts as its weight by `mean`.
Left out: the variant with weights for each layer (FedAWA-L).
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import cosine_similarity

from unalike.base.types import Parameters
from unalike.core.federation import Federation
from unalike.methods.averaging import Averaging
from unalike.training.eager import Adam
from unalike.training.loop import Positive


@dataclass
class FedAWA(Averaging):
    """Averaging with weights that the server learns.

    Args:
        server_lr: learning rate of the clients' weights.
        server_epochs: steps of Adam in a round.
    """

    server_lr: Annotated[float, Field(gt=0)] = 0.001
    server_epochs: Positive = 1

    def aggregate(
        self, fed: Federation, group: str, states: dict[str, Parameters], weights: dict[str, float]
    ) -> None:
        known = fed.state.setdefault("logits", {})
        total = sum(weights[client] for client in states)
        initial = [known.get(client, weights[client] / total) for client in states]
        start = flatten(fed.state["models"][group])
        models = torch.stack([flatten(state).to(start.device) for state in states.values()])
        logits = torch.tensor(initial, dtype=start.dtype, device=start.device, requires_grad=True)
        optimizer = Adam([logits], lr=self.server_lr, betas=(0.5, 0.999))
        for _ in range(self.server_epochs):
            optimizer.zero_grad()
            weighting_cost(logits.softmax(0), models, start).backward()
            optimizer.step()
        known.update(zip(states, logits.tolist(), strict=True))
        learnt = logits.detach().softmax(0).tolist()
        average = self.average(states, dict(zip(states, learnt, strict=True)))
        fed.state["models"][group] = average


def weighting_cost(weights: Tensor, models: Tensor, start: Tensor) -> Tensor:
    """What the weights (clients,) minimise.

    Args:
        models: of the clients, (clients, parameters).
        start: the model that they were sent, (parameters,).

    >>> start = torch.tensor([1.0, 0.0])
    >>> round(weighting_cost(torch.tensor([0.5, 0.5]), start + torch.eye(2), start).item(), 3)
    0.854
    """
    vectors = models - start
    spread = (vectors - weights @ vectors).norm(dim=1)
    turn = 1 - cosine_similarity(models, start[None], dim=1)
    return (weights * (spread + turn)).sum()


def flatten(state: Parameters) -> Tensor:
    """All floating-point entries as one vector, in float64."""
    parts = [t.detach().double().flatten() for t in state.values() if t.is_floating_point()]
    return torch.cat(parts)
