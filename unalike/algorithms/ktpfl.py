"""KT-pFL: each client distils its own, learnt mixture of all clients' public predictions.

Zhang et al., "Parameterized Knowledge Transfer for Personalized Federated Learning", NeurIPS 2021,
https://arxiv.org/abs/2111.02862.

The server keeps a coefficient matrix c, 1 / K at first. Client k distils the soft prediction
sum_m c_km p_m of the public rows (eq. 4), at temperature T. The server descends c_k on the
divergence of the mixture from p_k + rho ||c_k - 1/K||^2 (eq. 5 and 7); rows of c are kept positive
with sum 1. Among clients with the same task and labels. Left out: the paper's alternation of
several steps of c; there is one a round.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor
from torch.nn.functional import kl_div

from unalike.base.message import Value
from unalike.core.federation import Federation
from unalike.core.operations import graph_safe
from unalike.methods.distillation import DistillationProgram
from unalike.methods.prototypes import label_group
from unalike.methods.public_data import PublicTraining
from unalike.tasks import Task

PositiveFloat = Annotated[float, Field(gt=0)]


@dataclass
class KTpFL(PublicTraining):
    """A knowledge coefficient matrix that is learnt at the server.

    Args:
        rho: pull of the coefficients towards 1 / K.
        temperature: T, of the soft predictions.
        server_lr: learning rate of the coefficients c.
    """

    rho: NonNegativeFloat = 0.7
    temperature: PositiveFloat = 10.0
    server_lr: PositiveFloat = 0.01

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return task.single_label and not task.dense

    def learn_from_public(self, fed: Federation, round: int) -> dict[str, float | None]:
        groups: dict[str, list[str]] = {}
        for client in fed.active:
            groups.setdefault(label_group(fed, client), []).append(client)
        sharing = [c for c in fed.active if len(groups[label_group(fed, c)]) > 1]
        sent: dict[str, Tensor] = dict(fed.call("opinion", clients=sharing)) if sharing else {}
        teachers: dict[str, dict[str, Value]] = {}
        for members in groups.values():
            soft = {c: (sent[c] / self.temperature).softmax(1) for c in members if c in sent}
            if len(soft) > 1:
                mixtures = self.mix(fed.state.setdefault("coefficients", {}), soft)
                teachers |= {c: {"teacher": mixture.log()} for c, mixture in mixtures.items()}
        return dict(fed.call("distil", per_client=teachers)) if teachers else {}

    def mix(
        self, coefficients: dict[str, dict[str, float]], soft: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Each client's mixture (rows, labels) after a step of its coefficients."""
        example = next(iter(soft.values()))
        stacked = torch.stack([p.to(example) for p in soft.values()])
        mixtures = {}
        for client, own in soft.items():
            known = coefficients.setdefault(client, {})
            weights: Any = torch.tensor([known.get(c, 1 / len(soft)) for c in soft]).to(example)
            weights = self.descend(weights / weights.sum(), stacked, own.to(example))
            known.update(zip(soft, weights.tolist(), strict=True))
            mixtures[client] = torch.tensordot(weights, stacked, 1)
        return mixtures

    def descend(self, weights: Tensor, stacked: Tensor, own: Tensor) -> Tensor:
        """A gradient step of the coefficients (clients,) of one client, back on the simplex."""
        weights = weights.clone().requires_grad_()
        mixture = torch.tensordot(weights, stacked, 1)
        divergence = kl_div(mixture.log(), own, reduction="batchmean")
        penalty = self.rho * ((weights - 1 / len(weights)) ** 2).sum()
        (gradient,) = torch.autograd.grad(divergence + penalty, weights)
        moved = (weights.detach() - self.server_lr * gradient).clamp(min=0)
        return moved / moved.sum()

    class Program(DistillationProgram):
        algorithm: "KTpFL"

        @graph_safe
        def distillation_loss(self, x: Tensor | dict, teacher: Tensor) -> Tensor:
            """Soft cross entropy at temperature T to the mixture, given by its logarithm."""
            return self.client.task.imitate(self.model(x) / self.algorithm.temperature, teacher)
