"""FedMusclePlus: FedMuscle's alignment with steps that we added, each a part in `unalike.methods`.

Not a published method; what it builds on is

M. Setayesh, M. Beitollahi, Y. H. Khalil, H. Li, "Toward Enhancing Representation Learning in
Federated Multi-Task Settings", ICLR 2026, https://arxiv.org/abs/2602.01626.

docs/fedmuscleplus.md says what each part is worth.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from unalike.core.federation import Federation
from unalike.methods.absent_classes import AbsentClassProgram
from unalike.methods.added_parts import AddedParts
from unalike.methods.alignment import Alignment
from unalike.methods.distillation import DistillationProgram
from unalike.methods.final_model import SnapshotProgram
from unalike.methods.group_averaging import GroupAveragingProgram
from unalike.methods.parts import train_locally
from unalike.methods.public_alignment import PublicAlignmentProgram
from unalike.methods.shared_subspace import SharedSubspaceProgram
from unalike.methods.slow_backbone import SlowBackboneProgram


@dataclass
class FedMusclePlus(AddedParts, Alignment):
    """The alignment has an optimizer of its own, peers are drawn for each batch, heads get
    representations as they are, clients end with the model before the last alignment; and the
    parts that are asked for.

    Args:
        head_input: what the head gets: the projection's output ("raw"), or unit vectors as in
            FedMuscle ("unit").
    """

    evaluates: ClassVar[bool] = True
    supports_safeguard: ClassVar[bool] = True
    draws_peers_each_batch: ClassVar[bool] = True

    head_input: Literal["raw", "unit"] = "raw"

    def serve(self, fed: Federation) -> Iterator[int]:
        parts = self.part_list()
        for round in fed.rounds():
            parts.before_local(fed)
            fed.log_metrics("train_loss", train_locally(fed, self.local_operation, parts))
            fed.evaluate("after local")
            parts.after_local(fed)
            for epoch in range(self.passes):
                fed.log_metrics(f"{self.loss}_loss", self.align(fed, round, epoch))
            parts.after_exchange(fed)
            fed.evaluate("after alignment")
            yield round

    class Program(
        PublicAlignmentProgram,
        AbsentClassProgram,
        GroupAveragingProgram,
        SlowBackboneProgram,
        DistillationProgram,
        SharedSubspaceProgram,
        SnapshotProgram,
    ):
        algorithm: "FedMusclePlus"
        averaged_prefix: ClassVar[str] = "head."

        def unit_head(self) -> bool:
            return self.algorithm.head_input == "unit"

        def always_projects(self) -> bool:
            return self.algorithm.projection_init == "shared"

        def alignment_optimizer(self) -> torch.optim.Optimizer:
            return self.algorithm.public_optimizer(self, "align")
