"""Methods that only benchmarks need: controls of FedMuscle, and rivals with parts of FedMusclePlus.

A scenario names them as `algorithm: {name: "benchmarks.variants:SelfOnly"}`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from unalike.algorithms import CoFED, FedDF, FedMuscle, FedMusclePlus, FedProto, Local
from unalike.base.types import Parameters
from unalike.core.federation import Federation
from unalike.core.operations import operation, query, sends
from unalike.core.program import ClientProgram
from unalike.methods.distillation import distill_public
from unalike.methods.group_averaging import GroupAveragingProgram, HeadAveraging
from unalike.methods.parts import Part, TakesParts, train_locally
from unalike.methods.shared_subspace import SharedProjectionInit, SharedSubspaceProgram
from unalike.methods.slow_backbone import SlowBackboneProgram
from unalike.models.model import Model


@dataclass
class SelfOnly(FedMusclePlus):
    """Every peer of a client is the client itself: what contrast alone does."""

    def draw_peers(
        self, fed: Federation, views: dict[str, Tensor], round: int, epoch: int, batch: int
    ) -> dict[str, list[str]]:
        return {client: [client] * self.peers for client in views}


@dataclass
class OneOptimizer(FedMusclePlus):
    """Local epochs and the alignment share one optimizer."""

    class Program(FedMusclePlus.Program):
        algorithm: "OneOptimizer"

        def alignment_optimizer(self) -> torch.optim.Optimizer:
            return self.optimizer()


@dataclass
class PeersOfPass(FedMusclePlus):
    """Peers are drawn once a pass."""

    draws_peers_each_batch: ClassVar[bool] = False


@dataclass
class MultilabelHeads(FedMusclePlus):
    """Only multi-label clients average heads, so that the safeguard can evaluate the others."""

    class Program(FedMusclePlus.Program):
        algorithm: "MultilabelHeads"

        @query
        @sends("open")
        def kind_of(self) -> str:
            return super().kind_of() if self.client.task.multilabel else ""


class Away(Part):
    """A client that takes part from some round on."""

    def __init__(self, client: str, arrives: int):
        self.client = client
        self.arrives = arrives

    def before_local(self, fed: Federation) -> None:
        if fed.round < self.arrives:
            fed.dropped.add(self.client)


@dataclass
class Newcomer(FedMusclePlus):
    """The client `newcomer` joins in round `arrives`."""

    newcomer: str = ""
    arrives: int = 1

    def parts(self) -> list[Part]:
        return [Away(self.newcomer, self.arrives), *super().parts()]


class RefitProgram(SlowBackboneProgram):
    """Can train its head alone, on its own labels."""

    algorithm: Any

    @operation
    def refit_head(self) -> float:
        """`refit` epochs of the head, with an optimizer of its own; the rest stays as it is."""
        epochs = self.algorithm.refit
        return self.learn(range(epochs), self.optimizer("refit"), self.head_loss)


@dataclass
class OneRound(FedMuscle):
    """FedMuscle as printed, with what may decide what a client has after its last alignment.

    Args:
        head_input: what the head gets; printed are unit vectors.
        order: whether local epochs or the alignment come first in a round; printed is "local".
        refit: epochs of the head alone after the last round; printed are none.
        own_optimizer: the alignment has an optimizer of its own; printed is one for both.
        own_peers: every peer of a client is the client itself.
    """

    evaluates: ClassVar[bool] = False

    head_input: Literal["raw", "unit"] = "unit"
    order: Literal["local", "alignment"] = "local"
    refit: int = 0
    own_optimizer: bool = False
    own_peers: bool = False

    def serve(self, fed: Federation) -> Iterator[int]:
        for round in fed.rounds():
            if self.order == "local":
                fed.call("train")
            for epoch in range(self.passes):
                self.align(fed, round, epoch)
            if self.order == "alignment":
                fed.call("train")
            yield round

    def finish(self, fed: Federation) -> None:
        if self.refit:
            fed.call("refit_head", quorum=0)

    def draw_peers(
        self, fed: Federation, views: dict[str, Tensor], round: int, epoch: int, batch: int
    ) -> dict[str, list[str]]:
        if self.own_peers:
            return {client: [client] * self.peers for client in views}
        return super().draw_peers(fed, views, round, epoch, batch)

    class Program(RefitProgram, FedMuscle.Program):
        algorithm: "OneRound"

        def unit_head(self) -> bool:
            return self.algorithm.head_input == "unit"

        def alignment_optimizer(self) -> torch.optim.Optimizer:
            return self.optimizer("align") if self.algorithm.own_optimizer else self.optimizer()


@dataclass
class Alone(Local):
    """Training alone with FedMuscle's model: a head on `width` numbers, raw or unit vectors.

    With `backbone_lr_scale: 0` it is a probe: only the head learns. `refit`: epochs of the head
    alone after the last round.
    """

    width: int = 256
    head_input: Literal["raw", "unit"] = "raw"
    backbone_lr_scale: float = 1.0
    refit: int = 0

    def serve(self, fed: Federation) -> Iterator[int]:
        operation = "train" if self.backbone_lr_scale == 1 else "train_gently"
        for round in fed.rounds():
            fed.log_metrics("train_loss", train_locally(fed, operation))
            yield round

    def finish(self, fed: Federation) -> None:
        if self.refit:
            fed.call("refit_head", quorum=0)

    class Program(RefitProgram):
        algorithm: "Alone"

        def build(self, encoder: nn.Module) -> Model:
            return projected_model(self, encoder, unit=self.algorithm.head_input == "unit")


class MeansHead(nn.Module):
    """A linear head on centred features of length 1."""

    centre: Tensor

    def __init__(self, width: int, labels: int):
        super().__init__()
        self.register_buffer("centre", torch.zeros(width))
        self.linear = nn.Linear(width, labels)

    def directions(self, features: Tensor) -> Tensor:
        """Centred features (n, width) of length 1."""
        return nn.functional.normalize(features - self.centre, dim=1)

    def forward(self, features: Tensor) -> Tensor:
        return self.linear(self.directions(features))


@dataclass
class ClassMeans(Local):
    """Alone, without training: the nearest class mean of the encoder's features.

    Of several labels each is present where its rows' mean is nearer than that of the others.
    """

    def serve(self, fed: Federation) -> Iterator[int]:
        for round in fed.rounds():
            if round == 1:
                fed.call("fit_means")
            yield round

    class Program(ClientProgram):
        algorithm: "ClassMeans"

        def build(self, encoder: nn.Module) -> Model:
            task = self.client.task
            head = MeansHead(self.encoder_width(encoder), len(task.labels))
            return Model(encoder, nn.Identity(), head, task.dense)

        @operation
        @torch.no_grad()
        def fit_means(self) -> None:
            """Make the head the nearest class mean of the training rows."""
            data = self.samples("train")
            assert data is not None
            self.model.eval()
            features, labels = [], []
            for rows in torch.arange(len(data)).split(64):
                x, y = self.training_batch(rows)
                features.append(self.model.features(self.client.to_device(x)))
                labels.append(y.to(self.client.device))
            head: Any = self.model.head
            z, y = torch.cat(features), torch.cat(labels)
            head.centre.copy_(z.mean(0))
            z = head.directions(z)
            several = y.dim() == 2
            present = y == 1 if several else nn.functional.one_hot(y, len(self.client.task.labels))
            present = present.to(z.dtype)
            means = (present.T @ z) / present.sum(0).clamp(min=1)[:, None]
            rest = 1 - present
            others = (rest.T @ z) / rest.sum(0).clamp(min=1)[:, None] if several else 0 * means
            bias = (others.square().sum(1) - means.square().sum(1)) / 2
            absent = present.sum(0) == 0  # a label without a row is never the answer
            head.linear.weight.copy_(means - others)
            head.linear.bias.copy_(bias.masked_fill(absent, -1e3))


def projected_model(program: Any, encoder: nn.Module, unit: bool = False) -> Model:
    """The encoder, a linear projection to the method's width, and the task's head."""
    width = program.algorithm.width
    projection = nn.Linear(program.encoder_width(encoder), width)
    return Model(encoder, projection, program.head(width), program.client.task.dense, unit=unit)


class RivalProgram(SharedSubspaceProgram, GroupAveragingProgram):
    """A rival's model with a projection that can start in the subspace of all clients, and a head
    that can be averaged."""

    algorithm: Any

    def build(self, encoder: nn.Module) -> Model:
        return projected_model(self, encoder)

    def averaged_parameters(self) -> Parameters:
        parameters = super().averaged_parameters()
        if not self.algorithm.average_heads:
            return parameters
        return {name: p for name, p in parameters.items() if name.startswith("head.")}


@dataclass
class RivalParts(TakesParts):
    """Parts of FedMusclePlus for a rival.

    Args:
        width: to which projections lead.
        joint_start: projections start in one subspace of all clients.
        average_heads: heads of clients with the same task and labels are averaged in each round.
    """

    needs_public: ClassVar[bool] = True

    width: int = 256
    joint_start: bool = False
    average_heads: bool = False

    def parts(self) -> list[Part]:
        parts: list[Part] = [SharedProjectionInit()] if self.joint_start else []
        return [*parts, HeadAveraging()] if self.average_heads else parts


@dataclass
class FedDFWithParts(RivalParts, FedDF):
    """FedDF with parts of FedMusclePlus. Where heads are averaged, whole models are not."""

    def learn_from_public(self, fed: Federation, round: int) -> dict[str, float | None]:
        return distill_public(fed) if self.average_heads else super().learn_from_public(fed, round)

    class Program(RivalProgram, FedDF.Program):
        algorithm: "FedDFWithParts"


@dataclass
class CoFEDWithParts(RivalParts, CoFED):
    """CoFED with parts of FedMusclePlus."""

    class Program(RivalProgram, CoFED.Program):
        algorithm: "CoFEDWithParts"


@dataclass
class FedProtoWithParts(RivalParts, FedProto):
    """FedProto with parts of FedMusclePlus."""

    class Program(RivalProgram, FedProto.Program):
        algorithm: "FedProtoWithParts"
