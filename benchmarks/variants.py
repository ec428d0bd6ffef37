"""Methods that only benchmarks need: controls of FedMuscle, and rivals with parts of FedMusclePlus.

A scenario names them as `algorithm: {name: "benchmarks.variants:SelfOnly"}`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from unalike.algorithms import CoFED, FedDF, FedMuscle, FedMusclePlus, Local
from unalike.core.federation import Federation
from unalike.core.operations import operation
from unalike.methods.parts import Part, train_locally
from unalike.methods.public_data import PublicTraining
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

    def parts(self, width: int) -> list[Part]:
        return [Away(self.newcomer, self.arrives), *super().parts(width)]


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

        def build(self, encoder: nn.Module) -> Model:
            model = super().build(encoder)
            model.unit = self.algorithm.head_input == "unit"
            return model

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


def projected_model(program: Any, encoder: nn.Module, unit: bool = False) -> Model:
    """The encoder, a linear projection to the method's width, and the task's head."""
    width = program.algorithm.width
    projection = nn.Linear(program.encoder_width(encoder), width)
    return Model(encoder, projection, program.head(width), program.client.task.dense, unit=unit)


class JointStartProgram(SharedSubspaceProgram):
    """A model with a projection, which can be fitted to the subspace of all clients."""

    algorithm: Any

    def build(self, encoder: nn.Module) -> Model:
        return projected_model(self, encoder)


@dataclass
class JointStart(PublicTraining):
    """Projections start in one subspace of all clients, before a rival's first round."""

    width: int = 256

    def parts(self) -> list[Part]:
        return [SharedProjectionInit(self.width)]


@dataclass
class FedDFJointStart(JointStart, FedDF):
    """FedDF whose clients start in one subspace."""

    class Program(JointStartProgram, FedDF.Program):
        algorithm: "FedDFJointStart"


@dataclass
class CoFEDJointStart(JointStart, CoFED):
    """CoFED whose clients start in one subspace."""

    class Program(JointStartProgram, CoFED.Program):
        algorithm: "CoFEDJointStart"
