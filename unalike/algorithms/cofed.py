"""CoFED (Cao 2023): clients vote on the labels of the public set, and each learns from the votes on its own labels.

A client speaks only where its best guess is clearly ahead of the next; a label stands where enough of those who know it say so.
docs/baselines.md says what is ours in it.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from unalike.base.message import Value
from unalike.core.federation import Federation
from unalike.core.operations import operation, query
from unalike.core.signatures import Shape
from unalike.methods.public_data import CELLS, PublicTraining, PublicTrainingProgram, agreed
from unalike.tasks import Task

Votes = (
    Annotated[Tensor, Shape("public_rows", "labels", whole=True)]
    | Annotated[Tensor, Shape("public_rows", "labels", CELLS, CELLS, whole=True)]
)


@dataclass
class CoFED(PublicTraining):
    """Co-training by votes."""

    margin: float = 0.3  # by which a guess must be ahead to be told
    majority: float = 0.3  # share of a label's owners that must say so

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return task.classifies

    def check(self, clients: int, public_rows: int) -> list[tuple[str, str]]:
        shares = {"margin": self.margin, "majority": self.majority}
        return [
            (name, f"must be from 0 to below 1, got {share:g}.")
            for name, share in shares.items()
            if not 0 <= share < 1
        ] + super().check(clients, public_rows)

    def share(self, fed: Federation, round: int) -> dict[str, float | None]:
        told = dict(fed.call("vote"))
        yes, no = (
            {client: (votes == program).to(torch.int8) for client, votes in told.items()}
            for program in (1, -1)
        )
        stands = lambda votes, client: (agreed(fed, votes, client) > self.majority).to(torch.int8)
        each: dict[str, dict[str, Value]] = {
            client: {"votes": stands(yes, client) - stands(no, client)} for client in told
        }
        return dict(fed.call("learn_votes", per_client=each)) if each else {}

    class Program(PublicTrainingProgram):
        algorithm: "CoFED"

        @query
        def vote(self) -> Votes:
            """For each public row and label: 1 it is there, -1 it is not (where there may be several), 0 I would not say."""

            def at(output: Tensor) -> tuple[Tensor]:
                p, margin = self.probabilities(self.cells(output)), self.algorithm.margin
                if self.several:
                    return ((((2 * p - 1).abs() > margin) * (2 * p - 1).sign()).to(torch.int8),)
                best = p.topk(min(2, p.shape[1]), 1).values
                clear = (
                    best[:, :1] - best[:, 1:] > margin
                    if p.shape[1] > 1
                    else torch.ones_like(best, dtype=torch.bool)
                )
                return (((p == best[:, :1]) & clear).to(torch.int8),)

            return self.look(at)[0]

        @operation
        def learn_votes(self, votes: Tensor) -> float | None:
            """A row of which several classes are said is left out, as is a label said to be there and not to be."""
            votes = self.client.to_device(votes)
            if self.several:
                y, rows = self.only((votes > 0).to(self.client.dtype), votes != 0)
            else:
                y, rows = self.only(votes.argmax(1), (votes > 0).sum(1) == 1)
            if y.dim() == 1 and len(rows):  # every class comes as often
                rows = rows[
                    torch.multinomial(
                        1.0 / y[rows].bincount()[y[rows]].cpu(), len(rows), replacement=True
                    ).to(rows.device)
                ]
            return self.study(self.task_loss, self.labelled(y), rows)
