"""CreamFL: clients with images, texts or both teach a larger model at the server.

Q. Yu, Y. Liu, Y. Wang, K. Xu, J. Liu, "Multimodal Federated Learning via Contrastive Representation
Ensemble", 2023, https://arxiv.org/abs/2302.08888.

Each round the server sends its representations of the public set; clients are pulled towards them,
train on their own data and send theirs; the server trains on the public pairs and learns from what
the clients sent. The contrast is CreamFL's, or the Muscle loss (FedMuscle, appendix M). Without a
model at the server the clients' ensemble takes its place. docs/creamfl.md says what is ours in it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, Required, TypedDict

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from unalike.base.message import Value
from unalike.base.randomness import stream
from unalike.core.client import Client
from unalike.core.federation import Federation
from unalike.core.operations import graph_safe, operation, query, sends
from unalike.core.program import ClientProgram
from unalike.core.signatures import Shape
from unalike.losses import infonce, muscle_loss
from unalike.methods.public_data import (
    PREDICTION_BATCH,
    PublicTraining,
    blank_rows,
    public_batch,
    public_samples,
    train_on_public,
)
from unalike.models.model import Model, mean_over_positions
from unalike.tasks import Retrieval, Task
from unalike.training.loop import Positive

Views = dict[str, Tensor]  # representations (n, d) of the same rows by kind: image, text, other
View = Annotated[Tensor, Shape("public_rows", "width")]
KINDS = ("image", "text", "other")
SCORE_ROWS = 1024  # rows whose similarities to all others are in memory at once

AboveZero = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]


class ClientViews(TypedDict, total=False):
    """A client's representations of the public set, of the kinds it has, and its loss."""

    image: View
    text: View
    other: View
    loss: Required[float | None]


