"""Federated Dropout (Caldas 2018): each client trains units drawn at random anew each round."""

from dataclasses import dataclass

import torch
from torch import Tensor

from unalike.base.randomness import stream
from unalike.core.federation import Federation
from unalike.methods.submodels import SubmodelMethod
from unalike.models.submodels import kept_units


@dataclass
class FedDropout(SubmodelMethod):
    """Of each layer as many units as the client can train."""

    def keep(self, fed: Federation, client: str) -> list[Tensor]:
        draws, ratio = stream(fed.seed, "units", fed.round, client), fed.state["ratio"][client]
        return [
            torch.randperm(width.units, generator=draws)[: kept_units(width, ratio)].sort().values
            for width in self.widths(fed, client)
        ]
