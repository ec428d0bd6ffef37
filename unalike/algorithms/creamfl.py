"""CreamFL (Yu 2023): clients that see, read or do both teach a larger model at the server by what they make of public pairs.

Each round the server tells how it represents the public set; clients are drawn to that, train on their own data and tell their own
representations; the server trains on the public pairs and learns from what it was told. Two heuristics do this, or the Muscle loss in their
place (FedMuscle, appendix M). Without a server's model, what all told stands for it. docs/creamfl.md says what is ours in it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, Required, TypedDict

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from unalike.base.message import Value
from unalike.base.randomness import stream
from unalike.core.client import Client
from unalike.core.federation import Federation
from unalike.core.operations import graph_safe, operation, query, sends
from unalike.core.signatures import Shape
from unalike.losses import infonce, muscle_loss
from unalike.methods.public_data import PublicTraining, PublicTrainingProgram
from unalike.models.model import Model
from unalike.tasks import Retrieval, Task

Views = dict[str, Tensor]  # representations (n, d) of the same rows by kind: image, text, other
View = Annotated[Tensor, Shape("public_rows", "width")]
KINDS = ("image", "text", "other")


class Told(TypedDict, total=False):
    """A client's representations of the public set, of the kinds it has, and its loss."""

    image: View
    text: View
    other: View
    loss: Required[float | None]


