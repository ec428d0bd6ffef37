"""FlexFL: submodels whose layers keep different shares of their width.

Chen et al., "FlexFL: Heterogeneous Federated Learning via APoZ-Guided Flexible Pruning in
Uncertain Scenarios", 2024, https://arxiv.org/abs/2407.12729.

After some rounds with the first units of every layer, clients report how often each unit gives
zero after its activation function (APoZ, average percentage of zeros). Layers that are seldom zero
keep more of their width from then on, at the same number of parameters; uploads are averaged by
their number of samples. Left out: self-distillation, the model pool and adaptive local pruning. The
authors train the net on proxy data at the server and count there; here the first rounds of the
federation train it, and clients count on their own data.
"""

from dataclasses import dataclass
from math import ceil, log
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from unalike.base.types import Parameters
from unalike.core.federation import Federation
from unalike.methods.submodels import SubmodelMethod, numel
from unalike.models.channel_groups import ChannelGroup
from unalike.models.submodels import extract, first_units

SEARCH_STEPS = 20  # bisections to find the scale of the shares


@dataclass
class FlexFL(SubmodelMethod):
    """The first units of every layer, more of them in layers with a low APoZ.

    Args:
        warmup: rounds before APoZ is measured, in which all layers are alike.
    """

    warmup: Annotated[int, Field(ge=0)] = 5

    def privacy_problem(self) -> str | None:
        return (
            "FlexFL's clients send how often each unit is idle on their data; nothing protects that"
        )

    def register_clients(self, fed: Federation) -> None:
        """Register clients, and compute the shares of groups that have none and are trained."""
        super().register_clients(fed)
        shares = fed.state.setdefault("shares", {})
        if fed.round <= self.warmup:
            return
        group = fed.state["group"]
        due = [c for c in fed.active if c in group and group[c] not in shares]
        replies = self.fetch_activity(fed, due)
        for key in dict.fromkeys(group[c] for c in replies):
            members = [c for c in replies if group[c] == key]
            channel_groups = self.channel_groups(fed, members[0])
            shares[key] = layer_shares(
                apoz=mean_apoz([replies[c] for c in members]),
                sizes=[layer_size(fed.state["models"][key], g) for g in channel_groups],
            )

    def select_units(self, fed: Federation, client: str) -> list[Tensor]:
        groups, ratio = self.channel_groups(fed, client), fed.state["ratio"][client]
        shares = fed.state["shares"].get(fed.state["group"][client])
        if shares is None or ratio == 1:
            return first_units(groups, ratio)
        model = {name: t.to("meta") for name, t in self.server_model(fed, client).items()}
        budget = numel(extract(model, groups, first_units(groups, ratio)))
        # Bisection: the largest scale of the shares at which a submodel is not over budget.
        low, high = 0.0, 1 / max(min(shares), 1e-3)
        for _ in range(SEARCH_STEPS):
            scale = (low + high) / 2
            if numel(extract(model, groups, units_at(groups, shares, scale))) <= budget:
                low = scale
            else:
                high = scale
        return units_at(groups, shares, low)


def mean_apoz(replies: list[list[Tensor]]) -> list[float]:
    """APoZ of every layer: the mean over clients of the mean over units."""
    apoz = []
    for layers in zip(*replies, strict=True):
        apoz.append(sum(float(activity[:, 1].mean()) for activity in layers) / len(layers))
    return apoz


def layer_size(model: Parameters, group: ChannelGroup) -> int:
    """P: number of parameters that produce the units of a channel group."""
    return sum(model[part.tensor].numel() for part in group.slices if part.is_output)


def layer_shares(apoz: list[float], sizes: list[int]) -> list[float]:
    """s = 1 - APoZ ln(P) / ln(max P), for every layer."""
    largest = log(max([*sizes, 2]))
    return [
        1 - zeros * log(max(size, 2)) / largest for zeros, size in zip(apoz, sizes, strict=True)
    ]


def units_at(groups: list[ChannelGroup], shares: list[float], scale: float) -> list[Tensor]:
    """The first units of every layer: its share, times `scale`, of its width; at least one."""
    units = []
    for group, share in zip(groups, shares, strict=True):
        count = min(group.units, max(1, ceil(scale * share * group.units)))
        units.append(torch.arange(count))
    return units
