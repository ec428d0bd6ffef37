"""FlexFL (Chen 2024) without its distillation: layers that are seldom idle keep more of their width, at the same size."""

from dataclasses import dataclass
from math import ceil, log

import torch
from torch import Tensor

from unalike.base.types import Parameters
from unalike.core.federation import Federation
from unalike.methods.submodels import SubmodelMethod
from unalike.models.channel_groups import ChannelGroup
from unalike.models.submodels import extract, first_units


@dataclass
class FlexFL(SubmodelMethod):
    """A layer's share is s = 1 - APoZ ln(P) / ln(max P), P its parameters and APoZ how often its units give nothing, asked of the clients
    once; shares are scaled until a submodel has as many parameters as at its client's ratio. Larger submodels count more in the mean."""

    def privacy_problem(self) -> str | None:
        return "FlexFL's clients tell how often their data leave each unit idle, which nothing protects"

    def register_clients(self, fed: Federation) -> None:
        super().register_clients(fed)
        shares = fed.state.setdefault("shares", {})
        due = [
            c for c in fed.active if c in fed.state["group"] and fed.state["group"][c] not in shares
        ]
        found = self.excitement(fed, due)
        for group in dict.fromkeys(fed.state["group"][c] for c in found):
            told = [found[c] for c in found if fed.state["group"][c] == group]
            idle = [
                sum(float(each[i][:, 1].mean()) for each in told) / len(told)
                for i in range(len(told[0]))
            ]
            widths, model = (
                self.widths(fed, next(c for c in found if fed.state["group"][c] == group)),
                fed.state["models"][group],
            )
            sizes = [
                sum(model[p.tensor].numel() for p in width.slices if p.is_output)
                for width in widths
            ]
            shares[group] = [
                1 - apoz * log(max(size, 2)) / log(max(*sizes, 2))
                for apoz, size in zip(idle, sizes, strict=True)
            ]

    def keep(self, fed: Federation, client: str) -> list[Tensor]:
        widths, ratio = self.widths(fed, client), fed.state["ratio"][client]
        if (shares := fed.state["shares"].get(fed.state["group"][client])) is None or ratio == 1:
            return first_units(widths, ratio)
        model = {name: tensor.to("meta") for name, tensor in self.model(fed, client).items()}
        wanted, low, high = (
            size(model, widths, first_units(widths, ratio)),
            0.0,
            1 / max(min(shares), 1e-3),
        )
        for _ in range(20):
            scale = (low + high) / 2
            low, high = (
                (scale, high)
                if size(model, widths, at(widths, shares, scale)) <= wanted
                else (low, scale)
            )
        return at(widths, shares, low)

    def aggregate(
        self, fed: Federation, group: str, states: dict[str, Parameters], weights: dict[str, float]
    ) -> None:
        sizes = {c: sum(tensor.numel() for tensor in state.values()) for c, state in states.items()}
        super().aggregate(fed, group, states, {c: weights[c] * sizes[c] for c in states})


def at(widths: list[ChannelGroup], shares: list[float], scale: float) -> list[Tensor]:
    return [
        torch.arange(min(width.units, max(1, ceil(scale * share * width.units))))
        for width, share in zip(widths, shares, strict=True)
    ]


def size(model: Parameters, widths: list[ChannelGroup], keep: list[Tensor]) -> int:
    return sum(tensor.numel() for tensor in extract(model, widths, keep).values())
