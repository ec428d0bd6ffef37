"""FedDF (Lin 2020): models of any architecture learn what all who know a label think of the public set, on average.

Those of one architecture, task and label set first go on from the mean of their parameters. docs/baselines.md says what is ours in it.
"""

from dataclasses import dataclass

from unalike.core.federation import Federation
from unalike.methods.distillation import DistillationProgram, teach
from unalike.methods.group_averaging import GroupAveragingProgram, unite
from unalike.methods.public_data import PublicTraining


@dataclass
class FedDF(PublicTraining):
    """Ensemble distillation, done by each client for its own model."""

    def share(self, fed: Federation, round: int) -> dict[str, float | None]:
        unite(fed)
        return teach(fed)

    class Program(GroupAveragingProgram, DistillationProgram):
        algorithm: "FedDF"
