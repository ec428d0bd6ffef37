"""SCAFFOLD: control variates correct the drift of local steps.

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020,
https://arxiv.org/abs/1910.06378.

Local gradients are corrected by c - c_i (eq. 3): the local loss has the term <c - c_i, w>. After
K steps of size eta from x to y a client sets c_i to c_i - c + (x - y) / (K eta) (eq. 4, option II).
That is a gradient for plain SGD only; with other optimizers it is the gradient at x (option I).
The server adds the mean change of c_i over all clients to c (eq. 5); its step size is 1.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from unalike.base.message import Value
from unalike.base.types import Parameters
from unalike.core.federation import Federation, Replies
from unalike.core.operations import operation
from unalike.methods.averaging import Averaging, AveragingProgram, Update
from unalike.training.batching import batches


class ControlledUpdate(Update):
    """A client's reply, with the change of its control variate."""

    control_change: Parameters


@dataclass
class Scaffold(Averaging):
    """Averaging with control variates c (server) and c_i (clients).

    Args:
        mean: weight of a client: the same for all ("uniform"), or its number of "samples".
    """

    mean: Literal["samples", "uniform"] = "uniform"

    def update_messages(self, fed: Federation, clients: list[str]) -> dict[str, dict[str, Value]]:
        messages = self.build_messages(fed, clients)
        controls = fed.state.get("control", {})
        for client in clients:
            messages[client]["control"] = controls.get(fed.state["group"][client], {})
        return messages

    def record_round(self, fed: Federation, replies: Replies) -> None:
        """c = c + sum of the changes over the number of clients of the group."""
        controls = fed.state.setdefault("control", {})
        groups = fed.state["group"]
        for client, reply in replies.items():
            members = list(groups.values()).count(groups[client])
            control = controls.setdefault(groups[client], {})
            for name, change in reply["control_change"].items():
                control[name] = control.get(name, torch.zeros_like(change)) + change / members
        super().record_round(fed, replies)

    class Program(AveragingProgram):
        algorithm: "Scaffold"

        @operation
        def update(
            self, parameters: Parameters, control: Parameters | None = None
        ) -> ControlledUpdate:
            """Train with corrected gradients, and renew the client's control variate.

            Args:
                control: c; empty before the first round.
            """
            self.receive(parameters)
            self.transient = True
            trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
            zeros = {n: torch.zeros_like(p) for n, p in trained.items()}
            common = {n: t.to(zeros[n]) for n, t in (control or zeros).items()}
            own: Parameters = self.memory.get("control", zeros)
            plain = self.training.optimizer == "sgd" and not self.training.momentum
            renewed = None if plain else self.full_gradient()
            self.correction = {n: common[n] - own[n] for n in trained}
            loss = self.train_round()
            if renewed is None:
                scale = 1 / (self.local_steps() * self.training.lr)
                renewed = {
                    n: (parameters[n].to(p) - p.detach()) * scale - self.correction[n]
                    for n, p in trained.items()
                }
            self.memory["control"] = renewed
            return {
                "parameters": self.shared(),
                "samples": len(self.client.train),
                "loss": loss,
                "control_change": {n: renewed[n] - own[n] for n in trained},
            }

        def loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
            """The task's loss + <c - c_i, w>."""
            parameters = dict(self.model.named_parameters())
            correction = sum((c * parameters[n]).sum() for n, c in self.correction.items())
            return super().loss(x, y) + correction

        def local_steps(self) -> int:
            """K."""
            rows = len(self.client.train)
            return self.training.epochs * len(list(batches(rows, self.training.batch_size)))

        def full_gradient(self) -> Parameters:
            """Gradient of the mean loss of all samples at the parameters that were sent."""
            rows = len(self.client.train)
            trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
            total = {n: torch.zeros_like(p) for n, p in trained.items()}
            self.work += rows
            self.model.eval()
            for index in batches(rows, self.training.batch_size):
                x, y = self.training_batch(index)
                loss = self.task_loss(self.client.to_device(x), self.client.to_device(y))
                gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
                for name, gradient in zip(trained, gradients, strict=True):
                    if gradient is not None:
                        total[name] += gradient * len(index) / rows
            return total