@dataclass
class CreamFL(PublicTraining):
    """Defaults are the authors'; width, batch, temperatures of the Muscle loss are FedMuscle's."""

    width: int = 256  # d
    contrast: Literal["cream", "muscle", "none"] = "cream"  # none: nobody learns from anybody
    temperature: float = 0.5  # of the clients' contrast
    regularise: float = 0.5  # its weight
    distil: float = 0.3  # weight of what the server learns from clients
    peers: int = 3  # muscle: whose representations each of the server's is drawn to
    upper: float = 0.2  # muscle: tau^(N)
    lower: float = 0.15  # muscle: tau^(N-1)

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return task.labelled

    def check(self, clients: int, public_rows: int) -> list[tuple[str, str]]:
        above = {
            "temperature": self.temperature,
            "upper": self.upper,
            "lower": self.lower,
            "width": self.width,
            "peers": self.peers,
        }
        problems = [
            (name, f"must be above 0, got {value:g}.")
            for name, value in above.items()
            if not value > 0
        ]
        problems += [
            (name, f"must be at least 0, got {getattr(self, name):g}.")
            for name in ("regularise", "distil")
            if not getattr(self, name) >= 0
        ]
        return problems + super().check(clients, public_rows)

    def serve(self, fed: Federation) -> Iterator[int]:
        for round in fed.rounds():
            known: Views = {}
            if self.contrast != "none":
                known = own(fed, "tell") if fed.server is not None else fed.state.get("known", {})
            replies = fed.call("update", known=known)
            fed.log_metrics(
                "train_loss", {client: reply.pop("loss") for client, reply in replies.items()}
            )
            told: dict[str, Views] = dict(replies)
            goals: Views = {}
            if self.contrast == "cream" or (fed.server is None and self.contrast == "muscle"):
                device = "cpu" if fed.server is None else fed.server.program.client.device
                goals = {
                    kind: ensemble(told, kind, known, device)
                    for kind in KINDS
                    if any(kind in views for views in told.values())
                }
            if fed.server is None:
                fed.state["known"] = goals
            else:
                own(fed, "train")
                peers = (
                    [view for views in told.values() for view in views.values()]
                    if self.contrast == "muscle"
                    else []
                )
                own(fed, "absorb", goals=goals, peers=peers)
            yield round

    def client_problem(self, client: Client) -> str | None:
        if client.task.paired and not isinstance(client.train.shape, dict):
            return "retrieval is between an image and its text, it holds one of them: give it both, by name"
        return super().client_problem(client)

    def figures(self, fed: Federation, metrics: dict[str, dict[str, float]]) -> dict[str, Any]:
        return super().figures(fed, metrics) | (
            {"server": own(fed, "evaluate")} if fed.server is not None else {}
        )

    def server_results(
        self, fed: Federation, metrics: dict[str, dict[str, float]]
    ) -> dict[str, Any] | None:
        return (
            None
            if fed.server is None
            else {"metrics": own(fed, "evaluate"), **own(fed, "describe")}
        )

    class Program(PublicTrainingProgram):
        """A client's half, and the server's own model too: it trains on public pairs as on any data."""

        algorithm: "CreamFL"

        def build(self, encoder: nn.Module) -> Model:
            wide, d = self.encoder_width(encoder), self.algorithm.width
            return Model(
                encoder,
                nn.Identity() if wide == d else nn.Linear(wide, d),
                self.head(d),
                self.client.task.dense,
            )

        @operation
        @sends(image="rows", text="rows", other="rows")
        def update(self, known: Views) -> Told:
            """Be drawn to what is known, train on its own data, and tell."""
            if known:
                self.draw_near(known)
            loss = self.learn()
            told: Any = self.tell()
            return told | {"loss": loss}

        def blank_update(self, known: Views) -> Views:
            """As many rows for each kind it sees; which these are, is looked up on one public row."""
            self.model.eval()
            with torch.no_grad():
                kinds = self.views(self.public_rows(torch.arange(1)))
            return {kind: self.blank(len(self.public), self.algorithm.width) for kind in kinds}

        @query
        def tell(self) -> Views:
            """Its representations of the public set, by kind."""
            self.model.eval()
            with torch.no_grad():
                parts = [
                    self.views(self.public_rows(rows))
                    for rows in torch.arange(len(self.public)).split(256)
                ]
            self.work += len(self.public) / 3
            return {kind: torch.cat([part[kind] for part in parts]) for kind in parts[0]}

        def draw_near(self, known: Views) -> None:
            """A walk through the public set on which its representations are drawn to what is known."""
            known, before = (
                self.client.to_device(known),
                self.tell() if self.algorithm.contrast == "cream" else {},
            )
            self.study(
                self.farness,
                lambda rows: (self.public_rows(rows), of(known, rows), of(before, rows)),
            )

        @graph_safe
        def farness(self, x: Tensor | dict, known: Views, before: Views) -> Tensor:
            """Local contrastive regularisation: near its own kind as known, far from where it was; and each row to the other kind's."""
            how, total = self.algorithm, []
            for kind, z in self.views(x).items():
                if how.contrast == "muscle":
                    total.append(muscle_loss(z, list(known.values()), how.upper, how.lower))
                    continue
                total += [
                    infonce(z, view, how.temperature)
                    for name, view in known.items()
                    if name != kind
                ]
                if kind in known:
                    near = torch.stack(
                        [(z * goal).sum(-1) for goal in (known[kind], before[kind])], 1
                    )  # (B, 2)
                    total.append(
                        cross_entropy(
                            near / how.temperature,
                            torch.zeros(len(z), dtype=torch.int64, device=z.device),
                        )
                    )
            return how.regularise * torch.stack(total).sum()

        @operation
        def absorb(self, goals: Views, peers: list[Tensor]) -> float | None:
            """The server's: a walk through its pairs on which its representations also go to the clients' ensemble, or are aligned with
            those of some clients, drawn anew for each batch; without either it is a walk like any other."""
            draws, goals = stream(self.seed, "peers", self.round), self.client.to_device(goals)
            told = [self.client.to_device(peer) for peer in peers]

            def given(rows: Tensor) -> tuple:
                here = rows.to(self.client.device)
                some = torch.randperm(len(told), generator=draws)[: self.algorithm.peers]
                return self.public_rows(rows), here, of(goals, rows), [told[i][here] for i in some]

            return (
                self.study(self.unlearnt, given)
                if goals or peers or isinstance(self.client.task, Retrieval)
                else None
            )

        @graph_safe
        def unlearnt(
            self, x: Tensor | dict, rows: Tensor, goals: Views, peers: list[Tensor]
        ) -> Tensor:
            """How far the server's representations are from what clients told, and its pairs from each other."""
            how, task, views = self.algorithm, self.client.task, self.views(x)
            far = [
                (z - goals[kind]).square().sum(-1).mean()
                for kind, z in views.items()
                if kind in goals
            ]
            far += [muscle_loss(z, peers, how.upper, how.lower) for z in views.values() if peers]
            costs = [how.distil * each for each in far]
            if isinstance(task, Retrieval):
                costs.append(task.loss(torch.stack(list(views.values()), 1), rows))
            return torch.stack(costs).sum()

        def views(self, x: Tensor | dict) -> Views:
            """(B, d) of length 1 for each kind it sees of these rows."""
            z = self.model.features(x)
            if self.model.dense:
                z = z.mean((-2, -1))
            z = normalize(z, dim=-1)
            return (
                dict(zip(("image", "text"), z.unbind(1), strict=True))
                if z.dim() == 3
                else {self.sort: z}
            )

        @cached_property
        def sort(self) -> str:
            """What its samples are, if not pairs."""
            x = self.public_rows(torch.arange(1), as_came=True)
            return "image" if x.dim() == 4 else "other" if x.is_floating_point() else "text"


def of(views: Views, rows: Tensor) -> Views:
    """Some rows of each."""
    return {kind: view[rows.to(view.device)] for kind, view in views.items()}


def own(fed: Federation, operation: str, **body: Value) -> Any:
    """The server's own model does something; nothing travels."""
    assert fed.server is not None
    return fed.server.perform(operation, fed.round, 0, body)


def ensemble(told: dict[str, Views], kind: str, known: Views, device: str = "cpu") -> Tensor:
    """Global-local contrastive aggregation of a kind, (n, d): of each row, clients count by how well theirs finds the row among those
    known of the other kind; alike where there is none."""
    views = [each[kind] for each in told.values() if kind in each]
    other = next((view for name, view in known.items() if name != kind), None)
    stacked = torch.stack([view.to(device, views[0].dtype) for view in views])  # (clients, n, d)
    if other is None:
        return stacked.mean(0)
    likeness = lambda view, rows: view[rows] @ other.to(view).mT  # (few, n)
    scores = torch.stack(
        [
            torch.cat(
                [
                    likeness(view, rows).log_softmax(-1)[torch.arange(len(rows)), rows]
                    for rows in torch.arange(len(view)).split(1024)
                ]
            )
            for view in stacked
        ]
    )
    return (scores.softmax(0)[..., None] * stacked).sum(0)
