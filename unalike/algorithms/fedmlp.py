"""FedMLP: labels that a client does not know are told by prototypes, or by the model it was sent.

Sun et al., "FedMLP: Federated Multi-Label Medical Image Classification under Task Heterogeneity",
MICCAI 2024, https://arxiv.org/abs/2406.18995.

Clients send, for each label, the mean feature of their samples that have it and of those that do
not; the server averages these prototypes. After the warm-up, a client gives the share `tagged` of
its samples with the largest and the smallest difference of similarities to both prototypes of an
unknown label a pseudo-label; other unknown entries follow the sent model, by squared distance of
probabilities (global knowledge learning, eq. 6). The model is federated averaged. Ours: one share
for all labels instead of self-adaptive thresholds. Left out: weak and strong augmentation, and the
logit adjustment of the warm-up.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt
from torch import Tensor
from torch.nn.functional import normalize

from unalike.base.message import Value
from unalike.core.federation import Federation, Replies
from unalike.core.operations import operation
from unalike.core.signatures import Shape
from unalike.methods.averaging import Averaging, AveragingProgram, Update
from unalike.tasks import Task
from unalike.training.batching import batches

Prototypes = Annotated[Tensor, Shape("labels", 2, None)]  # without the label, and with it
Counts = Annotated[Tensor, Shape("labels", 2)]  # of the samples behind each


class LabelledUpdate(Update):
    """A client's reply: its model, and prototypes of the labels that it knows."""

    prototypes: Prototypes
    counts: Counts


@dataclass
class FedMLP(Averaging):
    """Averages models, and prototypes of labels for clients that do not know them.

    Args:
        warm_up: rounds without pseudo-labels.
        tagged: share of the samples that get a pseudo-label, on either side.
        consistency: weight of following the sent model.
    """

    needs_head = True

    warm_up: NonNegativeInt = 10
    tagged: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    consistency: NonNegativeFloat = 1.0

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return task.multilabel

    def update_messages(self, fed: Federation, clients: list[str]) -> dict[str, dict[str, Value]]:
        messages = super().update_messages(fed, clients)
        known = fed.state.get("prototypes", {})
        for client, message in messages.items():
            ready = fed.round > self.warm_up and fed.state["group"][client] in known
            message["told"] = known[fed.state["group"][client]] if ready else None
        return messages

    def record_round(self, fed: Federation, replies: Replies) -> None:
        groups = fed.state["group"]
        for group in sorted({groups[client] for client in replies}):
            members = {c: reply for c, reply in replies.items() if groups[c] == group}
            fed.state.setdefault("prototypes", {})[group] = mean_prototypes(members)
        super().record_round(fed, replies)

    class Program(AveragingProgram):
        algorithm: "FedMLP"

        @operation
        def update(  # type: ignore[override]
            self, parameters: dict[str, Tensor], told: Prototypes | None
        ) -> LabelledUpdate:
            """The local epochs of a round.

            Args:
                told: prototypes of all clients; zeros for what nobody knows.
            """
            self.receive(parameters)
            self.sent: Any = copy.deepcopy(self.model).eval().requires_grad_(False)
            features, y = self.features_and_labels()
            self.labels = y if told is None else tag(features, y, told.to(features), self.algorithm)
            reply = super().update(parameters)
            features, y = self.features_and_labels()
            prototypes, counts = prototypes_of(features, y)
            return {**reply, "prototypes": prototypes, "counts": counts}

        def features_and_labels(self) -> tuple[Tensor, Tensor]:
            """Unit features (samples, width) and labels of all training samples."""
            data = self.client.train
            parts, labels = [], []
            self.model.eval()
            with torch.no_grad():
                for index in batches(len(data), 256):
                    x, y = data.labelled_batch(index)
                    parts.append(self.model.represent(self.client.to_device(x)))
                    labels.append(self.client.to_device(y))
            return torch.cat(parts), torch.cat(labels)

        def training_batch(self, index: Tensor) -> tuple[Any, Tensor]:
            """Inputs, and labels with this round's pseudo-labels."""
            x, y = super().training_batch(index)
            return x, self.labels[index.to(self.labels.device)] if hasattr(self, "labels") else y

        def loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
            """The task's loss where labels are known or told, elsewhere that to the sent model."""
            output, unknown = self.model(x), ~(y >= 0)
            with torch.no_grad():
                goal = self.sent(x).sigmoid()
            apart = ((output.sigmoid() - goal) ** 2 * unknown).sum() / unknown.sum().clamp(min=1)
            return self.error(output, y) + self.algorithm.consistency * apart


def prototypes_of(features: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Mean features of the samples without and with each label, and their numbers.

    Args:
        features: (n, width).
        y: (n, labels), 1 present, 0 absent, anything else unknown.
    Returns: (labels, 2, width), zeros where there is no sample, and (labels, 2).
    """
    is_member = torch.stack([y == 0, y == 1], -1).to(features)  # (n, labels, 2)
    counts = is_member.sum(0)
    total = torch.einsum("nls,nd->lsd", is_member, features)
    return total / counts.clamp(min=1)[..., None], counts


def mean_prototypes(replies: Mapping[str, Any]) -> Tensor:
    """The mean of clients' prototypes, weighted by samples."""
    total: Tensor | float = 0.0
    count: Tensor | float = 0.0
    for reply in replies.values():
        total = total + reply["counts"][..., None] * reply["prototypes"]
        count = count + reply["counts"]
    assert isinstance(total, Tensor) and isinstance(count, Tensor)
    return total / count.clamp(min=1)[..., None]


def tag(features: Tensor, y: Tensor, prototypes: Tensor, method: FedMLP) -> Tensor:
    """Labels (n, labels) with pseudo-labels for the surest unknown entries of each label."""
    cosines = torch.einsum("nd,lsd->nls", features, normalize(prototypes, dim=-1))
    lean = cosines[..., 1] - cosines[..., 0]  # towards present
    labels = y.clone()
    for label in range(y.shape[1]):
        rows = (~(y[:, label] >= 0)).nonzero()[:, 0]
        count = int(method.tagged * len(rows))
        if count and bool(prototypes[label].abs().sum(-1).all()):
            order = rows[lean[rows, label].argsort(stable=True)]
            labels[order[:count], label] = 0.0
            labels[order[-count:], label] = 1.0
    return labels