@dataclass
class CreamFL(PublicTraining):
    """Defaults are the authors'; width, batch and upper, lower are FedMuscle's.

    Args:
        width: of the representations, d.
        contrast: loss of the clients: CreamFL's ("cream"), the Muscle loss ("muscle"), or no
            exchange ("none").
        temperature: of the clients' contrast.
        regularise: weight of the clients' contrast.
        distil: weight of what the server learns from clients.
        peers: with the Muscle loss: clients that each representation of the server is aligned with.
        upper: tau^(N) of the Muscle loss.
        lower: tau^(N-1) of the Muscle loss.
    """

    width: Positive = 256
    contrast: Literal["cream", "muscle", "none"] = "cream"
    temperature: AboveZero = 0.5
    regularise: NotNegative = 0.5
    distil: NotNegative = 0.3
    peers: Positive = 3
    upper: AboveZero = 0.2
    lower: AboveZero = 0.15

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return task.labelled and not task.headless

    def serve(self, fed: Federation) -> Iterator[int]:
        parts = self.part_list()
        for round in fed.rounds():
            parts.before_local(fed)
            known: Views = {}
            if self.contrast != "none":
                has_server = fed.server is not None
                known = run_at_server(fed, "tell") if has_server else fed.state.get("known", {})
            replies = fed.call("update", known=known)
            losses = {client: reply.pop("loss") for client, reply in replies.items()}
            fed.log_metrics("train_loss", losses)
            parts.after_local(fed)
            views: dict[str, Views] = dict(replies)
            goals = self.compute_goals(fed, views, known)
            if fed.server is None:
                fed.state["known"] = goals
            else:
                run_at_server(fed, "train")
                peers: list[Tensor] = []
                if self.contrast == "muscle":
                    for client_views in views.values():
                        peers += client_views.values()
                run_at_server(fed, "absorb", goals=goals, peers=peers)
            parts.after_exchange(fed)
            yield round

    def compute_goals(self, fed: Federation, views: dict[str, Views], known: Views) -> Views:
        """The clients' ensemble (n, d) by kind, where the server or the clients learn from it."""
        without_server = fed.server is None and self.contrast == "muscle"
        if self.contrast != "cream" and not without_server:
            return {}
        device = "cpu" if fed.server is None else fed.server.program.client.device
        goals = {}
        for kind in KINDS:
            of_kind = [
                client_views[kind] for client_views in views.values() if kind in client_views
            ]
            if of_kind:
                other = next((view for name, view in known.items() if name != kind), None)
                goals[kind] = ensemble(of_kind, other, device)
        return goals

    def client_problem(self, client: Client) -> str | None:
        if client.task.paired and not isinstance(client.train.shape, dict):
            return "retrieval needs images and texts by name, this client has one of them"
        return super().client_problem(client)

    def figures(self, fed: Federation, metrics: dict[str, dict[str, float]]) -> dict[str, Any]:
        figures = super().figures(fed, metrics)
        if fed.server is not None:
            figures["server"] = run_at_server(fed, "evaluate")
        return figures

    def server_results(
        self, fed: Federation, metrics: dict[str, dict[str, float]]
    ) -> dict[str, Any] | None:
        if fed.server is None:
            return None
        return {"metrics": run_at_server(fed, "evaluate"), **run_at_server(fed, "describe")}

    class Program(ClientProgram):
        """A client's program, and that of the server's own model, whose data are public pairs."""

        algorithm: "CreamFL"

        def build(self, encoder: nn.Module) -> Model:
            """The encoder, a projection to d where its width differs, and the task's head."""
            width = self.encoder_width(encoder)
            d = self.algorithm.width
            projection = nn.Identity() if width == d else nn.Linear(width, d)
            return Model(encoder, projection, self.head(d), self.client.task.dense)

        @operation
        @sends(image="rows", text="rows", other="rows")
        def update(self, known: Views) -> ClientViews:
            """Learn from the known representations, train on the client's own data, and send its
            representations of the public set."""
            if known:
                self.learn_from_known(known)
            loss = self.learn()
            views: Any = self.tell()
            return views | {"loss": loss}

        def blank_update(self, known: Views) -> Views:
            """Zeros for each kind that the model gives; which these are, one public row shows."""
            self.model.eval()
            with torch.no_grad():
                kinds = self.views(public_batch(self, torch.arange(1)))
            rows = len(public_samples(self))
            return {kind: blank_rows(self, rows, self.algorithm.width) for kind in kinds}

        @query
        def tell(self) -> Views:
            """Representations of the public set, by kind."""
            rows = len(public_samples(self))
            self.model.eval()
            with torch.no_grad():
                parts = [
                    self.views(public_batch(self, index))
                    for index in torch.arange(rows).split(PREDICTION_BATCH)
                ]
            self.work += rows / 3
            return {kind: torch.cat([part[kind] for part in parts]) for kind in parts[0]}

        def learn_from_known(self, known: Views) -> None:
            """A pass over the public set towards the known representations."""
            known = self.client.to_device(known)
            before = self.tell() if self.algorithm.contrast == "cream" else {}

            def inputs(rows: Tensor) -> tuple:
                return public_batch(self, rows), select_rows(known, rows), select_rows(before, rows)

            train_on_public(self, self.regularisation_loss, inputs)

        @graph_safe
        def regularisation_loss(self, x: Tensor | dict, known: Views, before: Views) -> Tensor:
            """Local contrastive regularisation: nearer to the known representation of the same kind
            than to the client's own earlier one, and each row to the same row of other kinds."""
            method = self.algorithm
            terms = []
            for kind, z in self.views(x).items():
                if method.contrast == "muscle":
                    terms.append(muscle_loss(z, list(known.values()), method.upper, method.lower))
                    continue
                for name, view in known.items():
                    if name != kind:
                        terms.append(infonce(z, view, method.temperature))
                if kind in known:
                    goals = (known[kind], before[kind])
                    similarity = torch.stack([(z * goal).sum(-1) for goal in goals], 1)  # (B, 2)
                    first = torch.zeros(len(z), dtype=torch.int64, device=z.device)
                    terms.append(cross_entropy(similarity / method.temperature, first))
            return method.regularise * torch.stack(terms).sum()

        @operation
        def absorb(self, goals: Views, peers: list[Tensor]) -> float | None:
            """At the server: a pass over its public pairs with the clients' representations.

            Args:
                goals: the clients' ensemble (n, d) by kind; none without it.
                peers: representations (n, d) of clients, of which some are drawn for each batch;
                    none without the Muscle loss.
            """
            generator = stream(self.seed, "peers", self.round)
            goals = self.client.to_device(goals)
            peers = [self.client.to_device(peer) for peer in peers]

            def inputs(rows: Tensor) -> tuple:
                index = rows.to(self.client.device)
                order = torch.randperm(len(peers), generator=generator)
                chosen = [peers[i][index] for i in order[: self.algorithm.peers]]
                return public_batch(self, rows), index, select_rows(goals, rows), chosen

            if not goals and not peers and not isinstance(self.client.task, Retrieval):
                return None
            return train_on_public(self, self.server_loss, inputs)

        @graph_safe
        def server_loss(
            self, x: Tensor | dict, rows: Tensor, goals: Views, peers: list[Tensor]
        ) -> Tensor:
            """Distance to the clients' representations; with retrieval also the loss of pairs."""
            method = self.algorithm
            task = self.client.task
            views = self.views(x)
            distances = [
                (z - goals[kind]).square().sum(-1).mean()
                for kind, z in views.items()
                if kind in goals
            ]
            if peers:
                for z in views.values():
                    distances.append(muscle_loss(z, peers, method.upper, method.lower))
            terms = [method.distil * distance for distance in distances]
            if isinstance(task, Retrieval):
                terms.append(task.loss(torch.stack(list(views.values()), 1), rows))
            return torch.stack(terms).sum()

        def views(self, x: Tensor | dict) -> Views:
            """Unit vectors (B, d) for each kind that these rows have."""
            z = self.model.features(x)
            if self.model.dense:
                z = mean_over_positions(z)
            z = normalize(z, dim=-1)
            if z.dim() == 3:  # pairs: (B, 2, d)
                return dict(zip(("image", "text"), z.unbind(1), strict=True))
            return {self.sample_kind: z}

        @cached_property
        def sample_kind(self) -> str:
            """The kind of samples that are not pairs."""
            x = public_batch(self, torch.arange(1), raw=True)
            if x.dim() == 4:
                return "image"
            return "other" if x.is_floating_point() else "text"


