"""FedGH: the server trains a global head on the clients' prototypes.

Yi et al., "FedGH: Heterogeneous Federated Learning with Generalized Global Header", MM 2023,
https://arxiv.org/abs/2303.13137.

Clients train their model with the head that they were sent, and send the mean feature of each of
their classes (eq. 4). The server trains the head on these (eq. 6 and Algorithm 1). The head is one
linear layer on features of a common width. Nothing is left out.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import nn
from torch.nn.functional import cross_entropy

from unalike.base.message import Value
from unalike.base.randomness import scope, stream
from unalike.core.federation import Federation, Replies
from unalike.core.operations import operation
from unalike.methods.averaging import LabelMask
from unalike.methods.common_width import CommonWidthProgram
from unalike.methods.prototypes import (
    PrototypeMethod,
    PrototypeUpdate,
    Rows,
    class_means,
    labels_of_task,
    uploads_by_label,
)
from unalike.tasks import Task
from unalike.training.batching import batches
from unalike.training.eager import SGD
from unalike.training.loop import Positive


@dataclass
class FedGH(PrototypeMethod):
    """A head for all clients, trained at the server.

    Args:
        server_lr: learning rate of the head at the server.
        server_epochs: epochs of the server over the mean features of a round.
    """

    server_lr: Annotated[float, Field(gt=0)] = 0.01
    server_epochs: Positive = 1

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return task.single_label and not task.dense

    def build_message(self, fed: Federation, client: str) -> dict[str, Value]:
        """The rows of the global head for a client's labels."""
        info = fed.infos[client]
        head = fed.state.get("heads", {}).get(info.task)
        if head is None:
            return {"weight": None, "bias": None}
        labels = labels_of_task(fed, info.task)
        rows = [labels.index(label) for label in info.labels]
        return {"weight": head["weight"][rows], "bias": head["bias"][rows]}

    def aggregate(self, fed: Federation, replies: Replies) -> None:
        heads = fed.state.setdefault("heads", {})
        for task, uploads in uploads_by_label(fed, replies).items():
            labels = labels_of_task(fed, task)
            pairs = [(row, labels.index(label)) for label in uploads for row, _ in uploads[label]]
            rows = torch.stack([row.to(pairs[0][0]) for row, _ in pairs])
            y = torch.tensor([label for _, label in pairs], device=rows.device)
            with scope(fed.seed, "global head", task):
                head = nn.Linear(self.width, len(labels)).to(rows)
            if task in heads:
                head.load_state_dict(heads[task])
            optimizer = SGD(head.parameters(), lr=self.server_lr)
            for epoch in range(self.server_epochs):
                order = stream(fed.seed, "global head", fed.round, epoch)
                for index in batches(len(rows), fed.training.batch_size, order):
                    optimizer.zero_grad()
                    cross_entropy(head(rows[index]), y[index]).backward()
                    optimizer.step()
            heads[task] = dict(head.state_dict())

    class Program(CommonWidthProgram):
        algorithm: "FedGH"

        def build_head(self, width: int) -> nn.Module:
            return nn.Linear(width, len(self.client.task.labels))

        @operation
        def update(self, weight: Rows | None, bias: LabelMask | None) -> PrototypeUpdate:
            """Take the head, train all, and send prototypes.

            Args:
                weight, bias: of the head; None before the server has one.
            """
            if weight is not None and bias is not None:
                self.model.head.load_state_dict({"weight": weight, "bias": bias})
            loss = self.learn()
            means, counts = class_means(self, self.model.features)
            return {"prototypes": means, "counts": counts, "loss": loss}
