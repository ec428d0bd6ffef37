"""Class prototypes: the mean feature, or output, of a client's samples of each label.

In a round every client trains with the global prototypes that it is sent, and replies with its own.
A label means the same to all clients that have one of that name and the same task.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

import torch
from torch import Tensor

from unalike.base.message import Value
from unalike.core.algorithm import Sharing
from unalike.core.federation import Federation, Replies
from unalike.core.operations import operation
from unalike.core.program import ClientProgram
from unalike.core.signatures import Shape
from unalike.methods.averaging import LabelMask, short_hash
from unalike.methods.common_width import CommonWidthProgram
from unalike.methods.parts import TakesParts
from unalike.methods.sharing import clients_by_label, connect_clients
from unalike.tasks import Task
from unalike.training.batching import batches
from unalike.training.loop import Positive

BATCH = 256  # rows per forward pass without gradients
Rows = Annotated[Tensor, Shape("labels", "width")]


class PrototypeUpdate(TypedDict):
    """A client's reply: its prototypes (0 for labels without samples) and samples of each label."""

    prototypes: Rows
    counts: LabelMask
    loss: float


def count_labels(program: ClientProgram) -> Tensor:
    """(labels,): the number of training samples of each label."""
    counts = torch.zeros(len(program.client.task.labels), dtype=program.client.dtype)
    for index in batches(len(program.client.train), 1024):
        y = program.training_batch(index)[1]
        counts += program.client.task.label_matrix(y.cpu()).sum(0)
    return counts.to(program.client.device)


def class_means(program: ClientProgram, forward: Callable[[Any], Tensor]) -> tuple[Tensor, Tensor]:
    """Mean of `forward` over the training samples of each label, without gradients.

    Returns: means (labels, width), 0 for labels without samples, and counts (labels,).
    """
    total: Tensor | float = 0.0
    counts: Tensor | float = 0.0
    rows = len(program.client.train)
    program.model.eval()
    program.work += rows / 3
    with torch.no_grad():
        for index in batches(rows, BATCH):
            x, y = program.training_batch(index)
            z = forward(program.client.to_device(x))
            members = program.client.task.label_matrix(program.client.to_device(y)).to(z)
            total = total + members.mT @ z
            counts = counts + members.sum(0)
    assert isinstance(total, Tensor) and isinstance(counts, Tensor)
    return total / counts.clamp(min=1)[:, None], counts


def squared_distance_to(targets: Tensor, known: Tensor, z: Tensor, labels: Tensor) -> Tensor:
    """Mean over samples and their labels of the mean squared difference to the label's target.

    Args:
        targets: (labels, width).
        known: (labels,), 0 for labels without a target; these count as no difference.
        z: (n, width).
        labels: which labels each sample has, (n, labels).
    """
    pairs = labels.to(z)
    squares = ((z[:, None] - targets) ** 2).mean(-1)  # (n, labels)
    return (squares * pairs * known).sum() / pairs.sum().clamp(min=1)


class PrototypeProgram(CommonWidthProgram):
    """Trains with global prototypes as targets of the features, and replies with its own."""

    @operation
    def update(self, prototypes: Rows | None, known: LabelMask | None) -> PrototypeUpdate:
        """The local epochs of a round.

        Args:
            prototypes: global ones; None before there are any.
            known: 1 for labels that have one.
        """
        labels, width = len(self.client.task.labels), self.algorithm.width
        no_targets = torch.zeros(labels, width)
        self.targets = self.client.to_device(no_targets if prototypes is None else prototypes)
        self.known = self.client.to_device(torch.zeros(labels) if known is None else known)
        loss = self.learn()
        means, counts = class_means(self, self.model.features)
        return {"prototypes": means, "counts": counts, "loss": loss}

    def loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
        """The task's loss + lam times the distance of features to the targets."""
        z = self.model.features(x)
        labels = self.client.task.label_matrix(y)
        distance = squared_distance_to(self.targets, self.known, z, labels)
        return self.error(self.model.head(z), y) + self.algorithm.lam * distance


@dataclass
class LabelExchange(TakesParts):
    """Each round clients are sent something of each label, train with it, and reply likewise.

    Parts act before and after that; between local epochs there is nothing to hook into.
    """

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return task.classifies and not task.dense

    def sharing(self, fed: Federation) -> Sharing | None:
        """Clients with the same list of labels work together."""
        groups = connect_clients({c: [label_group(fed, c)] for c in fed.infos})
        return {"labels": groups} if groups else {}

    def serve(self, fed: Federation) -> Iterator[int]:
        parts = self.part_list()
        for round in fed.rounds():
            parts.before_local(fed)
            messages = {client: self.build_message(fed, client) for client in fed.active}
            replies = fed.call("update", per_client=messages)
            self.aggregate(fed, replies)
            fed.log_metrics("train_loss", {c: reply["loss"] for c, reply in replies.items()})
            parts.after_local(fed)
            parts.after_exchange(fed)
            yield round

    def build_message(self, fed: Federation, client: str) -> dict[str, Value]:
        """What a client is sent: arguments of its operation `update`."""
        raise NotImplementedError(f"{type(self).__name__} does not say what: write build_message")

    def aggregate(self, fed: Federation, replies: Replies) -> None:
        """Keep in `fed.state` what becomes of the replies."""
        raise NotImplementedError(f"{type(self).__name__} does not say how: write aggregate")


@dataclass
class PrototypeMethod(LabelExchange):
    """Clients of any architecture exchange prototypes of a common width.

    Args:
        width: of the features, the same for all clients.
    """

    width: Positive = 512

    def sharing(self, fed: Federation) -> Sharing | None:
        """Clients with any label of the same name and task work together."""
        groups = clients_by_label(fed)
        return {"labels": groups} if groups else {}

    def build_message(self, fed: Federation, client: str) -> dict[str, Value]:
        """The global prototypes of a client's labels, from `fed.state["prototypes"]`."""
        table = fed.state.get("prototypes", {}).get(fed.infos[client].task, {})
        found = [table.get(label) for label in fed.infos[client].labels]
        known = [row is not None for row in found]
        if not any(known):
            return {"prototypes": None, "known": None}
        example = next(row for row in found if row is not None)
        rows = [torch.zeros_like(example) if row is None else row.to(example) for row in found]
        return {"prototypes": torch.stack(rows), "known": torch.tensor(known).to(example)}


def uploads_by_label(
    fed: Federation, replies: Mapping[str, Any]
) -> dict[str, dict[str, list[tuple[Tensor, float]]]]:
    """Prototypes that clients sent with their numbers of samples, by task and label."""
    uploads: dict[str, dict[str, list[tuple[Tensor, float]]]] = {}
    for client, reply in replies.items():
        table = uploads.setdefault(fed.infos[client].task, {})
        entries = zip(fed.infos[client].labels, reply["prototypes"], reply["counts"], strict=True)
        for label, prototype, count in entries:
            if count > 0:
                table.setdefault(label, []).append((prototype, float(count)))
    return uploads


def labels_of_task(fed: Federation, task: str) -> list[str]:
    """All labels that clients with this task have, in the order of their announcement."""
    infos = [info for info in fed.infos.values() if info.task == task]
    return list(dict.fromkeys(label for info in infos for label in info.labels))


def label_group(fed: Federation, client: str) -> str:
    """Equal for clients with the same task and the same labels in the same order."""
    return short_hash((fed.infos[client].task, fed.infos[client].labels))
