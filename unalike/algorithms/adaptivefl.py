"""AdaptiveFL: a pool of submodels whose first layers are whole and whose later layers are narrow.

Jia et al., "AdaptiveFL: Adaptive Heterogeneous Federated Learning for Resource-Constrained AIoT
Systems", DAC 2024, https://arxiv.org/abs/2311.13166.

Fine-grained width pruning (Sec. 3.2): a submodel has a width ratio r_w and an index I; layers up to
I are whole, later ones keep their first units. A client gets the largest submodel of the pool that
is no larger than the one of its capacity. The server averages every entry over the clients that
have it (Algorithm 2). Left out: the selection of clients by reinforcement learning, as who takes
part is the scenario's, and pruning by the client itself.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from unalike.core.federation import Federation
from unalike.methods.submodels import Ratio, SubmodelMethod, numel
from unalike.models.channel_groups import ChannelGroup
from unalike.models.submodels import extract, first_units, kept_units


@dataclass
class AdaptiveFL(SubmodelMethod):
    """The largest submodel of the pool that a client can train.

    Args:
        ratios: r_w, the shares of the width of large, medium and small submodels.
    """

    ratios: tuple[Ratio, ...] = (1.0, 0.66, 0.4)

    def select_units(self, fed: Federation, client: str) -> list[Tensor]:
        groups, ratio = self.channel_groups(fed, client), fed.state["ratio"][client]
        model = {name: t.to("meta") for name, t in self.server_model(fed, client).items()}
        smallest = first_units(groups, ratio)
        budget = numel(extract(model, groups, smallest))
        best, best_size = smallest, 0
        for units in pool(groups, self.ratios):
            size = numel(extract(model, groups, units))
            if best_size < size <= budget:
                best, best_size = units, size
        return best


def pool(groups: list[ChannelGroup], ratios: tuple[float, ...]) -> list[list[Tensor]]:
    """Units of every submodel: for each ratio and I, the first I groups whole."""
    submodels = []
    for ratio in ratios:
        for whole in range(len(groups) + 1):
            counts = [
                group.units if index < whole else kept_units(group, ratio)
                for index, group in enumerate(groups)
            ]
            submodels.append([torch.arange(count) for count in counts])
    return submodels
