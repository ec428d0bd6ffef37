"""Methods that only benchmarks need: controls of FedMuscle, and rivals with parts of FedMusclePlus.

A scenario names them as `algorithm: {name: "benchmarks.variants:SelfOnly"}`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from unalike.algorithms import CoFED, FedDF, FedMusclePlus, Local
from unalike.core.federation import Federation
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


@dataclass
class Alone(Local):
    """Training alone with FedMuscle's model: a head on `width` numbers, raw or unit vectors.

    With `backbone_lr_scale: 0` it is a probe: only the head learns.
    """

    width: int = 256
    head_input: Literal["raw", "unit"] = "raw"
    backbone_lr_scale: float = 1.0

    def serve(self, fed: Federation) -> Iterator[int]:
        operation = "train" if self.backbone_lr_scale == 1 else "train_gently"
        for round in fed.rounds():
            fed.log_metrics("train_loss", train_locally(fed, operation))
            yield round

    class Program(SlowBackboneProgram):
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
