"""FedTGP: the server trains prototypes that lie far apart.

Zhang et al., "FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive
Learning for Data and Model Heterogeneity in Federated Learning", AAAI 2024,
https://arxiv.org/abs/2401.03230.

The server passes a trainable vector per class through two layers (eq. 5) and trains them so that
each client's prototype of class c is nearest to the global one of c, with a margin: softmax over
-distance, the own class's distance enlarged by delta (eq. 6). delta is the largest over classes of
the distance to the nearest other class's mean, at most tau (eq. 7). Clients as in FedProto (eq. 8).
Nothing is left out.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from unalike.base.randomness import scope, stream
from unalike.core.federation import Federation, Replies
from unalike.methods.prototypes import (
    PrototypeMethod,
    PrototypeProgram,
    labels_of_task,
    uploads_by_label,
)
from unalike.training.batching import batches
from unalike.training.eager import SGD
from unalike.training.loop import Positive

PositiveFloat = Annotated[float, Field(gt=0)]


@dataclass
class FedTGP(PrototypeMethod):
    """Trainable global prototypes with an adaptive margin.

    Args:
        lam: lambda, the pull of features towards the prototypes.
        tau: the largest margin.
        server_epochs: epochs of the server over the prototypes of a round.
        server_lr: learning rate of the server.
    """

    lam: NonNegativeFloat = 1.0
    tau: PositiveFloat = 100.0
    server_epochs: Positive = 100
    server_lr: PositiveFloat = 0.01

    def aggregate(self, fed: Federation, replies: Replies) -> None:
        networks = fed.state.setdefault("networks", {})
        for task, uploads in uploads_by_label(fed, replies).items():
            labels = labels_of_task(fed, task)
            pairs = [(row, labels.index(label)) for label in uploads for row, _ in uploads[label]]
            rows = torch.stack([row.to(pairs[0][0]) for row, _ in pairs])
            y = torch.tensor([label for _, label in pairs], device=rows.device)
            with scope(fed.seed, "prototypes", task):
                network = build_network(len(labels), self.width).to(rows)
            if task in networks:
                network.load_state_dict(networks[task])
            self.train_network(network, rows, y, fed)
            networks[task] = dict(network.state_dict())
            table = prototypes_of(network).detach()
            fed.state.setdefault("prototypes", {})[task] = dict(zip(labels, table, strict=True))

    def train_network(
        self, network: nn.Sequential, rows: Tensor, y: Tensor, fed: Federation
    ) -> None:
        """Minimise eq. 6 over the prototypes that clients sent."""
        margin = min(class_gap(rows, y), self.tau)
        optimizer = SGD(network.parameters(), lr=self.server_lr)
        for epoch in range(self.server_epochs):
            order = stream(fed.seed, "prototypes", fed.round, epoch)
            for index in batches(len(rows), fed.training.batch_size, order):
                optimizer.zero_grad()
                margin_loss(rows[index], y[index], prototypes_of(network), margin).backward()
                optimizer.step()

    class Program(PrototypeProgram):
        algorithm: "FedTGP"


def build_network(labels: int, width: int) -> nn.Sequential:
    """A trainable vector per label, and two layers."""
    layers = [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)]
    return nn.Sequential(nn.Embedding(labels, width), *layers)


def prototypes_of(network: nn.Sequential) -> Tensor:
    """(labels, width)."""
    return network[1:](network[0].weight)


def margin_loss(rows: Tensor, y: Tensor, prototypes: Tensor, margin: float) -> Tensor:
    """Cross entropy of -distance, with `margin` added to the distance to the own class (eq. 6)."""
    distances = torch.cdist(rows, prototypes, compute_mode="donot_use_mm_for_euclid_dist")
    own = (y[:, None] == torch.arange(len(prototypes), device=y.device)).to(rows)
    return cross_entropy(-(distances + margin * own), y)


def class_gap(rows: Tensor, y: Tensor) -> float:
    """The largest over classes of the distance from their mean to the nearest other (eq. 7)."""
    means = torch.stack([rows[y == label].mean(0) for label in y.unique()])
    if len(means) == 1:
        return 0.0
    distances = torch.cdist(means, means).fill_diagonal_(torch.inf)
    return float(distances.min(1).values.max())
