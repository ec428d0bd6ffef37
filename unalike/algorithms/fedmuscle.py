"""FedMuscle: clients with different models and tasks align their representations of a public set.

M. Setayesh, M. Beitollahi, Y. H. Khalil, H. Li, "Toward Enhancing Representation Learning in
Federated Multi-Task Settings", ICLR 2026, https://arxiv.org/abs/2602.01626.

This is the paper to the letter; docs/fedmuscle.md says how it was read. Lines are those of its
Algorithm 1; lines 8 to 13 are in `unalike.methods.alignment`. What our scenarios run is
`fedmuscleplus`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import ClassVar

from unalike.core.federation import Federation
from unalike.methods.added_parts import AddedParts
from unalike.methods.alignment import Alignment
from unalike.methods.public_alignment import PublicAlignmentProgram


@dataclass
class FedMuscle(Alignment):
    """Fields and defaults are the paper's (`Alignment`). E, R, the optimizer and its learning rate
    are the scenario's `training`; the alignment has the same optimizer as local epochs."""

    evaluates: ClassVar[bool] = True
    supports_safeguard: ClassVar[bool] = True
    RENAMED: ClassVar[dict[str, str]] = {
        field.name: f"{field.name} of fedmuscleplus" for field in fields(AddedParts)
    }

    def serve(self, fed: Federation) -> Iterator[int]:
        for round in fed.rounds():  # line 4
            fed.log_metrics("train_loss", dict(fed.call("train")))  # lines 5-6, 16-20
            fed.evaluate("after local")
            for epoch in range(self.passes):  # line 7
                fed.log_metrics(f"{self.loss}_loss", self.align(fed, round, epoch))  # lines 8-13
            fed.evaluate("after alignment")
            yield round

    class Program(PublicAlignmentProgram):
        algorithm: "FedMuscle"

        def unit_head(self) -> bool:  # section 3: w^n gives a normalised representation
            return True
