"""SimCLR (Chen 2020): everybody alone learns that two views of a public sample are one.

docs/baselines.md says what is ours in it.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from unalike.core.federation import Federation
from unalike.core.operations import graph_safe, operation
from unalike.data.augmentation import augment
from unalike.losses.contrastive import nt_xent
from unalike.methods.public_data import PublicTraining, PublicTrainingProgram
from unalike.models.model import Model


@dataclass
class SimCLR(PublicTraining):
    """Nothing but orders travels."""

    supports_safeguard: ClassVar[bool] = True

    temperature: float = 0.5
    width: int = 128  # of what is compared
    flips: bool = True  # images may be mirrored

    def check(self, clients: int, public_rows: int) -> list[tuple[str, str]]:
        problems = (
            [("temperature", f"must be above 0, got {self.temperature:g}.")]
            if not self.temperature > 0
            else []
        )
        problems += [("width", f"must be at least 1, got {self.width}.")] if self.width < 1 else []
        return problems + super().check(clients, public_rows)

    def share(self, fed: Federation, round: int) -> dict[str, float | None]:
        return dict(fed.call("contrast"))

    class Program(PublicTrainingProgram):
        algorithm: "SimCLR"

        def build(self, encoder: nn.Module) -> Model:
            """Views are compared behind two more layers, which the task does not see."""
            made, wide = super().build(encoder), self.encoder_width(encoder)
            made.add_module(
                "compared",
                nn.Sequential(
                    nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, self.algorithm.width)
                ),
            )
            return made

        @operation
        def contrast(self) -> float | None:
            def given(rows: Tensor) -> tuple:
                x = self.public_rows(rows, as_came=True)
                return tuple(augment(x, flips=self.algorithm.flips) for _ in range(2))

            self.work += len(self.public) * self.algorithm.passes  # each row is seen twice
            return self.study(self.apart, given)

        @graph_safe
        def apart(self, one: Tensor | dict, other: Tensor | dict) -> Tensor:
            return nt_xent(self.compared(one), self.compared(other), self.algorithm.temperature)

        def compared(self, x: Tensor | dict) -> Tensor:
            z = self.model.features(x)
            return self.model.get_submodule("compared")(z.mean((-2, -1)) if self.model.dense else z)
