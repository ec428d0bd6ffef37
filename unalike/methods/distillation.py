"""Distillation on the public set: clients learn the mean prediction of all with their labels.

After FedDF, Lin et al. 2020, https://arxiv.org/abs/2006.07242; each client trains its own model.
"""

from typing import Any, ClassVar

from torch import Tensor

from unalike.base.message import Value
from unalike.core.federation import Federation
from unalike.core.operations import graph_safe, operation, query, sends
from unalike.core.program import ClientProgram
from unalike.core.safeguard import NOT_CROSS_VALIDATED, exclude_from_cross_validation
from unalike.methods.parts import Part, drop_invalid_replicas
from unalike.methods.public_data import predict_public, train_on_public, with_targets
from unalike.methods.public_predictions import (
    Prediction,
    average_by_label,
    blank_prediction,
    clients_with_labels,
    pool_dense,
)


class DistillationProgram(ClientProgram):
    """Sends logits of the public rows, and learns the mean over clients.

    The method has `batch`, `passes` and `public_optimizer`.
    """

    algorithm: Any
    distils_by_label: ClassVar[bool] = True  # from clients with labels in common only

    @query
    @sends("rows")
    def opinion(self) -> Prediction:
        """Logits of all public rows. Those of a classifier have mean 0 per row, so that different
        clients' can be averaged."""
        task = self.client.task
        (logits,) = predict_public(self, lambda output: (pool_dense(task, output),))
        if not task.classifies or task.multilabel:
            return logits
        return logits - logits.mean(1, keepdim=True)

    def blank_opinion(self) -> Tensor:
        return blank_prediction(self)

    @operation
    def distil(self, teacher: Tensor) -> float | None:
        """Train on the public set towards the teacher's logits, in the form of `opinion`."""
        self.memory[NOT_CROSS_VALIDATED] = True
        inputs = with_targets(self, self.client.to_device(teacher))
        return train_on_public(self, self.distillation_loss, inputs)

    @graph_safe
    def distillation_loss(self, x: Tensor | dict, teacher: Tensor) -> Tensor:
        """The task's distillation loss on a batch."""
        task = self.client.task
        return task.imitate(pool_dense(task, self.model(x)), teacher)

    def learn(self, *args: Any, **kwargs: Any) -> float:
        drop_invalid_replicas(self)
        return super().learn(*args, **kwargs)


def distill_public(fed: Federation, multilabel_only: bool = False) -> dict[str, float | None]:
    """Distil averaged public logits among clients with common labels; others are not called.

    Args:
        multilabel_only: only among multi-label clients. A classifier has to name one of its
            classes even where a public row shows none of them.
    Returns: each client's distillation loss.
    """
    able = fed.active
    if multilabel_only:
        able = [c for c in able if fed.infos[c].has("multilabel")]
    sharing = [c for c in able if len(clients_with_labels(fed, able, c)) > 1]
    logits: dict[str, Tensor] = dict(fed.call("opinion", clients=sharing)) if sharing else {}
    teachers: dict[str, dict[str, Value]] = {
        c: {"teacher": average_by_label(fed, logits, c)}
        for c in logits
        if len(clients_with_labels(fed, logits, c)) > 1
    }
    exclude_from_cross_validation(fed.state, teachers)
    return dict(fed.call("distil", per_client=teachers)) if teachers else {}


class PublicDistillation(Part):
    """Distillation on the public set at the end of each round.

    Args:
        multilabel_only: only among multi-label clients.
        optional: not in a run with the safeguard or with privacy.
    """

    def __init__(self, multilabel_only: bool = False, optional: bool = False):
        self.multilabel_only = multilabel_only
        self.optional = optional

    def after_exchange(self, fed: Federation) -> None:
        if self.optional and (fed.guarded or fed.privacy is not None):
            return
        fed.log_metrics("public_loss", distill_public(fed, self.multilabel_only))
