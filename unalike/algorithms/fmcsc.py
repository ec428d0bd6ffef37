"""FMCSC (Chen et al. 2024): clients with all views or one of them cluster together, by a model for each set of views.

Clients train one after another on reconstruction, then all at once in rounds. Who owns several views draws each of them to the fused
feature, and then teaches the models for fewer views what its own says of the same samples; who owns one draws its fused feature to that
of the model it was sent and away from its view's code. The server mixes a model for each set of views, weighted by mutual information.
docs/clustering.md says what is ours in it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypedDict

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cosine_similarity, cross_entropy, mse_loss, normalize

from unalike.base.types import Parameters
from unalike.core.federation import Federation
from unalike.core.operations import operation
from unalike.data.modalities import MARK, modalities, with_masks
from unalike.losses.clustering import class_correlation_loss, reconstruction
from unalike.losses.contrastive import nt_xent
from unalike.methods.averaging import Averaging, AveragingProgram
from unalike.models.autoencoder import Autoencoder
from unalike.models.model import Model
from unalike.tasks import Task

HIDDEN = 256  # between codes and features


Epochs = Annotated[int, Field(ge=0)]


class Taught(TypedDict):
    """By set of views: models, and how much each is to count."""

    models: dict[str, Parameters]
    weights: dict[str, Annotated[float, Field(ge=0)]]
    loss: float


@dataclass
class FMCSC(Averaging):
    """The paper's budget is rounds=5, epochs=25 (10 for BDGP), batch=256; AFMCC's Table 3c adds constraint=0.01."""

    requires_identical_models: ClassVar[bool] = True

    temperature: Annotated[float, Field(gt=0)] = 0.5
    pretraining: Epochs = 250  # epochs of each client, one after another
    teaching: Epochs = 50  # epochs a round that who owns several views gives each model for fewer
    bins: Annotated[int, Field(ge=1)] = 10  # of the histogram that tells mutual information
    constraint: Annotated[float, Field(ge=0)] = 0.0  # weight of AFMCC's class-correlation loss
    flexibility: Annotated[float, Field(ge=0, le=1)] = 0.3  # its lambda

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return not task.labelled

    def serve(self, fed: Federation) -> Iterator[int]:
        for round in fed.rounds():
            self.register_clients(fed)
            models, group = fed.state["models"], fed.state["group"]
            owned = {c: set(group[c].split(",")) for c in fed.active}
            within = {
                c: {
                    name: model
                    for name, model in models.items()
                    if set(name.split(",")) <= owned[c]
                }
                for c in fed.active
            }
            replies = fed.call(
                "update", per_client={c: {"models": given} for c, given in within.items()}
            )
            for name in models:
                told = {c: reply for c, reply in replies.items() if name in reply["models"]}
                weights = {c: reply["weights"].get(name, 0.0) for c, reply in told.items()}
                if told:
                    even = 0.0 if sum(weights.values()) else 1.0
                    made = {c: reply["models"][name] for c, reply in told.items()}
                    models[name] = self.average(made, {c: w + even for c, w in weights.items()})
            fed.log_metrics(
                "train_loss", {client: reply["loss"] for client, reply in replies.items()}
            )
            yield round

    def register_clients(self, fed: Federation) -> None:
        """Pretraining goes from client to client, those with most views first; a model for each set of views begins where it ends."""
        if "models" in fed.state:
            return
        start = fed.relay(
            "pretrain", sorted(fed.clients, key=lambda c: -len(fed.infos[c].modalities))
        )
        group = {c: ",".join(info.modalities) for c, info in fed.infos.items()}
        fed.state |= {
            "group": group,
            "models": {name: start for name in dict.fromkeys(group.values())},
        }

    def privacy_problem(self) -> str | None:
        return "FMCSC's clients tell how much their views have in common, and hand pretrained models on, which nothing protects"

    def alone(self, fed: Federation) -> None:
        """Where the others begin is the work of all: alone, a client pretrains itself."""

    class Program(AveragingProgram):
        algorithm: "FMCSC"
        given: Parameters | None = None  # while it trains: the model it was sent
        own: Parameters = {}  # while it teaches: its own model
        seen: tuple[str, ...] = ()  # and the views that the other is shown

        def build(self, encoder: nn.Module) -> Model:
            made = super().build(encoder)
            made.encoder = Views(made.encoder)
            return made

        @operation
        def pretrain(self, given: Parameters) -> Parameters:
            self.receive(given)
            self.transient = True
            self.learn(
                range(self.algorithm.pretraining), self.optimizer(fresh=True), self.task_loss
            )
            return self.shared()

        @operation
        def update(  # type: ignore[override]
            self, models: dict[str, Parameters]
        ) -> Taught:
            """Trains its own model; who owns several views then teaches those for some of them."""
            mine = ",".join(modalities(self.rows()))
            self.receive(models[mine])
            self.transient, self.given = True, models[mine]
            loss = self.learn(optimizer=self.optimizer(fresh=True))
            self.own = {name: tensor.clone() for name, tensor in self.shared().items()}
            made, weights = (
                {mine: self.own},
                {mine: self.information(models[mine], tuple(modalities(self.rows())))},
            )
            for name, model in models.items():
                if name != mine:
                    self.receive(model)
                    self.seen = tuple(name.split(","))
                    self.learn(
                        range(self.algorithm.teaching), self.optimizer(fresh=True), self.lesson
                    )
                    made[name] = {key: tensor.clone() for key, tensor in self.shared().items()}
                    weights[name] = self.information(model, self.seen)
            self.receive(self.own)
            self.transient, self.given, self.own = True, None, {}
            return {
                "models": {name: made[name] for name in models},
                "weights": weights,
                "loss": loss,
            }

        @operation
        def train(self) -> float:  # type: ignore[override]
            if self.round == 1:
                self.learn(
                    range(self.algorithm.pretraining), self.optimizer(fresh=True), self.task_loss
                )
            return self.learn(loss=self.loss)

        def information(self, sent: Parameters, views: tuple[str, ...]) -> float:
            """How much the model it has now is to count: what the fused feature has in common with the features of the views; of one view,
            with the fused feature of the model that was sent, less what it has in common with the view's code."""
            net, x, bins = self.views, only(self.rows(), views), self.algorithm.bins
            with torch.no_grad():
                codes, h = net.codes(x), net(x)
                if len(views) > 1:
                    return sum(
                        mutual_information(h, net.view[name](codes[name]), bins) for name in views
                    )
                before = functional_call(net, encoder(sent, h), (x,))
                return max(
                    0.0,
                    mutual_information(h, before, bins)
                    - mutual_information(h, codes[views[0]], bins),
                )

        def task_loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
            x = with_masks(x)
            return self.rebuilt(x, self.views.codes(x))

        def rebuilt(self, x: dict[str, Tensor], codes: dict[str, Tensor]) -> Tensor:
            """Every view from its own code."""
            return torch.stack(
                [
                    reconstruction(
                        rows.flatten(1),
                        self.views.auto.decoders[name](codes[name]),
                        weights=x[name + MARK],
                    )
                    for name, rows in modalities(x).items()
                ]
            ).sum()

        def loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
            x, how, net = with_masks(x), self.algorithm, self.views
            codes, owned = net.codes(x), list(modalities(x))
            h = net.fused(codes)
            loss = self.rebuilt(x, codes)
            if len(owned) > 1:
                for name in owned:
                    there = x[name + MARK] > 0
                    loss = loss + nt_xent(
                        h[there], net.view[name](codes[name])[there], how.temperature
                    )
            elif self.given is not None:
                with torch.no_grad():
                    goal = functional_call(net, encoder(self.given, h), (x,))
                near = (
                    torch.stack([(h * goal).sum(-1), cosine_similarity(h, codes[owned[0]])], 1)
                    / how.temperature
                )  # (n, 2)
                loss = loss + cross_entropy(
                    near, torch.zeros(len(h), dtype=torch.int64, device=h.device)
                )
            if how.constraint:
                loss = loss + how.constraint * class_correlation_loss(
                    self.model.head(h).softmax(-1), how.flexibility
                )
            return loss

        def lesson(self, x: Tensor | dict, y: Tensor) -> Tensor:
            """Of some views, tell what one's own model tells of all, and all views."""
            x, net = with_masks(x), self.views
            codes = net.codes(only(x, self.seen))
            with torch.no_grad():
                goal = functional_call(net, encoder(self.own, x[self.seen[0]]), (x,))
            return self.rebuilt(x, codes) + mse_loss(net.fused(codes), goal)

        @property
        def views(self) -> "Views":
            encoder: Any = self.model.encoder
            return encoder


