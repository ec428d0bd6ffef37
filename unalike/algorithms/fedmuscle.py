"""FedMuscle (Setayesh 2026): models of different architectures and tasks align their representations on a public set.

Each round every client trains on its own labels, then all walk through the public set together: each sends the representations
of a batch, and is pulled towards those of M peers by the Muscle loss (eq. 3). Three forms of the same update can travel: its
gradient (as small as the representations, whatever M is), the peers' representations, or the paper's B^M aggregate.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Annotated, Any, ClassVar, Literal, TypedDict

import torch
from torch import Tensor, nn

from unalike.base.message import Value
from unalike.base.randomness import scope, stream
from unalike.core.algorithm import Algorithm
from unalike.core.federation import Federation
from unalike.core.operations import operation, sends
from unalike.core.safeguard import UNJUDGED
from unalike.core.signatures import Shape
from unalike.losses import anchored_loss, consistent_lower
from unalike.losses.kernels import pairwise_cka
from unalike.losses.muscle import COLDEST, aggregate, muscle_from_aggregate, positive_rows
from unalike.methods.distillation import DistillationProgram, teach
from unalike.methods.group_averaging import GroupAveragingProgram, train_united, unite
from unalike.methods.shared_subspace import SharedSubspaceProgram, meet
from unalike.models.model import Model
from unalike.training.batch_norm import is_stochastic
from unalike.training.cuda_graphs import GraphedForward, GraphedFunction
from unalike.training.loop import apply_gradients, step

Temperature = float | list[list[float]]
Views = Annotated[Tensor, Shape("rows", "width")]  # representations of a public batch, (B, d)
STACKED = 3  # up to so many peers all anchors fit into one stacked computation
WHOLE = (
    2**25
)  # combinations of peers' rows that are all summed up unless the scenario says otherwise
SAMPLES = 64  # of more than that, so many are drawn
GENTLE = 0.1  # of the rate by which models with held weights are aligned: what they were given is worth keeping
RECORDS = True  # whether a GPU plays recorded passes


class Aligned(TypedDict):
    """The loss on a batch before the step, and the next batch after it."""

    loss: float
    views: Views


@dataclass
class FedMuscle(Algorithm):
    """Defaults are the paper's. E, R and the optimizer are the scenario's `training`."""

    evaluates: ClassVar[bool] = True
    supports_safeguard: ClassVar[bool] = True
    needs_public: ClassVar[bool] = True
    RENAMED: ClassVar[dict[str, str]] = {
        "choice": "peer_selection",
        "own": "self_peers",
        "heads": "average_heads",
        "absent": "mask_absent_classes",
        "opinions": "distill_public",
        "start": "projection_init",
        "local": "backbone_lr_scale",
        "align_rate": "align_lr",
        "opinion_rate": "distill_lr",
        "keep": "final_model",
    }

    peers: int = 3  # M
    width: int = 256  # d
    batch: int = 32  # B, rows of the public set at a time
    passes: int = 1  # T, walks through the public set a round
    temperature: Temperature = 0.2  # tau^(N); a matrix over the clients for one per pair
    lower_temperature: Temperature | Literal["consistent"] = (
        0.15  # tau^(N-1); "consistent" solves eq. 22
    )
    loss: Literal["muscle", "pairwise", "gramian"] = "muscle"
    samples: int | None = (
        None  # combinations drawn to estimate the Muscle loss; None: all if feasible
    )
    exchange: Literal["gradient", "peers", "paper"] = (
        "gradient"  # what goes down; the update is the same
    )
    sync: Literal["batch", "epoch"] = (
        "batch"  # "epoch": one exchange a pass, for slow links; implies "peers"
    )
    peer_selection: Literal["random", "relevance"] = "random"  # which peers
    self_peers: int = 0  # how many of the M peers are the client itself; M: nobody has company
    redraw: Literal["batch", "pass"] = "batch"  # how often peers are drawn
    average_heads: Literal["never", "round", "epoch"] = (
        "never"  # those of one task and label set go on from their mean, or each epoch
    )
    mask_absent_classes: bool = (
        False  # classes absent here but present at a client sharing the head
    )
    distill_public: Literal["never", "all", "multilabel"] = (
        "never"  # learn what all make of public rows; several: if a row may have none
    )
    projection: Literal["auto", "always", "never"] = (
        "auto"  # to the common width; auto: where it differs, or start is joint
    )
    projection_init: Literal["random", "shared"] = (
        "random"  # where projections begin; joint: in one space of all, found at once
    )
    backbone_lr_scale: float = 1.0  # of the heads' rate: how fast local epochs move what heads take
    align_lr: float | None = None  # None: training.lr, a tenth of it where weights are held
    distill_lr: float | None = None  # None: as alignment's
    decay: bool = False  # both grow gentler from round to round, along a cosine to 0
    optimizers: Literal["one", "two"] = "two"  # one each for task and alignment, or one shared
    final_model: Literal["local", "aligned"] = (
        "local"  # the last round's model that clients leave with
    )

    @classmethod
    def for_engine(cls, engine: str, fields: dict[str, Any]) -> dict[str, Any]:
        """With Flower a message takes seconds: one exchange per pass unless the scenario says otherwise."""
        return {"sync": "epoch", **fields} if engine == "flower" else fields

    def check(self, clients: int, public_rows: int) -> list[tuple[str, str]]:
        paper, counts = (
            self.exchange == "paper",
            {name: getattr(self, name) for name in ("peers", "width", "passes", "samples")},
        )
        rates = [(name, given) for name, given in vars(self).items() if name.endswith("_lr")]
        rules = (
            *(
                (count is not None and count < 1, name, f"must be at least 1, got {count}.")
                for name, count in counts.items()
            ),
            (
                not 0 <= self.self_peers <= max(self.peers, 1),
                "self_peers",
                f"must be from 0 to algorithm.peers, {self.peers}, got {self.self_peers}.",
            ),
            (
                self.self_peers and self.loss == "gramian",
                "self_peers",
                "the Gramian loss sees no volume between a client and itself: leave self_peers at 0.",
            ),
            (
                clients + self.self_peers <= self.peers,
                "peers",
                f"{self.company()}, the federation has {clients}. Lower algorithm.peers or add clients.",
            ),
            (
                self.batch < 2,
                "batch",
                f"must be at least 2, got {self.batch}: rows are told apart from the others of their batch.",
            ),
            (
                public_rows < self.batch,
                "batch",
                f"the public set has {public_rows} rows, fewer than a batch of {self.batch}. Lower algorithm.batch or raise public.size.",
            ),
            *(
                (rate is not None and not rate > 0, name, f"must be above 0, got {rate}.")
                for name, rate in rates
            ),
            (
                not (self.optimizers == "one") <= self.backbone_lr_scale <= 1,
                "backbone_lr_scale",
                f"must be from 0 to 1, 1 with one optimizer, got {self.backbone_lr_scale}.",
            ),
            (
                self.mask_absent_classes and self.average_heads == "never",
                "mask_absent_classes",
                "is for averaged heads: set algorithm.average_heads to round or epoch.",
            ),
            (
                self.projection_init == "shared" and self.projection == "never",
                "projection_init",
                "shared needs projections: leave algorithm.projection at auto.",
            ),
            (
                self.decay and self.optimizers == "one" and self.align_lr is None,
                "decay",
                "one optimizer leaves no rate of alignment to decay: set algorithm.align_lr, or optimizers two.",
            ),
            (
                paper and self.drawn(self.peers, self.batch),
                "exchange",
                f"the paper's aggregate has {self.batch}^{self.peers} rows. Lower algorithm.peers, or gradient.",
            ),
            (
                paper and (self.loss != "muscle" or self.sync == "epoch"),
                "exchange",
                'paper is for loss "muscle", sync "batch" only.',
            ),
        )
        problems = [(field, sentence) for broken, field, sentence in rules if broken]
        for name, given in {
            "temperature": self.temperature,
            "lower_temperature": self.lower_temperature,
        }.items():
            if isinstance(given, list) and [len(row) for row in given] != [clients] * clients:
                problems.append(
                    (
                        name,
                        f"as a matrix it needs {clients} rows of {clients}, one per pair of clients.",
                    )
                )
            elif not isinstance(given, str) and not bool(
                (torch.tensor(given, dtype=torch.float64) >= COLDEST).all()
            ):
                problems.append((name, f"must be at least {COLDEST:g}, got {given}."))
        return problems

    def check_round(self, clients: int) -> list[tuple[str, str]]:
        if clients > self.peers - self.self_peers:
            return []
        drawn = f"{clients} {'is' if clients == 1 else 'are'} drawn"
        return [
            (
                "peers",
                f"{self.company()} a round, {drawn}. Lower algorithm.peers or raise federation.participation.",
            )
        ]

    def privacy_problem(self) -> str | None:
        return (
            "with mask_absent_classes clients send which labels they have, which nothing protects; set algorithm.mask_absent_classes to false"
            if (self.mask_absent_classes)
            else super().privacy_problem()
        )

    def company(self) -> str:
        return (
            f"{others} peers need {others + 1} clients"
            if (others := self.peers - self.self_peers) != 1
            else "1 peer needs 2 clients"
        )

    # the server

    def serve(self, fed: Federation) -> Iterator[int]:
        train, spares = (
            "train" if self.backbone_lr_scale == 1 else "train_gently",
            self.mask_absent_classes,
        )
        for round in fed.rounds():
            if self.projection_init == "shared":
                fed.log_metrics("joint_fit", meet(fed, self.width))
            fed.log_metrics(
                "train_loss",
                train_united(fed, train, spares)
                if self.average_heads == "epoch"
                else dict(fed.call(train)),
            )
            fed.evaluate("after local")
            if self.final_model == "local" and (
                round == fed.training.rounds or fed.config.partial
            ):  # who misses the last round leaves, too
                fed.call("settle")
            if self.average_heads != "never":  # who leaves now leaves with its own
                unite(fed, spares)
            for epoch in range(self.passes):
                fed.log_metrics(
                    f"{self.loss}_loss",
                    (self.epoch if self.sync == "epoch" else self.batches)(fed, round, epoch),
                )
            if self.distill_public != "never":
                fed.log_metrics("public_loss", teach(fed, self.distill_public == "multilabel"))
            fed.evaluate("after alignment")
            yield round

    def finish(self, fed: Federation) -> None:
        if self.final_model == "local":
            fed.call("leave", clients=fed.clients, quorum=0)

    def batches(self, fed: Federation, round: int, epoch: int) -> dict[str, float]:
        """One pass with an exchange for every batch; returns each client's mean loss. Who has aligned answers with the next batch."""
        total: dict[
            str, list[Tensor]
        ] = {}  # of no value yet: a GPU is not waited for at each batch
        rows = [len(each) for each in fed.public(self.batch).batches(round, epoch)]
        views: dict[str, Any] = {}
        usual = {"gradient": "align", "peers": "align_to_peers", "paper": "align_to_aggregate"}[
            self.exchange
        ]
        for batch, (own, following) in enumerate(zip(rows, [*rows[1:], 0], strict=True)):
            views = views or dict(
                fed.call("represent", epoch=epoch, batch=batch, sizes={"rows": own})
            )
            drawn, judged = (
                self.draw(fed, views, round, epoch, batch if self.redraw == "batch" else 0),
                self.judged(fed),
            )
            pulled = {
                c: drawn[c] for c in drawn if self.exchange == "gradient" and c not in judged
            }  # a gradient fits no shadow
            other = {
                c: "align_to_peers" for c in drawn if self.exchange == "gradient" and c in judged
            }
            pulls, losses = self.pulls(
                fed, views, pulled, stream(fed.seed, "combinations", round, epoch, batch)
            )
            each = {
                c: {"gradient": pulls[c]} if c in pulled else self.hear(fed, views, c, peers)
                for c, peers in drawn.items()
            }
            told = dict(
                fed.call(
                    usual,
                    per_client_operation=other,
                    epoch=epoch,
                    batch=batch,
                    per_client=each,
                    sizes={"rows": following},
                )
            )
            losses |= {c: reply["loss"] for c, reply in told.items() if c not in pulled}
            views = {c: reply if c in pulled else reply["views"] for c, reply in told.items()}
            for client, value in losses.items():
                if value is not None:  # with privacy clients do not tell
                    total.setdefault(client, []).append(torch.as_tensor(value, dtype=torch.float64))
        return {client: float(torch.stack(values).mean()) for client, values in total.items()}

    def epoch(self, fed: Federation, round: int, epoch: int) -> dict[str, float]:
        """One pass with a single exchange: everyone's representations of the whole public set."""
        views = dict(fed.call("represent_all"))
        drawn = self.draw(fed, views, round, epoch, 0)
        return dict(
            fed.call(
                "align_all",
                epoch=epoch,
                per_client={c: self.hear(fed, views, c, peers) for c, peers in drawn.items()},
            )
        )

    def draw(
        self, fed: Federation, views: dict[str, Tensor], round: int, epoch: int, batch: int
    ) -> dict[str, list[str]]:
        """M peers, less `own`, for each client among the others who are here; fewer where fewer are, and who is left alone is left out. Who
        is judged only listens, where the others are enough."""
        if self.peer_selection == "relevance":
            relevance = fed.state.setdefault("relevance", {c: {} for c in fed.infos})
            for (a, b), alike in pairwise_cka(views).items():
                relevance[a][b] = 0.9 * relevance[a].get(b, alike) + 0.1 * alike  # a running mean
        drawn, silent = (
            {},
            self.judged(fed),
        )  # or shadows hear, from peers, of labels they must not know
        speak = (
            [c for c in views if c not in silent]
            if len(fed.infos) - len(silent) > self.peers - self.self_peers
            else list(views)
        )
        for client in views:
            others = [c for c in speak if c != client]
            if self.peer_selection == "relevance":
                order = sorted(others, key=lambda c: -relevance[client][c])
            else:
                order = [
                    others[i]
                    for i in torch.randperm(
                        len(others),
                        generator=stream(fed.seed, "peers", round, epoch, batch, client),
                    )
                ]
            drawn[client] = order[: self.peers - self.self_peers]
        return {
            client: peers
            for client, peers in drawn.items()
            if peers or self.self_peers == self.peers
        }

    def temperatures(self, fed: Federation, client: str, peers: list[str]) -> dict[str, Value]:
        """Both temperatures for an anchor, its peers and itself as one: numbers, or matrices whose row 0 is the anchor."""
        order = [list(fed.infos).index(c) for c in (client, *peers, *[client] * self.self_peers)]
        pick = lambda given: (
            torch.tensor(given, dtype=torch.float64)[order][:, order].tolist()
            if isinstance(given, list)
            else given
        )
        upper = pick(self.temperature)
        if self.lower_temperature != "consistent":
            return {"temperature": upper, "lower_temperature": pick(self.lower_temperature)}
        lower = consistent_lower(
            torch.tensor(upper, dtype=torch.float64) if isinstance(upper, list) else upper
        )
        return {
            "temperature": upper,
            "lower_temperature": lower.tolist() if isinstance(lower, Tensor) else lower,
        }

    def drawn(self, peers: int, batch: int) -> int:
        """How many combinations of so many peers' rows are drawn; 0: all are summed up."""
        if self.loss != "muscle" or (self.samples is None and batch**peers <= WHOLE):
            return 0
        return self.samples or SAMPLES

    def draws(
        self, peers: int, batch: int, generator: torch.Generator | None = None
    ) -> Tensor | None:
        """What decides which combinations are drawn for an anchor's rows, (peers, batch, combinations); None: all are summed up."""
        peers += self.self_peers
        return (
            torch.rand(peers, batch, count, generator=generator)
            if (count := self.drawn(peers, batch))
            else None
        )

    def contrast(
        self,
        z: Tensor,
        peers: list[Tensor],
        temperature: Any,
        lower_temperature: Any,
        draws: Tensor | None = None,
    ) -> Tensor:
        """The loss of one anchor, against its peers and, if `own`, against itself as it is."""
        return anchored_loss(
            self.loss,
            z,
            [*peers, *[z.detach()] * self.self_peers],
            like(z, temperature),
            like(z, lower_temperature),
            draws,
        )

    def pulls(
        self,
        fed: Federation,
        views: dict[str, Tensor],
        drawn: dict[str, list[str]],
        generator: torch.Generator | None = None,
    ) -> tuple[dict, dict]:
        """dL/dZ of every client, and the losses. Where all have as many peers and one temperature, they are computed as one."""
        pulls, losses = {}, {}
        draws = {c: self.draws(len(peers), len(views[c]), generator) for c, peers in drawn.items()}
        sizes = {len(peers) for peers in drawn.values()}
        per_pair = isinstance(self.temperature, list) or isinstance(self.lower_temperature, list)
        estimated = [told for told in draws.values() if told is not None]
        if (
            not per_pair
            and len(sizes) == 1
            and (max(sizes) + self.self_peers <= STACKED or estimated)
        ):
            others = [
                torch.stack([views[p] for p in column])
                for column in zip(*drawn.values(), strict=True)
            ]
            settings: dict[str, Any] = self.temperatures(fed, next(iter(drawn)), [])
            anchors = torch.stack([views[c] for c in drawn])  # (clients, B, d)
            decided = [torch.stack(estimated).to(anchors)] if estimated else []
            each, gradients = stacked(self.loss, self.self_peers, **settings)(
                anchors, others, *decided
            )
            kept = each.to(torch.float64, copy=True)  # the next call overwrites what was played
            return dict(zip(drawn, gradients.unbind(), strict=True)), dict(
                zip(drawn, kept.unbind(), strict=True)
            )
        for client, peers in drawn.items():
            z = views[client].clone().requires_grad_()
            loss = self.contrast(
                z,
                [views[p] for p in peers],
                **self.temperatures(fed, client, peers),
                draws=draws[client],
            )
            (pulls[client],), losses[client] = torch.autograd.grad(loss, z), loss.detach()
        return pulls, losses

    def hear(
        self, fed: Federation, views: dict[str, Tensor], client: str, peers: list[str]
    ) -> dict[str, Any]:
        """What a client finds its gradient from: its peers' representations, or the paper's aggregate of them."""
        t, z = self.temperatures(fed, client, peers), views[client]
        if self.exchange != "paper":
            return {"peers": [views[p] for p in peers], "temperatures": t}
        s, log_alpha = aggregate(
            [*(views[p] for p in peers), *[z] * self.self_peers],
            like(z, t["temperature"]),
            like(z, t["lower_temperature"]),
        )
        return {"s": s, "log_alpha": log_alpha}

    def judged(self, fed: Federation) -> set[str]:
        """With the safeguard: who has shared neither head nor opinion, and so has shadows."""
        return set(fed.infos) - set(fed.state.get(UNJUDGED, [])) if fed.guarded else set()

    # the client

    class Program(GroupAveragingProgram, DistillationProgram, SharedSubspaceProgram):
        algorithm: "FedMuscle"
        common: ClassVar[str] = "head."
        graph: tuple[tuple[int, int, int], Tensor] | None = (
            None  # of the batch last represented: round, epoch, batch; (B, d)
        )

        def build(self, encoder: nn.Module) -> Model:
            d, wide, how = (
                self.algorithm.width,
                self.encoder_width(encoder),
                self.algorithm.projection,
            )
            if how == "never" and wide != d:
                raise ValueError(
                    f"its encoder gives {wide} features, the federation compares {d}; "
                    f"set algorithm.projection to auto or algorithm.width to {wide}"
                )
            projection = (
                nn.Identity()
                if wide == d and how != "always" and self.algorithm.projection_init == "random"
                else nn.Linear(wide, d)
            )
            return Model(encoder, projection, self.head(d), self.client.task.dense)

        @operation
        @sends("rows")
        def represent(self, epoch: int, batch: int) -> Views:
            """(B, d) of a public batch; the graph is kept for `align`, in case it comes to this process."""
            self.work, self.graph = self.work + len(self.walk(epoch)[batch]) / 3, None
            self.graph = ((self.round, epoch, batch), self.forward(epoch, batch))
            return self.graph[1].detach()

        @operation
        @sends("rows")
        def align(self, epoch: int, batch: int, gradient: Tensor) -> Views:
            """Backward from the gradient the server found, one step; then the next batch, so that each costs one call."""
            (optimizer := self.learner("align")).zero_grad(set_to_none=True)
            z = self.recall(epoch, batch)
            self.work += len(z)
            z.backward(gradient.to(z.device, z.dtype))
            apply_gradients(optimizer, self.training.max_grad_norm)
            del z  # while a graph lives, a GPU cannot record the way back to its parameters
            return self.following(epoch, batch)

        @operation
        @sends(views="rows")
        def align_to_peers(
            self, epoch: int, batch: int, peers: list[Tensor], temperatures: dict
        ) -> Aligned:
            """The same step from the peers' representations."""
            loss = self.descend(
                self.contrast(self.recall(epoch, batch), peers, temperatures),
                len(self.walk(epoch)[batch]),
            )
            return {"loss": loss, "views": self.following(epoch, batch)}

        @operation
        @sends(views="rows")
        def align_to_aggregate(
            self, epoch: int, batch: int, s: Tensor, log_alpha: Tensor
        ) -> Aligned:
            """The same step from the paper's S and alpha (eq. 5)."""
            rows = positive_rows(
                count := len(self.walk(epoch)[batch]), round(math.log(len(log_alpha), count))
            )
            told = lambda z: muscle_from_aggregate(
                z, s.to(z.device, z.dtype), log_alpha.to(z.device, z.dtype), rows
            )
            return {
                "loss": self.descend(told(self.recall(epoch, batch)), count),
                "views": self.following(epoch, batch),
            }

        @operation
        @sends("rows")
        def represent_all(self) -> Annotated[Tensor, Shape("public_rows", "width")]:
            """(|D|, d) of the whole public set."""
            return self.look(lambda z: (z,), self.model.represent)[0]

        def blank_represent(self, epoch: int, batch: int) -> Tensor:
            return self.blank(len(self.walk(epoch)[batch]), self.algorithm.width)

        def blank_align(self, epoch: int, batch: int, **given: Any) -> Tensor:
            """Of the batch that follows."""
            walk = self.walk(epoch)
            return self.blank(
                0 if batch + 1 == len(walk) else len(walk[batch + 1]), self.algorithm.width
            )

        def blank_align_to_peers(self, epoch: int, batch: int, **given: Any) -> dict[str, Any]:
            return {"loss": None, "views": self.blank_align(epoch, batch)}

        blank_align_to_aggregate = blank_align_to_peers

        def blank_represent_all(self) -> Tensor:
            return self.blank(len(self.public), self.algorithm.width)

        @operation
        def align_all(self, epoch: int, peers: list[Tensor], temperatures: dict) -> float:
            """A walk through the public set towards representations that stay as they were when it began."""
            losses = []
            for batch, rows in enumerate(self.walk(epoch)):
                self.work += len(rows) / 3
                losses.append(
                    self.descend(
                        self.contrast(
                            self.forward(epoch, batch), [p[rows] for p in peers], temperatures
                        ),
                        len(rows),
                    )
                )
            return sum(losses) / len(losses)

        @operation
        def settle(self) -> None:
            """Remember this model: it is the one to leave with, whatever the last alignment does."""
            model = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
            self.memory["settled"] = {"model": model, UNJUDGED: self.memory.get(UNJUDGED, False)}

        @operation
        def leave(self) -> None:
            """Go back to the model that was remembered."""
            if (settled := self.memory.pop("settled", None)) is not None:
                self.model.load_state_dict(settled["model"])
                self.memory[UNJUDGED] = settled[UNJUDGED]

        @cached_property
        def passes(self) -> GraphedForward:
            """Representations of rows; a GPU plays them where each pass is the same."""
            learning = [p for p in self.model.parameters() if p.requires_grad]
            return GraphedForward(
                self.model.represent, learning, RECORDS and not is_stochastic(self.model.train())
            )

        def following(self, epoch: int, batch: int) -> Tensor:
            """The batch after this one; no rows after the last."""
            over = batch + 1 == len(self.walk(epoch))
            return (
                torch.zeros(0, self.algorithm.width, dtype=self.client.dtype)
                if over
                else self.represent(epoch, batch + 1)
            )

        def forward(self, epoch: int, batch: int) -> Tensor:
            rows = self.walk(epoch)[batch]
            if not self.model.training:  # to say it again takes as long as a small step
                self.model.train()
            with scope(self.seed, "represent", self.client.id, self.round, epoch, batch):
                return self.passes(self.public_rows(rows))

        def recall(self, epoch: int, batch: int) -> Tensor:
            """The representations of a batch with their graph: kept, or computed again without counting statistics twice."""
            kept, self.graph = self.graph, None
            if kept is not None and kept[0] == (self.round, epoch, batch):
                return kept[1]
            own = [
                (module, name, buffer)
                for module in self.model.modules()
                for name, buffer in module.named_buffers(recurse=False)
            ]
            for module, name, buffer in own:
                setattr(
                    module, name, buffer.clone()
                )  # the graph holds on to these, so they cannot be changed back
            z = self.forward(epoch, batch)
            for module, name, buffer in own:
                setattr(module, name, buffer)
            return z

        def contrast(self, z: Tensor, peers: list[Tensor], temperatures: dict) -> Tensor:
            draws = self.algorithm.draws(len(peers), len(z))
            return self.algorithm.contrast(
                z, [p.to(z.device, z.dtype) for p in peers], **temperatures, draws=draws
            )

        def descend(self, loss: Tensor, rows: int) -> float:
            self.work += rows
            step(loss, self.learner("align"), self.training.max_grad_norm)
            return float(loss.detach())

        def learner(self, name: str = "public") -> torch.optim.Optimizer:
            """For what is learnt from the public set: as gentle as the round is to be."""
            how, rate = self.algorithm, self.algorithm.distill_lr if name == "public" else None
            rate = rate or how.align_lr
            if how.optimizers == "one" and rate is None:
                return self.optimizer()
            rate = rate or self.training.lr * (
                1 if all(p.requires_grad for p in self.model.parameters()) else GENTLE
            )
            optimizer = self.optimizer(name, rate)
            for group in optimizer.param_groups if how.decay else ():
                group["lr"] = (
                    rate * (1 + math.cos(math.pi * (self.round - 1) / self.training.rounds)) / 2
                )
            return optimizer


@cache
def stacked(loss: Any, own: int, temperature: float, lower_temperature: float) -> GraphedFunction:
    """Losses and gradients of several anchors (clients, B, d) at once, each with as many peers."""

    def of(anchors: Tensor, others: list[Tensor], *draws: Tensor) -> tuple[Tensor, Tensor]:
        anchors = anchors.detach().requires_grad_()
        contrast = lambda z, peers, *drawn: FedMuscle(loss=loss, self_peers=own).contrast(
            z, peers, temperature, lower_temperature, *drawn
        )
        each = torch.func.vmap(contrast)(anchors, others, *draws)
        return each.detach(), torch.autograd.grad(each.sum(), anchors)[0]

    return GraphedFunction(of, RECORDS)


def like(z: Tensor, temperature: Any) -> Any:
    """A temperature as it came in a message: a matrix as a tensor beside z."""
    return (
        torch.tensor(temperature, dtype=z.dtype, device=z.device)
        if isinstance(temperature, list)
        else temperature
    )
