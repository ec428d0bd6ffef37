"""FMCSC (Chen et al. 2024): clients with all views or one of them cluster together, by a model for each set of views.

Clients train one after another on reconstruction, then all at once in rounds. Who owns several views draws each of them to the fused
feature; who owns one draws its fused feature to that of the model for all views and away from its own view's. The server mixes a
model for each set of views, weighted by what a client's views tell about its fused feature. docs/clustering.md says what is ours in it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from unalike.averaging import Averaging, AveragingSide, Parameters, Update
from unalike.federation import Federation
from unalike.losses.clustering import class_correlation_loss, reconstruction
from unalike.losses.contrastive import nt_xent
from unalike.models.autoencoder import MARK, Autoencoder, marked, modalities
from unalike.models.model import Model
from unalike.operations import operation


class Informed(Update):
    information: dict[str, float]          # of each view


@dataclass
class FMCSC(Averaging):
    """The paper's budget is rounds=5, epochs=25 (10 for BDGP), batch=256; AFMCC's Table 3c adds constraint=0.01."""

    tasks: ClassVar[tuple[str, ...]] = ("clustering",)

    temperature: float = 0.5
    pretraining: int = 250             # epochs of each client, one after another
    bins: int = 10                     # of the histogram that tells mutual information
    constraint: float = 0.0            # weight of AFMCC's class-correlation loss
    flexibility: float = 0.3           # its lambda

    def serve(self, fed: Federation) -> Iterator[int]:
        for round in fed.rounds():
            self.acquaint(fed)
            models, group = fed.state["models"], fed.state["group"]
            whole = next(iter(models))
            single = [c for c in fed.here if len(fed.cards[c].modalities) == 1 and group[c] != whole]
            replies = fed.call("update", each={c: {"parameters": models[group[c]]} | ({"whole": models[whole]} if c in single else {})
                                               for c in fed.here})
            for name in models:
                weights = {c: sum(told[view] for view in name.split(",") if view in told)
                           for c, reply in replies.items() if (told := reply["information"]).keys() & set(name.split(","))}
                if weights:
                    even = 0.0 if sum(weights.values()) else 1.0
                    models[name] = self.merge({c: replies[c]["parameters"] for c in weights}, {c: w + even for c, w in weights.items()})
            fed.note("train_loss", {client: reply["loss"] for client, reply in replies.items()})
            yield round

    def acquaint(self, fed: Federation) -> None:
        """Pretraining goes from client to client, those with most views first; a model for each set of views begins where it ends."""
        if "models" in fed.state:
            return
        most = sorted(fed.everyone, key=lambda c: -len(fed.cards[c].modalities))
        start = fed.relay("pretrain", most)
        group = {c: ",".join(card.modalities) for c, card in fed.cards.items()}
        whole = ",".join(dict.fromkeys(view for c in most for view in fed.cards[c].modalities))
        fed.state |= {"group": group, "models": {name: start for name in dict.fromkeys([whole, *group.values()])}}

    def exposes(self) -> str | None:
        return "FMCSC's clients tell how much their views have in common, and hand pretrained models on, which nothing protects"

    def alone(self, fed: Federation) -> None:
        """Where the others begin is the work of all: alone, a client pretrains itself."""

    class Side(AveragingSide):
        algorithm: "FMCSC"
        whole: Parameters | None = None         # while it trains: the model for all views

        def build(self, encoder: nn.Module) -> Model:
            made = super().build(encoder)
            made.encoder = Views(made.encoder)
            return made

        @operation
        def pretrain(self, given: Parameters) -> Parameters:
            self.receive(given)
            self.passing = True
            self.learn(self.algorithm.pretraining, self.optimiser(fresh=True), self.task_loss)
            return self.shared()

        @operation
        def update(self, parameters: Parameters, whole: Parameters | None = None) -> Informed:
            self.whole = parameters if whole is None else whole
            told = super().update(parameters)
            self.whole, net, x = None, self.views, self.rows()
            with torch.no_grad():
                codes = net.codes(x)
                told["information"] = {name: mutual_information(net.fused(codes), net.view(codes[name]), self.algorithm.bins)
                                       for name in modalities(x)}
            return told

        @operation
        def train(self) -> float:
            if self.round == 1:
                self.learn(self.algorithm.pretraining, self.optimiser(fresh=True), self.task_loss)
            return self.learn(loss=self.loss)

        def task_loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
            x = marked(x)
            return self.rebuilt(x, self.views.codes(x))

        def rebuilt(self, x: dict[str, Tensor], codes: dict[str, Tensor]) -> Tensor:
            """Every view from its own code."""
            return torch.stack([reconstruction(rows.flatten(1), self.views.auto.decoders[name](codes[name]), weights=x[name + MARK])
                                for name, rows in modalities(x).items()]).sum()

        def loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
            x, how, net = marked(x), self.algorithm, self.views
            codes, owned = net.codes(x), list(modalities(x))
            h = net.fused(codes)
            loss = self.rebuilt(x, codes)
            if len(owned) > 1:
                for name in owned:
                    there = x[name + MARK] > 0
                    loss = loss + nt_xent(h[there], net.view(codes[name])[there], how.temperature)
            elif self.whole is not None:
                given = {name.removeprefix("encoder."): t.to(h) for name, t in self.whole.items() if name.startswith("encoder.")}
                with torch.no_grad():
                    goal = torch.func.functional_call(net, given, (x,))
                away = normalize(net.view(codes[owned[0]]), dim=-1)
                near = torch.stack([(h * goal).sum(-1), (h * away).sum(-1)], 1) / how.temperature         # (n, 2)
                loss = loss + cross_entropy(near, torch.zeros(len(h), dtype=torch.int64, device=h.device))
            if how.constraint:
                loss = loss + how.constraint * class_correlation_loss(self.model.head(h).softmax(-1), how.flexibility)
            return loss

        @property
        def views(self) -> "Views":
            encoder: Any = self.model.encoder
            return encoder


class Views(nn.Module):
    """An autoencoder, a head for the code of any view, and a head for those of all views together, of length 1; a missing view is 0."""

    def __init__(self, auto: Any):
        super().__init__()
        self.auto: Autoencoder = auto
        self.width = auto.width
        self.view = nn.Linear(auto.width, auto.width)
        self.common = nn.Linear(auto.width * len(auto.encoders), auto.width)

    def forward(self, x: dict[str, Tensor] | Tensor) -> Tensor:
        return self.fused(self.codes(marked(x)))

    def codes(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        """(n, width) of every view of the federation."""
        like = next(iter(x.values()))
        layers: dict[str, Any] = dict(self.auto.encoders.items())
        return {name: each(x[name].flatten(1) if name in x else like.new_zeros(len(like), each[0].in_features))
                for name, each in layers.items()}

    def fused(self, codes: dict[str, Tensor]) -> Tensor:
        return normalize(self.common(torch.cat(list(codes.values()), 1)), dim=-1)


def mutual_information(a: Tensor, b: Tensor, bins: int = 10) -> float:
    """In nats, of entries at the same place in two tensors of one shape, by a histogram of so many bins each.

    >>> a = torch.tensor([0.0, 0.0, 1.0, 1.0])
    >>> round(mutual_information(a, a), 3), round(mutual_information(a, torch.tensor([0.0, 1.0, 0.0, 1.0])), 3)
    (0.693, 0.0)
    """
    def binned(values: Tensor) -> Tensor:
        low, high = values.min(), values.max()
        return ((values - low) / (high - low).clamp(min=1e-12) * bins).long().clamp(max=bins - 1)

    a, b = a.detach().double().flatten().cpu(), b.detach().double().flatten().cpu()
    joint = torch.bincount(binned(a) * bins + binned(b), minlength=bins * bins).double().reshape(bins, bins) / len(a)
    apart = joint.sum(1, keepdim=True) * joint.sum(0, keepdim=True)
    return max(0.0, float((joint * (joint / apart.clamp(min=1e-300)).clamp(min=1e-300).log()).sum()))
