"""SAGE (Liu 2025): FixMatch on the public set with two pseudo-labels, a client's own and that of all, mixed by how sure each is.

docs/baselines.md says what is ours in it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, interpolate, one_hot

from unalike.core.federation import Federation
from unalike.core.operations import graph_safe, operation, query, sends
from unalike.data.augmentation import augment
from unalike.methods.public_data import Opinion, PublicTraining, PublicTrainingProgram, agreed
from unalike.tasks import Task


@dataclass
class SAGE(PublicTraining):
    """Where its own guess is sure, lambda y_own + (1 - lambda) y_all, lambda = exp(-kappa |c_own - c_all|); else y_all."""

    threshold: float = (
        0.95  # confidence from which a guess is sure; where neither is, nothing is learnt
    )
    kappa: float = math.log(2) / 0.05
    flips: bool = True  # images may be mirrored

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return task.classifies

    def check(self, clients: int, public_rows: int) -> list[tuple[str, str]]:
        problems = (
            [("threshold", f"must be from 0 to 1, got {self.threshold:g}.")]
            if not 0 <= self.threshold <= 1
            else []
        )
        problems += (
            [("kappa", f"must be at least 0, got {self.kappa:g}.")] if not self.kappa >= 0 else []
        )
        return problems + super().check(clients, public_rows)

    def share(self, fed: Federation, round: int) -> dict[str, float | None]:
        told = dict(fed.call("opinion"))
        return (
            dict(fed.call("match", per_client={c: {"others": agreed(fed, told, c)} for c in told}))
            if told
            else {}
        )

    class Program(PublicTrainingProgram):
        algorithm: "SAGE"

        @query
        @sends("rows")
        def opinion(self) -> Opinion:
            return self.look(lambda output: (self.cells(self.probabilities(output)),))[0]

        @operation
        def match(self, others: Tensor) -> float | None:
            """Guess on a weak view, learn on a strong one."""
            how, told = self.algorithm, self.client.to_device(others)

            def given(rows: Tensor) -> tuple:
                x = self.public_rows(rows, as_came=True)
                weak, strong = (
                    augment(x, strong=strong, moves=not self.client.task.dense, flips=how.flips)
                    for strong in (False, True)
                )
                return weak, strong, told[rows.to(told.device)]

            self.work += len(self.public) * how.passes / 3
            return self.study(self.matched, given)

        @graph_safe
        def matched(self, weak: Tensor | dict, strong: Tensor | dict, others: Tensor) -> Tensor:
            with torch.no_grad():
                own = self.probabilities(self.model(weak))
                others = (
                    interpolate(others, size=own.shape[-2:], mode="bilinear")
                    if others.dim() == 4
                    else others
                )
                target, kept = self.target(own, others)
            output = self.model(strong)
            cost = (
                binary_cross_entropy_with_logits(output, target, reduction="none")
                if self.several
                else -(target * output.log_softmax(1)).sum(1)
            )
            return (cost * kept).mean()

        def target(self, own: Tensor, all_: Tensor) -> tuple[Tensor, Tensor]:
            """What is to be said, like the probabilities, and where something is: one truth value a guess."""
            how = self.algorithm
            (mine, c), (theirs, c_all) = self.guess(own), self.guess(all_)
            weight = torch.where(c >= how.threshold, torch.exp(-how.kappa * (c - c_all).abs()), 0.0)
            kept = (c >= how.threshold) | (c_all >= how.threshold)
            if self.several:
                return weight * mine + (1 - weight) * theirs, kept
            hard = lambda y: one_hot(y, own.shape[1]).movedim(-1, 1).to(own)
            weight = weight[:, None]
            return weight * hard(mine) + (1 - weight) * hard(theirs), kept
