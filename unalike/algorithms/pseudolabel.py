"""Pseudo-labelling: each client labels the public set itself and trains on its surest labels.

P. Cascante-Bonilla, F. Tan, Y. Qi, V. Ordonez, "Curriculum Labeling: Revisiting Pseudo-Labeling for
Semi-Supervised Learning", 2021, https://arxiv.org/abs/2001.06001.

The share that is used grows with the rounds, from a step to all. docs/baselines.md has more.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from unalike.core.federation import Federation
from unalike.core.operations import operation
from unalike.core.program import ClientProgram
from unalike.methods.public_data import (
    PublicTraining,
    predict_public,
    train_on_public,
    with_targets,
)
from unalike.methods.public_predictions import (
    likeliest_labels,
    mask_unknown,
)
from unalike.tasks import Task
from unalike.training.loop import Positive


@dataclass
class PseudoLabel(PublicTraining):
    """Clients exchange nothing.

    Args:
        steps: steps in which the share of used labels grows to all.
    """

    supports_safeguard: ClassVar[bool] = True

    steps: Positive = 5

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return task.classifies

    def learn_from_public(self, fed: Federation, round: int) -> dict[str, float | None]:
        return dict(fed.call("label", share=self.share_in(round, fed.training.rounds)))

    def share_in(self, round: int, rounds: int) -> float:
        """The share of labels used in a round: steps of equal length, the last with all.

        >>> [PseudoLabel().share_in(round, rounds=11) for round in (1, 2, 3, 9)]
        [0.2, 0.2, 0.4, 1.0]
        """
        return math.ceil(self.steps * round / max(rounds - 1, 1)) / self.steps

    class Program(ClientProgram):
        algorithm: "PseudoLabel"

        @operation
        def label(self, share: float) -> float | None:
            """Label the public set, and train on the surest share of each kind of label."""
            task = self.client.task
            labels, confidence = predict_public(
                self, lambda output: likeliest_labels(task, task.probabilities(output))
            )
            chosen = select_surest(confidence, self.label_kinds(labels), share)
            y, rows = mask_unknown(task, labels, chosen)
            return train_on_public(self, self.task_loss, with_targets(self, y), rows)

        def label_kinds(self, labels: Tensor) -> Tensor:
            """A number per kind of label: a class or, of a multi-label task, a label's presence or
            absence. Same shape as `labels`."""
            if not self.client.task.multilabel:
                return labels
            return 2 * torch.arange(labels.shape[1], device=labels.device) + labels.long()


def select_surest(confidence: Tensor, kinds: Tensor, share: float) -> Tensor:
    """Which labels are among the surest share of their kind, at least one of each; bool.

    >>> select_surest(torch.tensor([0.9, 0.6, 0.8, 0.7]), torch.tensor([0, 0, 0, 1]), 0.3)
    tensor([ True, False, False,  True])
    """
    chosen = torch.zeros_like(confidence, dtype=torch.bool)
    for kind in kinds.unique():
        of_kind = kinds == kind
        ranked = confidence[of_kind].sort(descending=True).values
        threshold = ranked[math.ceil(share * len(ranked)) - 1]
        chosen |= of_kind & (confidence >= threshold)
    return chosen
