"""Federated Dropout: random submodels, drawn anew every round.

Caldas et al., "Expanding the Reach of Federated Learning by Reducing Client Resource
Requirements", 2018, https://arxiv.org/abs/1812.07210.

Every round a client gets random units of every layer, as many as its capacity allows, and the
server averages every entry over the clients that have it. Left out: the paper gives all clients
the same dropout rate, and compresses messages.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from unalike.base.randomness import stream
from unalike.core.federation import Federation
from unalike.methods.submodels import SubmodelMethod
from unalike.models.submodels import kept_units


@dataclass
class FedDropout(SubmodelMethod):
    """Random units of every layer, drawn for each client and round."""

    def select_units(self, fed: Federation, client: str) -> list[Tensor]:
        generator = stream(fed.seed, "units", fed.round, client)
        ratio = fed.state["ratio"][client]
        units = []
        for group in self.channel_groups(fed, client):
            order = torch.randperm(group.units, generator=generator)
            units.append(order[: kept_units(group, ratio)].sort().values)
        return units
