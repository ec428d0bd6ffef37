"""CoFED: co-training by votes on the labels of public rows.

X. Cao, Z. Li, G. Sun, H. Yu, M. Guizani, "Cross-Silo Heterogeneous Model Federated Multitask
Learning", 2023, https://arxiv.org/abs/2202.08603.

A client votes only where its best guess is clearly ahead of the next. A label is accepted where
enough of the clients that have it vote for it. docs/baselines.md says what is ours in it.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from unalike.base.message import Value
from unalike.core.federation import Federation
from unalike.core.operations import operation, query
from unalike.core.program import ClientProgram
from unalike.core.signatures import Shape
from unalike.methods.public_data import (
    PublicTraining,
    predict_public,
    train_on_public,
    with_targets,
)
from unalike.methods.public_predictions import (
    CELLS,
    average_by_label,
    mask_unknown,
    pool_dense,
)
from unalike.tasks import Task

Votes = (
    Annotated[Tensor, Shape("public_rows", "labels", whole=True)]
    | Annotated[Tensor, Shape("public_rows", "labels", CELLS, CELLS, whole=True)]
)
Share = Annotated[float, Field(ge=0, lt=1)]


@dataclass
class CoFED(PublicTraining):
    """Clients vote on public rows and train on the accepted labels.

    Args:
        margin: by which a guess must be ahead of the next for a vote.
        majority: more than this share of a label's clients must vote for it.
    """

    margin: Share = 0.3
    majority: Share = 0.3

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return task.classifies

    def learn_from_public(self, fed: Federation, round: int) -> dict[str, float | None]:
        votes: dict[str, Tensor] = dict(fed.call("vote"))
        yes = {client: (vote == 1).to(torch.int8) for client, vote in votes.items()}
        no = {client: (vote == -1).to(torch.int8) for client, vote in votes.items()}
        accepted: dict[str, dict[str, Value]] = {}
        for client in votes:
            present = self.has_majority(fed, yes, client)
            absent = self.has_majority(fed, no, client)
            accepted[client] = {"votes": present - absent}
        return dict(fed.call("learn_votes", per_client=accepted)) if accepted else {}

    def has_majority(self, fed: Federation, votes: dict[str, Tensor], client: str) -> Tensor:
        """1 where enough clients voted for a label of this client, else 0; int8."""
        return (average_by_label(fed, votes, client) > self.majority).to(torch.int8)

    class Program(ClientProgram):
        algorithm: "CoFED"

        @query
        def vote(self) -> Votes:
            """For each public row and label: 1 present, -1 absent (multi-label only), 0 no vote."""
            return predict_public(self, lambda output: (self.votes_from(output),))[0]

        def votes_from(self, output: Tensor) -> Tensor:
            """Votes, int8, from the model's output (n, labels, ...)."""
            task = self.client.task
            margin = self.algorithm.margin
            p = task.probabilities(pool_dense(task, output))
            if task.multilabel:
                lead = 2 * p - 1  # how far "present" is ahead of "absent"
                return ((lead.abs() > margin) * lead.sign()).to(torch.int8)
            best = p.topk(min(2, p.shape[1]), 1).values
            if p.shape[1] > 1:
                clear = best[:, :1] - best[:, 1:] > margin
            else:
                clear = torch.ones_like(best, dtype=torch.bool)
            return ((p == best[:, :1]) & clear).to(torch.int8)

        @operation
        def learn_votes(self, votes: Tensor) -> float | None:
            """Train on accepted labels, in the form of `vote`. Rows with several accepted classes
            are left out, as are labels accepted both as present and as absent."""
            task = self.client.task
            votes = self.client.to_device(votes)
            if task.multilabel:
                y, rows = mask_unknown(task, (votes > 0).to(self.client.dtype), votes != 0)
            else:
                y, rows = mask_unknown(task, votes.argmax(1), (votes > 0).sum(1) == 1)
            if y.dim() == 1 and len(rows):  # draw rows so that all classes are equally frequent
                weights = 1.0 / y[rows].bincount()[y[rows]].cpu()
                drawn_rows = torch.multinomial(weights, len(rows), replacement=True)
                rows = rows[drawn_rows.to(rows.device)]
            return train_on_public(self, self.task_loss, with_targets(self, y), rows)
