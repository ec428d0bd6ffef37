"""SimCLR: each client alone learns on the public set that two views of a sample belong together.

T. Chen, S. Kornblith, M. Norouzi, G. Hinton, "A Simple Framework for Contrastive Learning of Visual
Representations", 2020, https://arxiv.org/abs/2002.05709. docs/baselines.md says what is ours in it.
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor, nn

from unalike.core.federation import Federation
from unalike.core.operations import graph_safe, operation
from unalike.data.augmentation import augment
from unalike.losses.contrastive import nt_xent
from unalike.methods.public_data import (
    PublicTraining,
    public_samples,
    train_on_public,
)
from unalike.methods.public_views import PublicViews
from unalike.models.model import Model, mean_over_positions
from unalike.training.loop import Positive

PROJECTION = "compared"  # name of the projection head in the model


@dataclass
class SimCLR(PublicTraining):
    """Clients exchange nothing.

    Args:
        temperature: of the contrast.
        width: of what is contrasted.
        flips: images may be mirrored.
        views: how many views of each sample are made once, of which every pass takes two; None:
            every pass makes new ones. With a frozen backbone kept ones save most of the time.
    """

    supports_safeguard: ClassVar[bool] = True

    temperature: Annotated[float, Field(gt=0)] = 0.5
    width: Positive = 128
    flips: bool = True
    views: Annotated[int, Field(ge=2)] | None = None

    def learn_from_public(self, fed: Federation, round: int) -> dict[str, float | None]:
        return dict(fed.call("contrast"))

    class Program(PublicViews):
        algorithm: "SimCLR"

        def build(self, encoder: nn.Module) -> Model:
            """The usual model with a projection head of two layers, which the task does not use."""
            model = super().build(encoder)
            width = self.encoder_width(encoder)
            projection = nn.Sequential(
                nn.Linear(width, width), nn.ReLU(), nn.Linear(width, self.algorithm.width)
            )
            model.add_module(PROJECTION, projection)
            return model

        @operation
        def contrast(self) -> float | None:
            """Train on two random views of each public sample."""
            change = partial(augment, flips=self.algorithm.flips)

            def inputs(rows: Tensor) -> tuple:
                return tuple(self.public_views(rows, change, count=2))

            # train_on_public counts each row once, but two views of it are seen.
            self.work += len(public_samples(self)) * self.algorithm.passes
            return train_on_public(self, self.contrastive_loss, inputs)

        @graph_safe
        def contrastive_loss(self, view: Tensor | dict, other: Tensor | dict) -> Tensor:
            return nt_xent(self.project(view), self.project(other), self.algorithm.temperature)

        def project(self, x: Tensor | dict) -> Tensor:
            """What is contrasted, (n, width); of a dense task the mean of its map is projected."""
            features = self.model.features(x)
            if self.model.dense:
                features = mean_over_positions(features)
            return self.model.get_submodule(PROJECTION)(features)
