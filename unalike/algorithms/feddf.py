"""FedDF: ensemble distillation on a public set, for clients with different architectures.

T. Lin, L. Kong, S. U. Stich, M. Jaggi, "Ensemble Distillation for Robust Model Fusion in Federated
Learning", 2020, https://arxiv.org/abs/2006.07242. docs/baselines.md says what is ours in it.
"""

from dataclasses import dataclass

from unalike.core.federation import Federation
from unalike.methods.distillation import DistillationProgram, distill_public
from unalike.methods.group_averaging import GroupAveragingProgram, average_groups
from unalike.methods.public_data import PublicTraining


@dataclass
class FedDF(PublicTraining):
    """Models of one architecture, task and label set are averaged; then each client distils the
    mean public logits of all clients with its labels into its own model."""

    def learn_from_public(self, fed: Federation, round: int) -> dict[str, float | None]:
        average_groups(fed)
        return distill_public(fed)

    class Program(GroupAveragingProgram, DistillationProgram):
        algorithm: "FedDF"
