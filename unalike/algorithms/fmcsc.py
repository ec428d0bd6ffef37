"""FMCSC: federated multi-view clustering of clients with all views or one.

Chen et al., "Bridging Gaps: Federated Multi-View Clustering in Heterogeneous Hybrid Views",
NeurIPS 2024, https://arxiv.org/abs/2410.09484.

Clients pretrain one after another on reconstruction, then train in rounds; the server keeps a model
for each set of views and averages it with weights from mutual information. A client with several
views pulls each view towards the fused feature, then distils its model into those for fewer views.
A client with one view pulls its fused feature towards that of the model it was sent, and away from
its view's code.

docs/clustering.md says what is ours. Added: AFMCC's class-correlation loss, off by default.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypedDict

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cosine_similarity, cross_entropy, mse_loss, normalize

from unalike.base.types import Parameters
from unalike.core.algorithm import Sharing
from unalike.core.federation import Federation, Replies
from unalike.core.operations import operation
from unalike.core.participation import Failure
from unalike.data.modalities import MARK, modalities, with_masks
from unalike.losses.clustering import class_correlation_loss, reconstruction
from unalike.losses.contrastive import nt_xent
from unalike.methods.averaging import Averaging, AveragingProgram
from unalike.methods.sharing import connect_clients
from unalike.models.autoencoder import Autoencoder
from unalike.models.model import Model
from unalike.tasks import Task

HIDDEN = 256  # width between codes and features


class ViewUpdate(TypedDict):
    """A client's models and their weights, by set of views ("left,right"), and its loss."""

    models: dict[str, Parameters]
    weights: dict[str, NonNegativeFloat]
    loss: float
    own: Parameters  # what the client trained before distilling it; {} if it is one of the models


