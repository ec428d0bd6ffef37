"""FedGen: a generator of features, trained on the clients' heads, augments local training.

Zhu, Hong and Zhou, "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML
2021, https://arxiv.org/abs/2105.10056.

The server trains a generator G(z | y) so that the mean logits of all heads on its features say y
(eq. 4), with a term for diversity. Clients learn the task + the cross entropy of their head on
generated features of labels drawn from all clients' (eq. 5). Encoders are the clients' own and of
any architecture; heads, one linear layer on a common width, are averaged. Left out: batch norm in
the generator, the decay of the generated part, and the version that averages whole models.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, one_hot

from unalike.base.message import Value
from unalike.base.randomness import scope, stream
from unalike.base.types import Parameters
from unalike.core.federation import Federation, Replies
from unalike.core.operations import operation
from unalike.methods.averaging import Averaging, AveragingProgram, LabelMask, Update
from unalike.methods.common_width import CommonWidthProgram
from unalike.methods.prototypes import count_labels
from unalike.tasks import Task
from unalike.training.eager import Adam
from unalike.training.loop import Positive


class CountedUpdate(Update):
    """A client's reply, with its number of samples of each label."""

    counts: LabelMask


@dataclass
class FedGen(Averaging):
    """Averaged heads, and features generated from what they know.

    Args:
        width: of the head's input, the same for all clients.
        noise: dimensions of z, the generator's input.
        hidden: width of the generator's hidden layer.
        diversity: weight of the term that keeps generated features apart.
        server_epochs: steps of the generator in a round.
        server_lr: learning rate of the generator.
    """

    personalised: ClassVar[bool] = True

    width: Positive = 512
    noise: Positive = 32
    hidden: Positive = 256
    diversity: NonNegativeFloat = 1.0
    server_epochs: Positive = 100
    server_lr: Annotated[float, Field(gt=0)] = 3e-4

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return task.single_label and not task.dense

    def shares(self, name: str) -> bool:
        return name.startswith("head.")

    def update_messages(self, fed: Federation, clients: list[str]) -> dict[str, dict[str, Value]]:
        messages = self.build_messages(fed, clients)
        for client in clients:
            made = fed.state.get("generators", {}).get(fed.state["group"][client])
            messages[client] |= made or {"generator": None, "shares": None}
        return messages

    def record_round(self, fed: Federation, replies: Replies) -> None:
        """Train the generator of each group on the heads that it sent."""
        for group in sorted({fed.state["group"][c] for c in replies}):
            members = [reply for c, reply in replies.items() if fed.state["group"][c] == group]
            self.train_generator(fed, group, members)
        super().record_round(fed, replies)

    def train_generator(self, fed: Federation, group: str, replies: list[dict[str, Any]]) -> None:
        heads = [reply["parameters"] for reply in replies]
        example = heads[0]["head.weight"]
        counts = torch.stack([reply["counts"].to(example) for reply in replies]).sum(0)
        samples = torch.tensor([reply["samples"] for reply in replies]).to(example)
        generators = fed.state.setdefault("generators", {})
        with scope(fed.seed, "generator", group, fed.round):
            generator = self.build_generator(len(counts)).to(example)
            if group in generators:
                generator.load_state_dict(generators[group]["generator"])
            optimizer = Adam(generator.parameters(), lr=self.server_lr)
            for _ in range(self.server_epochs):
                y = counts.multinomial(fed.training.batch_size, replacement=True)
                z = torch.randn(len(y), self.noise).to(example)
                optimizer.zero_grad()
                self.generator_loss(generator, heads, samples / samples.sum(), z, y).backward()
                optimizer.step()
        generators[group] = {
            "generator": dict(generator.state_dict()),
            "shares": counts / counts.sum(),
        }

    def build_generator(self, labels: int) -> nn.Sequential:
        """From noise and a one-hot label to features."""
        first = nn.Linear(self.noise + labels, self.hidden)
        return nn.Sequential(first, nn.ReLU(), nn.Linear(self.hidden, self.width))

    def generator_loss(
        self, generator: nn.Module, heads: list[Parameters], shares: Tensor, z: Tensor, y: Tensor
    ) -> Tensor:
        """Cross entropy of the heads' mean logits, and exp(-mean |f_i - f_j| |z_i - z_j|)."""
        features = generate(generator, z, y, len(heads[0]["head.bias"]))
        logits: Tensor | float = 0.0
        for share, head in zip(shares, heads, strict=True):
            weight, bias = head["head.weight"].to(features), head["head.bias"].to(features)
            logits = logits + share * linear(features, weight, bias)
        assert isinstance(logits, Tensor)
        apart = torch.cdist(features, features, p=1) / features.shape[1]
        spread = torch.cdist(z, z, p=2)
        return cross_entropy(logits, y) + self.diversity * (-(apart * spread).mean()).exp()

    class Program(CommonWidthProgram, AveragingProgram):
        algorithm: "FedGen"

        def build_head(self, width: int) -> nn.Module:
            return nn.Linear(width, len(self.client.task.labels))

        @operation
        def update(
            self,
            parameters: Parameters,
            generator: Parameters | None = None,
            shares: LabelMask | None = None,
        ) -> CountedUpdate:
            """Train with generated features.

            Args:
                generator: its parameters; None before there is one.
                shares: of each label among all clients' samples.
            """
            self.synthetic = self.draw_features(generator, shares)
            return {**super().update(parameters), "counts": count_labels(self)}

        def draw_features(
            self, generator: Parameters | None, shares: Tensor | None
        ) -> tuple[Tensor, Tensor] | None:
            """Generated features and their labels for this round, as many as the client's rows."""
            if generator is None or shares is None:
                return None
            network = self.algorithm.build_generator(len(shares))
            network.to(self.client.device, self.client.dtype)
            network.load_state_dict(generator)
            order = stream(self.seed, "generated", self.client.id, self.round)
            rows = len(self.client.train)
            y = shares.cpu().multinomial(rows, replacement=True, generator=order)
            z = torch.randn(rows, self.algorithm.noise, generator=order)
            with torch.no_grad():
                y = self.client.to_device(y)
                return generate(network, self.client.to_device(z), y, len(shares)), y

        def loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
            task_loss = super().loss(x, y)
            if self.synthetic is None:
                return task_loss
            features, labels = self.synthetic
            return task_loss + cross_entropy(self.model.head(features), labels)


def generate(generator: nn.Module, z: Tensor, y: Tensor, labels: int) -> Tensor:
    """Features (n, width) from noise z (n, noise) and labels y (n,)."""
    return generator(torch.cat([z, one_hot(y, labels).to(z)], 1))
