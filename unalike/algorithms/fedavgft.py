"""FedAvg with fine-tuning: one model is averaged, then adapted to every client.

Collins et al., "FedAvg with Fine Tuning: Local Updates Lead to Representation Learning", NeurIPS
2022, https://arxiv.org/abs/2205.13692.

The rounds are FedAvg's. Whenever a client is evaluated, and at the end, it first trains the shared
model for `fine_tuning_epochs` on its own samples, 10 as in the paper's experiments. Nothing is left
out.
"""

from dataclasses import dataclass

from unalike.methods.personal import FineTuning
from unalike.training.loop import Positive


@dataclass
class FedAvgFT(FineTuning):
    """Federated averaging, then local epochs; all of it is in `FineTuning`.

    Args:
        fine_tuning_epochs: local epochs after the last round.
    """

    fine_tuning_epochs: Positive = 10