@dataclass
class FMCSC(Averaging):
    """The paper's budget is rounds=5, epochs=25 (10 for BDGP), batch_size=256.

    AFMCC's Table 3c adds constraint=0.01.

    Args:
        mean: "uniform": a client's weight is its mutual information; "samples": that times its
            number of samples.
        temperature: of the contrast.
        pretraining: epochs of each client, one after another.
        teaching: epochs per round of distilling into a model for fewer views.
        bins: of the histogram for mutual information.
        arrangement: "paper", or "program" for what the authors' program does: view features keep
            their length in the contrast; every epoch of a round has a new optimizer; missing views
            are rebuilt, too, as zeros; clients with one view train one model of theirs in turn,
            which goes on from round to round and counts from the second round on; clients with the
            same several views train one model in turn and distil it into that for all their views,
            too.
        constraint: weight of AFMCC's class-correlation loss.
        flexibility: lambda of that loss.
    """

    requires_identical_models: ClassVar[bool] = True

    mean: Literal["samples", "uniform"] = "uniform"
    temperature: PositiveFloat = 0.5
    pretraining: NonNegativeInt = 250
    teaching: NonNegativeInt = 50
    bins: Annotated[int, Field(ge=1)] = 10
    arrangement: Literal["paper", "program"] = "paper"
    constraint: NonNegativeFloat = 0.0
    flexibility: Annotated[float, Field(ge=0, le=1)] = 0.3

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return not task.labelled

    def serve(self, fed: Federation) -> Iterator[int]:
        for round in fed.rounds():
            self.register_clients(fed)
            models = fed.state["models"]
            before: dict[str, dict[str, Any]] = {}
            for client in fed.active:
                before[client] = {"models": self.usable_models(fed, client), "start": {}}
            if self.arrangement == "program":
                replies = self.update_in_turn(fed, before)
            else:
                replies = fed.call("update", per_client=before)
            for views in models:
                trained = {c: reply for c, reply in replies.items() if views in reply["models"]}
                if self.arrangement == "program" and round == 1:
                    several = {c: r for c, r in trained.items() if "," in fed.state["group"][c]}
                    trained = several or trained
                if trained:
                    states = {c: reply["models"][views] for c, reply in trained.items()}
                    weights = self.information_weights(fed, views, trained)
                    models[views] = self.average(states, weights)
            self.record_round(fed, replies)
            yield round

    def update_in_turn(self, fed: Federation, messages: dict[str, dict[str, Any]]) -> Replies:
        """Updates of one client after another, those with several views first.

        A client with several views goes on with what the last one with the same views trained; a
        client with one view with what the last one with one view trained, also in earlier rounds.
        """
        group = fed.state["group"]
        latest: dict[str, Parameters] = {}  # by set of views, of clients with several
        collected: dict[str, Any] = {}
        failures: dict[str, Failure] = {}
        for client in sorted(messages, key=lambda c: "," not in group[c]):
            message = messages[client]
            if "," not in group[client]:
                message["start"] = fed.state["single"]
            elif group[client] in latest:
                message["models"][group[client]] = latest[group[client]]
            replies = fed.call("update", quorum=0, per_client={client: message}, clients=[client])
            for reply in replies.values():
                if "," in group[client]:
                    latest[group[client]] = reply["own"]
                else:
                    fed.state["single"] = reply["models"][group[client]]
            collected |= replies
            failures |= replies.failures
        fed.check_quorum("update", len(collected), failures, fed.config.quorum)
        return Replies(collected, failures)

    def usable_models(self, fed: Federation, client: str) -> dict[str, Parameters]:
        """Models for sets of views that a client owns all of."""
        owned = set(fed.state["group"][client].split(","))
        models = fed.state["models"].items()
        return {views: model for views, model in models if set(views.split(",")) <= owned}

    def information_weights(
        self, fed: Federation, views: str, replies: dict[str, Any]
    ) -> dict[str, float]:
        """Weights of clients in the mean of the model for a set of views.

        Mutual information, times the weight that `mean` gives; equal if all have none.
        """
        samples = {c: {"samples": fed.infos[c].samples} for c in replies}
        base = self.client_weights(samples)
        information = {c: reply["weights"].get(views, 0.0) for c, reply in replies.items()}
        if not sum(information.values()):
            return base
        return {c: base[c] * information[c] for c in replies}

    def register_clients(self, fed: Federation) -> None:
        """Pretrain from client to client, those with the most views first.

        The model for each set of views starts with the result.
        """
        if "models" in fed.state:
            return
        order = sorted(fed.clients, key=lambda c: -len(fed.infos[c].modalities))
        start = fed.relay("pretrain", order)
        group = {c: ",".join(info.modalities) for c, info in fed.infos.items()}
        fed.state["group"] = group
        fed.state["models"] = {views: start for views in dict.fromkeys(group.values())}
        fed.state["single"] = start  # what clients with one view train in turn ("program")

    def sharing(self, fed: Federation) -> Sharing | None:
        """Clients with the same views, or all of another's, train one of the models together."""
        if "group" not in fed.state:
            return None
        groups = connect_clients({c: self.usable_models(fed, c) for c in fed.state["group"]})
        return {"parameters": groups} if groups else {}

    def privacy_problem(self) -> str | None:
        return (
            "FMCSC's clients send how much their views have in common, and pass pretrained models "
            "on, which nothing protects"
        )

    def alone(self, fed: Federation) -> None:
        """Nothing: alone, a client pretrains itself (`Program.train`)."""

    class Program(AveragingProgram):
        algorithm: "FMCSC"
        sent_model: Parameters | None = None  # during training: the model that was sent
        goals: Tensor | None = None  # during distillation: the client's own fused features
        student_views: tuple[str, ...] = ()  # during distillation: the views of the other model

        def build(self, encoder: nn.Module) -> Model:
            model = super().build(encoder)
            model.encoder = MultiViewEncoder(model.encoder)
            return model

        @operation
        def pretrain(self, given: Parameters) -> Parameters:
            """Train on reconstruction, from the model that the client before returned."""
            self.receive(given)
            self.transient = True
            self.train_reconstruction()
            return self.shared()

        def train_reconstruction(self) -> None:
            """The epochs of pretraining."""
            epochs = range(self.algorithm.pretraining)
            self.learn(epochs, self.optimizer(fresh=True), self.task_loss)

        @operation
        def update(  # type: ignore[override]
            self, models: dict[str, Parameters], start: Parameters
        ) -> ViewUpdate:
            """Train the model for the client's views, then distil it into those for fewer.

            Args:
                models: by set of views that the client owns all of.
                start: what to train instead of the model for its views, unless empty.
            """
            all_views = tuple(modalities(self.all_inputs()))
            own = ",".join(all_views)
            self.receive(start or models[own])
            self.sent_model = models[own]
            loss = self.train_round()
            teacher = self.copy_shared()
            trained = {own: teacher}
            weights = {own: self.information(models[own], all_views)}
            distils_own = self.algorithm.arrangement == "program" and len(all_views) > 1
            with torch.no_grad():
                self.goals = self.encoder(self.all_inputs())
            for views, model in models.items():
                if views != own or distils_own:
                    self.receive(model)
                    self.student_views = tuple(views.split(","))
                    epochs = range(self.algorithm.teaching)
                    self.learn(epochs, self.optimizer(fresh=True), self.distillation_loss)
                    trained[views] = self.copy_shared()
                    weights[views] = self.information(model, self.student_views)
            self.receive(teacher)
            self.transient = True
            self.sent_model = None
            self.goals = None
            in_order = {views: trained[views] for views in models}
            kept = teacher if distils_own else {}
            return {"models": in_order, "weights": weights, "loss": loss, "own": kept}

        def train_round(self) -> float:
            """The epochs of a round; the loss is that of the last optimizer."""
            if self.algorithm.arrangement == "paper":
                return self.learn(optimizer=self.optimizer(fresh=True))
            loss = 0.0
            for epoch in range(self.training.epochs):
                loss = self.learn(range(epoch, epoch + 1), self.optimizer(fresh=True))
            return loss

        @operation
        def train(self) -> float:  # type: ignore[override]
            """Local baseline: pretraining in the first round, then the method's own loss."""
            if self.round == 1:
                self.train_reconstruction()
            return self.learn(loss=self.loss)

        def copy_shared(self) -> Parameters:
            """A copy of the shared parameters."""
            return {name: tensor.clone() for name, tensor in self.shared().items()}

        def information(self, sent: Parameters, views: tuple[str, ...]) -> float:
            """Weight of the present model: mutual information of its fused feature.

            With several views: with the feature of each view. With one view: with the fused
            feature of the model that was sent, minus that with the view's code.
            """
            encoder, bins = self.encoder, self.algorithm.bins
            x = select_views(self.all_inputs(), views)
            with torch.no_grad():
                codes = encoder.codes(x)
                h = encoder(x)
                if len(views) > 1:
                    features = [encoder.view[name](codes[name]) for name in views]
                    return sum(mutual_information(h, feature, bins) for feature in features)
                before = functional_call(encoder, encoder_state(sent, h), (x,))
                gain = mutual_information(h, before, bins)
                return max(0.0, gain - mutual_information(h, codes[views[0]], bins))

        def task_loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
            """Reconstruction of every view."""
            x = with_masks(x)
            return self.reconstruction_loss(x, self.encoder.codes(x))

        def reconstruction_loss(self, x: dict[str, Tensor], codes: dict[str, Tensor]) -> Tensor:
            """Reconstruction of every view from its code; in "program" missing ones are zeros."""
            losses = []
            views = modalities(x)
            for name, rows in views.items():
                rebuilt = self.encoder.auto.decoders[name](codes[name]).expand_as(rows.flatten(1))
                losses.append(reconstruction(rows.flatten(1), rebuilt, weights=x[name + MARK]))
            if self.algorithm.arrangement == "program":
                for name in codes.keys() - views.keys():
                    losses.append(self.encoder.auto.decoders[name](codes[name]).square().mean())
            return torch.stack(losses).sum()

        def loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
            """Reconstruction and the contrast of clients with several views, or with one."""
            x = with_masks(x)
            method, encoder = self.algorithm, self.encoder
            codes = encoder.codes(x)
            views = list(modalities(x))
            h = encoder.fused(codes)
            loss = self.reconstruction_loss(x, codes)
            if len(views) > 1:
                for name in views:
                    present = x[name + MARK] > 0
                    feature = encoder.view[name](codes[name])
                    contrast = nt_xent(
                        h[present],
                        feature[present],
                        method.temperature,
                        cosine=method.arrangement == "paper",
                    )
                    loss = loss + contrast
            elif self.sent_model is not None:
                loss = loss + self.single_view_contrast(x, h, codes[views[0]])
            if method.constraint:
                classes = self.model.head(h).softmax(-1)
                loss = loss + method.constraint * class_correlation_loss(
                    classes, method.flexibility
                )
            return loss

        def single_view_contrast(self, x: dict[str, Tensor], h: Tensor, code: Tensor) -> Tensor:
            """Pull h (n, width) towards that of the sent model, away from the view's code."""
            assert self.sent_model is not None
            encoder = self.encoder
            with torch.no_grad():
                goal = functional_call(encoder, encoder_state(self.sent_model, h), (x,))
            similarities = torch.stack([(h * goal).sum(-1), cosine_similarity(h, code)], 1)
            positive = torch.zeros(len(h), dtype=torch.int64, device=h.device)
            return cross_entropy(similarities / self.algorithm.temperature, positive)

        def training_batch(self, index: Tensor) -> tuple[Any, Tensor]:
            """During distillation the labels are the fused features to predict."""
            x, y = super().training_batch(index)
            return x, y if self.goals is None else self.goals[index.to(self.goals.device)]

        def distillation_loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
            """From some views, predict the own model's fused feature y, and reconstruct all."""
            x = with_masks(x)
            codes = self.encoder.codes(select_views(x, self.student_views))
            return self.reconstruction_loss(x, codes) + mse_loss(self.encoder.fused(codes), y)

        @property
        def encoder(self) -> "MultiViewEncoder":
            encoder: Any = self.model.encoder
            return encoder