def select_rows(views: Views, rows: Tensor) -> Views:
    """The same rows of the representations of each kind."""
    return {kind: view[rows.to(view.device)] for kind, view in views.items()}


def run_at_server(fed: Federation, operation: str, **arguments: Value) -> Any:
    """Run an operation of the server's own model; nothing is sent."""
    assert fed.server is not None
    return fed.server.perform(operation, fed.round, 0, arguments)


def ensemble(views: list[Tensor], other: Tensor | None, device: str = "cpu") -> Tensor:
    """Global-local contrastive aggregation of the clients' representations of one kind, (n, d).

    Each row is a weighted mean: a client's weight grows with how well its representation identifies
    the row among the representations of another kind. Without those it is a plain mean.

    Args:
        views: (n, d) by client.
        other: known representations (n, d) of another kind.
    """
    stacked = torch.stack([view.to(device, views[0].dtype) for view in views])  # (clients, n, d)
    if other is None:
        return stacked.mean(0)
    scores = torch.stack([identification_scores(view, other.to(view)) for view in stacked])
    return (scores.softmax(0)[..., None] * stacked).sum(0)


def identification_scores(view: Tensor, other: Tensor) -> Tensor:
    """Log-probability (n,) of each row of `view` (n, d) to be matched with its row of `other`."""
    parts = []
    for rows in torch.arange(len(view)).split(SCORE_ROWS):
        log_probabilities = (view[rows] @ other.mT).log_softmax(-1)
        parts.append(log_probabilities[torch.arange(len(rows)), rows])
    return torch.cat(parts)
