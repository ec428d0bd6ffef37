"""FedMP: submodels of the filters with the largest norms, and the rest as residual.

Jiang et al., "FedMP: Federated Learning through Adaptive Model Pruning in Heterogeneous Edge
Computing", ICDE 2022 (not on arXiv).

A client gets the units whose weights have the largest l1 norm. The server keeps what it pruned as a
residual and adds it to the client's upload before it averages (R2SP): an entry that a client lacks
counts with its present value. The pruning ratio is the client's capacity; left out is the
multi-armed bandit that chooses it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from unalike.base.types import Parameters
from unalike.core.federation import Federation
from unalike.methods.robust import Upload
from unalike.methods.submodels import SubmodelMethod
from unalike.models.channel_groups import ChannelGroup
from unalike.models.submodels import expand, kept_units


@dataclass
class FedMP(SubmodelMethod):
    """l1-norm pruning with residual recovery."""

    def select_units(self, fed: Federation, client: str) -> list[Tensor]:
        model, ratio = self.server_model(fed, client), fed.state["ratio"][client]
        units = []
        for group in self.channel_groups(fed, client):
            strongest = unit_norms(model, group).argsort(descending=True, stable=True)
            units.append(strongest[: kept_units(group, ratio)].sort().values)
        return units

    def place_uploads(
        self, fed: Federation, model: Parameters, states: dict[str, Parameters]
    ) -> Iterator[Upload]:
        """Uploads with the residual of the server's model in all other entries."""
        ones = {name: torch.ones_like(tensor) for name, tensor in model.items()}
        for client, state in states.items():
            groups, units = self.channel_groups(fed, client), self.select_units(fed, client)
            yield Upload(client, expand(state, groups, units, model), ones)


def unit_norms(model: Parameters, group: ChannelGroup) -> Tensor:
    """(units,): l1 norm of the weights that produce each unit of a channel group."""
    total = torch.zeros(group.units, dtype=torch.float64)
    for part in group.slices:
        tensor = model[part.tensor]
        if part.is_output and tensor.dim() > 1:
            rows = tensor.detach().cpu().double().abs().movedim(part.axis, 0).flatten(1).sum(1)
            total += rows[part.entries].sum(1)
    return total