class Views(nn.Module):
    """An autoencoder, a head for the code of each view, and one for those of all views together, of length 1; a missing view is 0."""

    def __init__(self, auto: Any):
        super().__init__()
        self.auto: Autoencoder = auto
        self.width = auto.width
        self.view = nn.ModuleDict({name: head(auto.width, auto.width) for name in auto.encoders})
        self.common = head(auto.width * len(auto.encoders), auto.width)

    def forward(self, x: dict[str, Tensor] | Tensor) -> Tensor:
        return self.fused(self.codes(with_masks(x)))

    def codes(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        """(n, width) of every view of the federation."""
        self.auto.check_inputs(x)
        like = next(iter(x.values()))
        layers: dict[str, Any] = dict(self.auto.encoders.items())
        return {
            name: each(
                x[name].flatten(1) if name in x else like.new_zeros(len(like), each[0].in_features)
            )
            for name, each in layers.items()
        }

    def fused(self, codes: dict[str, Tensor]) -> Tensor:
        return normalize(self.common(torch.cat(list(codes.values()), 1)), dim=-1)


def head(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(before, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, after))


def only(x: dict[str, Tensor], views: tuple[str, ...]) -> dict[str, Tensor]:
    """These views, with their marks."""
    return {name: rows for name, rows in x.items() if name.removesuffix(MARK) in views}


def encoder(parameters: Parameters, like: Tensor) -> Parameters:
    """Of a model's parameters those of its encoder, where another tensor lies."""
    return {
        name.removeprefix("encoder."): tensor.to(like)
        for name, tensor in parameters.items()
        if name.startswith("encoder.")
    }


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
    joint = torch.bincount(binned(a) * bins + binned(b), minlength=bins * bins).double().reshape(
        bins, bins
    ) / len(a)
    apart = joint.sum(1, keepdim=True) * joint.sum(0, keepdim=True)
    return max(
        0.0, float((joint * (joint / apart.clamp(min=1e-300)).clamp(min=1e-300).log()).sum())
    )
