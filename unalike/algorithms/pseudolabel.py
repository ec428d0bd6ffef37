"""Pseudo-labelling (Cascante-Bonilla 2021, curriculum labelling): everybody alone labels the public set and learns what it is surest of.

The share that is trusted grows with the rounds, from nothing to all. docs/baselines.md says what is ours in it.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from unalike.core.federation import Federation
from unalike.core.operations import operation
from unalike.methods.public_data import PublicTraining, PublicTrainingProgram
from unalike.tasks import Task


@dataclass
class PseudoLabel(PublicTraining):
    """Nothing but orders travels."""

    supports_safeguard: ClassVar[bool] = True

    steps: int = 5  # in which the trusted share grows: 20 % each

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return task.classifies

    def check(self, clients: int, public_rows: int) -> list[tuple[str, str]]:
        few = [("steps", f"must be at least 1, got {self.steps}.")] if self.steps < 1 else []
        return few + super().check(clients, public_rows)

    def share(self, fed: Federation, round: int) -> dict[str, float | None]:
        return dict(fed.call("label", share=self.trusted(round, fed.training.rounds)))

    def trusted(self, round: int, rounds: int) -> float:
        """Steps of equal length, the last with all.

        >>> [PseudoLabel().trusted(round, rounds=11) for round in (1, 2, 3, 9)]
        [0.2, 0.2, 0.4, 1.0]
        """
        return math.ceil(self.steps * round / max(rounds - 1, 1)) / self.steps

    class Program(PublicTrainingProgram):
        algorithm: "PseudoLabel"

        @operation
        def label(self, share: float) -> float | None:
            """Label the public set, and learn the surest share of it."""
            guess, sure = self.look(lambda output: self.guess(self.probabilities(output)))
            y, rows = self.only(guess, surest(sure, self.kinds(guess), share))
            return self.study(self.task_loss, self.labelled(y), rows)

        def kinds(self, guess: Tensor) -> Tensor:
            """A number for each different guess: a class, or a label that is there or not."""
            columns = torch.arange(guess.shape[1], device=guess.device) if self.several else 0
            return 2 * columns + guess.long() if self.several else guess


def surest(sure: Tensor, kinds: Tensor, share: float) -> Tensor:
    """Which guesses are among the surest share of their kind, at least one of each.

    >>> surest(torch.tensor([0.9, 0.6, 0.8, 0.7]), torch.tensor([0, 0, 0, 1]), 0.3)
    tensor([ True, False, False,  True])
    """
    found = torch.zeros_like(sure, dtype=torch.bool)
    for kind in kinds.unique():
        its = kinds == kind
        ranked = sure[its].sort(descending=True).values
        found |= its & (sure >= ranked[math.ceil(share * len(ranked)) - 1])
    return found
