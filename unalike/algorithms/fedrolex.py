"""FedRolex: submodels from a window of channels that rolls on every round.

Alam et al., "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction",
NeurIPS 2022, https://arxiv.org/abs/2212.01548.

As HeteroFL, but the window of channels that a client gets moves on by one every round, so that all
channels are trained equally often. Nothing of the paper is left out.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from unalike.core.federation import Federation
from unalike.methods.submodels import SubmodelMethod
from unalike.models.submodels import kept_units


@dataclass
class FedRolex(SubmodelMethod):
    """In round t a layer of n units sends those from t mod n on, wrapping around (eq. 4)."""

    def select_units(self, fed: Federation, client: str) -> list[Tensor]:
        ratio = fed.state["ratio"][client]
        units = []
        for group in self.channel_groups(fed, client):
            window = (torch.arange(kept_units(group, ratio)) + fed.round) % group.units
            units.append(window.sort().values)
        return units
