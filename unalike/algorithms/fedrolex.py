"""FedRolex (Alam 2022): as HeteroFL, but the window of channels rolls on by one each round, so that all are trained alike."""

from dataclasses import dataclass

import torch
from torch import Tensor

from unalike.core.federation import Federation
from unalike.methods.submodels import SubmodelMethod
from unalike.models.submodels import kept_units


@dataclass
class FedRolex(SubmodelMethod):
    """In round t a layer of n units sends those from t mod n on, around the end (eq. 4)."""

    def keep(self, fed: Federation, client: str) -> list[Tensor]:
        ratio = fed.state["ratio"][client]
        return [
            ((torch.arange(kept_units(width, ratio)) + fed.round) % width.units).sort().values
            for width in self.widths(fed, client)
        ]