class MultiViewEncoder(nn.Module):
    """An autoencoder with a feature head for each view and one for all views together.

    The fused feature has length 1; a missing view is encoded as zeros.
    """

    def __init__(self, auto: Any):
        super().__init__()
        self.auto: Autoencoder = auto
        self.width = auto.width
        self.view = nn.ModuleDict(
            {name: feature_head(auto.width, auto.width) for name in auto.encoders}
        )
        self.common = feature_head(auto.width * len(auto.encoders), auto.width)

    def forward(self, x: dict[str, Tensor] | Tensor) -> Tensor:
        return self.fused(self.codes(with_masks(x)))

    def codes(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        """Codes of every view of the federation: (n, width), or (1, width) of a missing view."""
        self.auto.check_inputs(x)
        like = next(iter(x.values()))
        encoders: dict[str, Any] = dict(self.auto.encoders.items())
        codes = {}
        for name, encoder in encoders.items():
            # A missing view is zeros in every row, so one row is enough.
            rows = x[name].flatten(1) if name in x else like.new_zeros(1, encoder[0].in_features)
            codes[name] = encoder(rows)
        return codes

    def fused(self, codes: dict[str, Tensor]) -> Tensor:
        """The fused feature (n, width) of codes of all views."""
        rows = max(len(code) for code in codes.values())
        expanded = [code.expand(rows, -1) for code in codes.values()]
        return normalize(self.common(torch.cat(expanded, 1)), dim=-1)


def feature_head(before: int, after: int) -> nn.Sequential:
    """Two linear layers with a ReLU between them."""
    return nn.Sequential(nn.Linear(before, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, after))


def select_views(x: dict[str, Tensor], views: tuple[str, ...]) -> dict[str, Tensor]:
    """These views, with their masks."""
    return {name: rows for name, rows in x.items() if name.removesuffix(MARK) in views}


def encoder_state(parameters: Parameters, like: Tensor) -> Parameters:
    """The encoder's part of a model's parameters, in the device and dtype of a tensor."""
    return {
        name.removeprefix("encoder."): tensor.to(like)
        for name, tensor in parameters.items()
        if name.startswith("encoder.")
    }


def mutual_information(a: Tensor, b: Tensor, bins: int = 10) -> float:
    """Mutual information in nats of entries at the same position, from a joint histogram.

    Args:
        a, b: tensors of one shape.
        bins: of the histogram, on either axis.

    >>> a, b = torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.tensor([0.0, 1.0, 0.0, 1.0])
    >>> round(mutual_information(a, a), 3), round(mutual_information(a, b), 3)
    (0.693, 0.0)
    """
    a = a.detach().double().flatten().cpu()
    b = b.detach().double().flatten().cpu()
    cells = bin_index(a, bins) * bins + bin_index(b, bins)
    counts = torch.bincount(cells, minlength=bins * bins).double()
    joint = counts.reshape(bins, bins) / len(a)
    independent = joint.sum(1, keepdim=True) * joint.sum(0, keepdim=True)
    ratio = (joint / independent.clamp(min=1e-300)).clamp(min=1e-300)
    return max(0.0, float((joint * ratio.log()).sum()))


def bin_index(values: Tensor, bins: int) -> Tensor:
    """The bin of each value, of equal bins between the smallest and the largest."""
    low, high = values.min(), values.max()
    return ((values - low) / (high - low).clamp(min=1e-12) * bins).long().clamp(max=bins - 1)
