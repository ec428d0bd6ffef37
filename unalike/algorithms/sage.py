"""SAGE: FixMatch on the public set with two pseudo-labels, a client's own and that of all clients,
mixed by their confidence.

Y. Liu et al., "Mind the Gap: Confidence Discrepancy Can Guide Federated Semi-Supervised Learning
Across Pseudo-Mismatch", CVPR 2025, https://arxiv.org/abs/2503.13227. docs/baselines.md says what is
ours in it.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, interpolate, one_hot

from unalike.base.message import Value
from unalike.core.federation import Federation
from unalike.core.operations import graph_safe, operation, query, sends
from unalike.data.augmentation import augment
from unalike.methods.public_data import (
    PublicTraining,
    predict_public,
    public_samples,
    train_on_public,
)
from unalike.methods.public_predictions import (
    Prediction,
    average_by_label,
    blank_prediction,
    likeliest_labels,
    pool_dense,
)
from unalike.methods.public_views import PublicViews
from unalike.tasks import Task
from unalike.training.loop import Positive


@dataclass
class SAGE(PublicTraining):
    """The target is w y_own + (1 - w) y_all. Where the own label is sure, w is
    exp(-kappa |c_own - c_all|) of the confidences c, else 0. Nothing is learnt where neither
    is sure.

    Args:
        threshold: confidence from which a label is sure.
        kappa: how fast the own label's weight falls with the difference of confidences.
        flips: images may be mirrored.
        views: how many weak and how many strong views of each sample are made once, of which every
            pass takes one each; None: every pass makes new ones. With a frozen backbone kept ones
            save most of the time.
    """

    threshold: Annotated[float, Field(ge=0, le=1)] = 0.95
    kappa: Annotated[float, Field(ge=0)] = math.log(2) / 0.05
    flips: bool = True
    views: Positive | None = None

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return task.classifies

    def learn_from_public(self, fed: Federation, round: int) -> dict[str, float | None]:
        predictions: dict[str, Tensor] = dict(fed.call("opinion"))
        means: dict[str, dict[str, Value]] = {
            c: {"others": average_by_label(fed, predictions, c)} for c in predictions
        }
        return dict(fed.call("match", per_client=means)) if means else {}

    class Program(PublicViews):
        algorithm: "SAGE"

        @query
        @sends("rows")
        def opinion(self) -> Prediction:
            """Probabilities of the labels for all public rows."""
            task = self.client.task
            return predict_public(
                self, lambda output: (pool_dense(task, task.probabilities(output)),)
            )[0]

        def blank_opinion(self) -> Tensor:
            return blank_prediction(self)

        @operation
        def match(self, others: Tensor) -> float | None:
            """Label weakly augmented samples, and train on strongly augmented ones.

            Args:
                others: mean probabilities of all clients, in the form of `opinion`.
            """
            mean = self.client.to_device(others)

            def inputs(rows: Tensor) -> tuple:
                weak = self.public_views(rows, partial(self.augment, strong=False), "weak")
                strong = self.public_views(rows, partial(self.augment, strong=True), "strong")
                return *weak, *strong, mean[rows.to(mean.device)]

            self.work += len(public_samples(self)) * self.algorithm.passes / 3
            return train_on_public(self, self.matching_loss, inputs)

        def augment(self, x: Tensor | dict, strong: bool) -> Tensor | dict:
            dense = self.client.task.dense
            return augment(x, strong=strong, moves=not dense, flips=self.algorithm.flips)

        @graph_safe
        def matching_loss(self, weak: Tensor | dict, strong: Tensor | dict, mean: Tensor) -> Tensor:
            """Cross-entropy of the strong view with the mixed pseudo-label of the weak view."""
            task = self.client.task
            with torch.no_grad():
                own = task.probabilities(self.model(weak))
                if mean.dim() == 4:
                    mean = interpolate(mean, size=own.shape[-2:], mode="bilinear")
                target, sure = self.target(own, mean)
            output = self.model(strong)
            if task.multilabel:
                cost = binary_cross_entropy_with_logits(output, target, reduction="none")
            else:
                cost = -(target * output.log_softmax(1)).sum(1)
            return (cost * sure).mean()

        def target(self, own: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
            """The mixed pseudo-label, in the form of the probabilities, and where it is sure: bool,
            one per label (multi-label) or per sample or pixel."""
            task = self.client.task
            threshold = self.algorithm.threshold
            own_label, own_confidence = likeliest_labels(task, own)
            mean_label, mean_confidence = likeliest_labels(task, mean)
            gap = (own_confidence - mean_confidence).abs()
            weight = torch.exp(-self.algorithm.kappa * gap)
            weight = torch.where(own_confidence >= threshold, weight, 0.0)
            sure = (own_confidence >= threshold) | (mean_confidence >= threshold)
            if not task.multilabel:
                classes = own.shape[1]
                own_label = one_hot(own_label, classes).movedim(-1, 1).to(own)
                mean_label = one_hot(mean_label, classes).movedim(-1, 1).to(own)
                weight = weight[:, None]
            return weight * own_label + (1 - weight) * mean_label, sure
