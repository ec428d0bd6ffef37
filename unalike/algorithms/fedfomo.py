"""FedFomo: each client weighs the models of others by how much they help on its validation rows.

Zhang et al., "Personalized Federated Learning with First Order Model Optimization", ICLR 2021,
https://arxiv.org/abs/2012.08565.

The server sends a client up to M models of others, chosen by the weights that it gave them before,
at random with probability epsilon (Sec. 3.3). The client moves by sum_n w_n (theta_n - theta) with
w_n proportional to max(0, (L(theta) - L(theta_n)) / ||theta_n - theta||) on held-out rows (eq. 3
and 4), then trains. Left out: the differentially private variant.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from unalike.base.message import Value
from unalike.base.randomness import stream
from unalike.base.types import Parameters
from unalike.core.federation import Federation, Replies
from unalike.core.operations import operation
from unalike.data.samples import Samples
from unalike.methods.averaging import Update
from unalike.methods.personal import PersonalModel, PersonalProgram, squared_distance
from unalike.tasks import Task
from unalike.training.batching import batches
from unalike.training.loop import Positive

Share = Annotated[float, Field(ge=0, lt=1)]


class WeighedUpdate(Update):
    """The reply of a client, with the weight it gave each model that it was sent."""

    weights: list[float]


@dataclass
class FedFomo(PersonalModel):
    """First order optimisation of the weights of other clients' models.

    Args:
        candidates: M, the number of models that a client is sent.
        epsilon: probability of a random candidate.
        validation: share of a client's rows that is held out of training.
    """

    merges: ClassVar[bool] = False

    candidates: Positive = 5
    epsilon: Share = 0.3
    validation: Share = 0.2

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return task.labelled and not task.paired

    def update_messages(self, fed: Federation, clients: list[str]) -> dict[str, dict[str, Value]]:
        models: dict[str, Parameters] = fed.state.setdefault("uploads", {})
        fed.state["candidates"] = {}
        messages: dict[str, dict[str, Value]] = {}
        for client in clients:
            group = fed.state["group"][client]
            known = [c for c in models if c != client and fed.state["group"][c] == group]
            chosen = self.choose(fed, client, known)
            fed.state["candidates"][client] = chosen
            start = None if client in models else fed.state["models"][group]
            messages[client] = {"parameters": start, "others": [models[c] for c in chosen]}
        return messages

    def choose(self, fed: Federation, client: str, known: list[str]) -> list[str]:
        """Up to M other clients: those with the largest total weights, or random ones."""
        trust = fed.state.setdefault("trust", {}).get(client, {})
        generator = stream(fed.seed, "candidates", client, fed.round)
        ranks = {c: -trust.get(c, 0.0) for c in known}
        for other in known:
            if float(torch.rand(1, generator=generator)) < self.epsilon:
                ranks[other] = -float("inf")
        return sorted(known, key=lambda c: ranks[c])[: self.candidates]

    def aggregate(
        self, fed: Federation, group: str, states: dict[str, Parameters], weights: dict[str, float]
    ) -> None:
        """Keep the members' models, to send them on."""
        fed.state["uploads"].update(states)

    def record_round(self, fed: Federation, replies: Replies) -> None:
        """Add the weights that clients gave their candidates."""
        for client, reply in replies.items():
            trust = fed.state["trust"].setdefault(client, {})
            for other, weight in zip(
                fed.state["candidates"][client], reply["weights"], strict=False
            ):
                trust[other] = trust.get(other, 0.0) + weight
        super().record_round(fed, replies)

    class Program(PersonalProgram):
        algorithm: "FedFomo"

        @cached_property
        def split(self) -> tuple[Samples, Samples]:
            """Training and validation rows; the same rows where there are too few for both."""
            rows = len(self.client.train)
            held_out = round(self.algorithm.validation * rows)
            if not held_out or held_out == rows:
                return self.client.train, self.client.train
            order = torch.randperm(rows, generator=stream(self.seed, "validation", self.client.id))
            parts = (order[held_out:].sort().values, order[:held_out].sort().values)
            return self.client.train.subset(parts[0]), self.client.train.subset(parts[1])

        def samples(self, part: str) -> Samples | None:
            return self.split[0] if part == "train" else super().samples(part)

        @operation
        def update(
            self, parameters: Parameters | None, others: list[Parameters] | None = None
        ) -> WeighedUpdate:
            """Move towards the models that help (eq. 3 and 4), then train."""
            if parameters is not None:
                self.start(parameters)
            others = others or []
            weights = self.weigh(others)
            own = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
            with torch.no_grad():
                for name, tensor in self.model.state_dict().items():
                    if tensor.is_floating_point():
                        for weight, other in zip(weights, others, strict=True):
                            tensor += weight * (other[name].to(tensor) - own[name])
            loss = self.train_round()
            return {
                "parameters": self.shared(),
                "samples": len(self.client.train),
                "loss": loss,
                "weights": weights,
            }

        def weigh(self, others: list[Parameters]) -> list[float]:
            """Weight of each model by the gain on validation rows per distance; they sum to 1 or,
            where none helps, are all 0."""
            own = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
            before = self.validation_loss()
            gains = []
            for other in others:
                self.model.load_state_dict(other)
                distance = squared_distance(own, other) ** 0.5
                gain = before - self.validation_loss()
                gains.append(max(0.0, gain) / distance if distance else 0.0)
            self.model.load_state_dict(own)
            total = sum(gains)
            return [gain / total if total else 0.0 for gain in gains]

        def validation_loss(self) -> float:
            """Mean task loss on the validation rows."""
            data = self.split[1]
            self.model.eval()
            self.work += len(data) / 3
            total = 0.0
            with torch.no_grad():
                for index in batches(len(data), max(self.training.batch_size, 256)):
                    x, y = data.labelled_batch(index)
                    output = self.model(self.client.to_device(x))
                    total += float(self.error(output, self.client.to_device(y))) * len(index)
            return total / len(data)
