"""FedMD: unlike models digest the consensus of their scores on public data.

Li and Wang, "FedMD: Heterogenous Federated Learning via Model Distillation", 2019,
https://arxiv.org/abs/1910.03581.

Each round clients revisit their own samples, send their class scores (logits) of the public rows,
and digest the mean over clients (Algorithm 1): they minimise the mean squared difference to it. The
paper names no loss; its code has the absolute difference, whose gradient knows signs only. Labels
are matched by name. Left out: pretraining on public labels, as public rows have none here,
and the random subset of them that is scored each round; all are.
"""

from dataclasses import dataclass

from torch import Tensor

from unalike.core.federation import Federation
from unalike.core.operations import graph_safe
from unalike.methods.distillation import DistillationProgram, distill_public
from unalike.methods.public_data import PublicTraining
from unalike.methods.public_predictions import pool_dense
from unalike.tasks import Task


@dataclass
class FedMD(PublicTraining):
    """Communicate, aggregate, distribute, digest, revisit."""

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return task.classifies

    def learn_from_public(self, fed: Federation, round: int) -> dict[str, float | None]:
        return distill_public(fed)

    class Program(DistillationProgram):
        algorithm: "FedMD"

        @graph_safe
        def distillation_loss(self, x: Tensor | dict, teacher: Tensor) -> Tensor:
            """Mean squared difference to the consensus, scores counted from their row's mean."""
            task = self.client.task
            scores = pool_dense(task, self.model(x))
            if task.classifies and not task.multilabel:
                scores = scores - scores.mean(1, keepdim=True)
            return ((scores - teacher) ** 2).mean()
