"""FedDSE (Wang 2024), as far as it is told: each client trains the units of the server's model that its own data excite most."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from torch import Tensor

from unalike.core.federation import Federation
from unalike.methods.submodels import SubmodelMethod
from unalike.models.submodels import first_units, kept_units


@dataclass
class FedDSE(SubmodelMethod):
    """Every so many rounds a client gets the whole model, whose bytes count, and scores each unit by its mean activation."""

    every: Annotated[int, Field(ge=1)] = 10

    def privacy_problem(self) -> str | None:
        return "FedDSE's clients tell how much their data excite each unit, which nothing protects"

    def register_clients(self, fed: Federation) -> None:
        super().register_clients(fed)
        known = fed.state.setdefault("excitement", {})
        due = [
            c
            for c in fed.active
            if c in fed.state["group"]
            and fed.round >= known.get(c, {"round": -self.every})["round"] + self.every
        ]
        known |= {
            c: {"round": fed.round, "of": [units[:, 0] for units in told]}
            for c, told in self.excitement(fed, due).items()
        }

    def keep(self, fed: Federation, client: str) -> list[Tensor]:
        widths, ratio = self.widths(fed, client), fed.state["ratio"][client]
        if client not in fed.state["excitement"]:
            return first_units(widths, ratio)
        return [
            score.cpu()
            .argsort(descending=True, stable=True)[: kept_units(width, ratio)]
            .sort()
            .values
            for width, score in zip(widths, fed.state["excitement"][client]["of"], strict=True)
        ]
