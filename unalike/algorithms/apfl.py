"""APFL: each client uses a learnt mixture of its own model and the federated one.

Deng, Kamani and Mahdavi, "Adaptive Personalized Federated Learning", 2020,
https://arxiv.org/abs/2003.13461.

Client i predicts with v_bar = alpha v + (1 - alpha) w (eq. 5). It trains the exchanged w on f(w),
its own v on f(v_bar) with w fixed (Algorithm 1), and alpha by the same gradient,
<v - w, grad f(v_bar)> (eq. 10), with the optimizer of the round; alpha stays within [0, 1]. Left
out: synchronisation gaps other than the local epochs.
"""

import copy
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call

from unalike.methods.personal import SecondModel, SecondModelProgram
from unalike.tasks import Task


@dataclass
class APFL(SecondModel):
    """A mixture of two models, with a weight for each client.

    Args:
        alpha: initial weight of the client's own model in the mixture, 0 to 1.
        adaptive: learn alpha by gradient descent.
    """

    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    adaptive: bool = True

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return task.labelled and not task.paired

    class Program(SecondModelProgram):
        algorithm: "APFL"

        def train_round(self) -> float:
            """Train v, w and alpha together; `self.model` ends as the mixture."""
            self.mixture = self.model.train()
            self.own = copy.deepcopy(self.model)
            if "own" in self.memory:
                self.own.load_state_dict(self.memory["own"])
            alpha = self.memory.get("alpha", self.algorithm.alpha)
            self.alpha = nn.Parameter(
                torch.tensor(alpha, dtype=self.client.dtype, device=self.client.device),
                requires_grad=self.algorithm.adaptive,
            )
            joint = nn.ModuleList([self.own, self.exchanged, nn.ParameterList([self.alpha])])
            with self.training_of(joint):
                loss = self.learn(optimizer=self.optimizer(fresh=True))
            self.alpha.data.clamp_(0, 1)
            self.memory["alpha"] = float(self.alpha.detach())
            self.memory["own"] = dict(self.own.state_dict())
            self.model.load_state_dict(self.mix(), strict=False)
            return loss

        def loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
            """f(w) + f(v_bar), of which w gets the gradient of the first part only."""
            personal = functional_call(self.mixture, self.mix(), (x,))
            return self.error(self.exchanged(x), y) + self.error(personal, y)

        def mix(self) -> dict[str, Tensor]:
            """Parameters of v_bar."""
            w = dict(self.exchanged.named_parameters())
            return {
                name: self.alpha * v + (1 - self.alpha) * w[name].detach()
                for name, v in self.own.named_parameters()
            }
