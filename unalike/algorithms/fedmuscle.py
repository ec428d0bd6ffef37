"""FedMuscle: clients with different models and tasks align their representations of a public set.

M. Setayesh, M. Beitollahi, Y. H. Khalil, H. Li, "Toward Enhancing Representation Learning in
Federated Multi-Task Settings", ICLR 2026, https://arxiv.org/abs/2602.01626.

Lines are those of the paper's Algorithm 1, equations the paper's. What the server sends in line 10
is `exchange`; the update is the same:
    gradient   dL/dZ, (B, d), computed by the server: as small as Z whatever M is (ours)
    peers      the representations of the M peers, (B, d) each
    paper      S (B^M, d) and alpha (B^M,), as printed
What we added to the paper is in `unalike.methods.alignment_parts`; all of it is off by default.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypedDict

import torch
from torch import Tensor

from unalike.base.message import Value
from unalike.base.randomness import stream
from unalike.core.federation import Federation
from unalike.core.operations import operation, sends
from unalike.methods.absent_classes import AbsentClassProgram
from unalike.methods.agreement import agreement_weights
from unalike.methods.alignment_parts import AlignmentParts
from unalike.methods.anchored_contrast import AnchoredContrast, LossName, Temperature
from unalike.methods.distillation import DistillationProgram
from unalike.methods.final_model import SnapshotProgram
from unalike.methods.group_averaging import GroupAveragingProgram
from unalike.methods.peer_selection import (
    check_peer_count,
    cross_validated_clients,
    select_peers,
)
from unalike.methods.public_alignment import PublicAlignmentProgram, Views
from unalike.methods.public_data import check_batch
from unalike.methods.shared_subspace import SharedSubspaceProgram
from unalike.methods.slow_backbone import SlowBackboneProgram
from unalike.training.loop import Positive, apply_gradients

OPERATIONS = {"gradient": "align", "peers": "align_to_peers", "paper": "align_to_aggregate"}


class Aligned(TypedDict):
    """The loss on a batch before the step, and representations of the next batch after it."""

    loss: float
    views: Views


@dataclass
class FedMuscle(AlignmentParts):
    """Defaults are the paper's. E, R and the optimizer are the scenario's `training`.

    Args:
        peers: M, clients that each client is aligned with per batch.
        width: d, of the representations.
        batch: B, public rows per batch.
        passes: T, passes over the public set per round.
        temperature: tau^(N); a (clients, clients) matrix has one per pair.
        lower_temperature: tau^(N-1); "consistent" solves eq. 22.
        loss: eq. 3, or one that the paper compares it with.
        samples: index tuples j drawn to estimate eq. 3; None: all if feasible.
        exchange: what the server sends in line 10, see the top of this file.
        sync: "epoch": one exchange per pass, implies "peers"; "batch": with every batch.
        projection: to width d: "always", "never", or "auto" where the encoder's width differs.
    """

    evaluates: ClassVar[bool] = True
    supports_safeguard: ClassVar[bool] = True
    needs_public: ClassVar[bool] = True

    peers: Positive = 3
    width: Positive = 256
    batch: int = 32
    passes: Positive = 1
    temperature: Temperature = 0.2
    lower_temperature: Temperature | Literal["consistent"] = 0.15
    loss: LossName = "muscle"
    samples: Positive | None = None
    exchange: Literal["gradient", "peers", "paper"] = "gradient"
    sync: Literal["batch", "epoch"] = "batch"
    projection: Literal["auto", "always", "never"] = "auto"

    @classmethod
    def for_engine(cls, fields: dict[str, Any], slow_messages: bool) -> dict[str, Any]:
        """Where a message takes seconds: one exchange per pass, unless `sync` is given."""
        return {"sync": "epoch", **fields} if slow_messages else fields

    @property
    def contrast(self) -> AnchoredContrast:
        """The loss with its settings."""
        temperatures = (self.temperature, self.lower_temperature)
        return AnchoredContrast(self.loss, *temperatures, self.samples, self.self_peers)

    def check(self, clients: int, public_rows: int) -> list[tuple[str, str]]:
        problems = self.check_parts(self.peers, self.loss, self.projection)
        problems += check_batch(self.batch, public_rows) + self.contrast.check(clients)
        available = f", the federation has {clients}. Lower algorithm.peers or add clients."
        problems += check_peer_count(self.peers - self.self_peers, clients, available)
        if self.exchange == "paper" and (self.loss != "muscle" or self.sync == "epoch"):
            problems.append(("exchange", 'paper is for loss "muscle", sync "batch" only.'))
        if self.exchange == "paper" and self.contrast.count_samples(self.peers, self.batch):
            size = f"the paper's aggregate has {self.batch}^{self.peers} rows"
            problems.append(("exchange", f"{size}. Lower algorithm.peers, or use gradient."))
        return problems

    def check_round(self, clients: int) -> list[tuple[str, str]]:
        remedy = "Lower algorithm.peers or raise federation.participation."
        available = f" a round, {clients} {'is' if clients == 1 else 'are'} sampled. {remedy}"
        return check_peer_count(self.peers - self.self_peers, clients, available)

    # the server

    def serve(self, fed: Federation) -> Iterator[int]:
        parts = self.parts(self.width)
        for round in fed.rounds():  # line 4
            for part in parts:
                part.before_local(fed)
            fed.log_metrics("train_loss", self.train_locally(fed, parts))  # lines 5-6, 16-20
            fed.evaluate("after local")
            for part in parts:
                part.after_local(fed)
            for epoch in range(self.passes):  # line 7
                align = self.align_once if self.sync == "epoch" else self.align_by_batch
                fed.log_metrics(f"{self.loss}_loss", align(fed, round, epoch))
            for part in parts:
                part.after_alignment(fed)
            fed.evaluate("after alignment")
            yield round

    def finish(self, fed: Federation) -> None:
        for part in self.parts(self.width):
            part.finish(fed)

    def align_by_batch(self, fed: Federation, round: int, epoch: int) -> dict[str, float]:
        """A pass over the public set with one exchange per batch; returns each client's mean loss.

        Clients answer an update with their representations of the next batch.
        """
        losses = defaultdict(list)  # tensors: reading them at each batch would stall a GPU
        views: dict[str, Tensor] = {}
        sizes = [len(rows) for rows in fed.public(self.batch).batches(round, epoch)]
        for batch, (rows, next_rows) in enumerate(zip(sizes, [*sizes[1:], 0], strict=True)):
            where: dict[str, Any] = {"epoch": epoch, "batch": batch}
            if not views:  # line 9
                views = dict(fed.call("represent", **where, sizes={"rows": rows}))
            draw = batch if self.redraw == "batch" else 0
            peers = self.draw_peers(fed, views, round, epoch, draw)
            # The safeguard's fold replicas need peers, to compute a gradient each.
            by_peers = cross_validated_clients(fed) if self.exchange == "gradient" else set(peers)
            by_gradient = {c: names for c, names in peers.items() if c not in by_peers}
            generator = stream(fed.seed, "combinations", round, epoch, batch)
            gradients, batch_losses = self.contrast.gradients(
                list(fed.infos), views, by_gradient, generator
            )
            messages: dict[str, dict[str, Value]] = {}
            for client, names in peers.items():  # line 10
                if client in by_peers:
                    messages[client] = self.peer_message(fed, views, client, names)
                else:
                    messages[client] = {"gradient": gradients[client]}
            replies = fed.call(
                OPERATIONS[self.exchange],
                per_client_operation={c: "align_to_peers" for c in peers if "peers" in messages[c]},
                per_client=messages,
                sizes={"rows": next_rows},
                **where,
            )
            views = {}
            for client, reply in replies.items():
                views[client] = reply if client in gradients else reply["views"]
                if client not in gradients and reply["loss"] is not None:  # None with privacy
                    batch_losses[client] = reply["loss"]
            for client, loss in batch_losses.items():
                losses[client].append(torch.as_tensor(loss, dtype=torch.float64))
        return {client: float(torch.stack(values).mean()) for client, values in losses.items()}

    def align_once(self, fed: Federation, round: int, epoch: int) -> dict[str, float]:
        """A pass over the public set with a single exchange of all representations."""
        views = dict(fed.call("represent_all"))
        peers = self.draw_peers(fed, views, round, epoch, 0)
        messages = {c: self.peer_message(fed, views, c, names) for c, names in peers.items()}
        return dict(fed.call("align_all", epoch=epoch, per_client=messages))

    def draw_peers(
        self, fed: Federation, views: dict[str, Tensor], round: int, epoch: int, batch: int
    ) -> dict[str, list[str]]:
        """Line 10: M peers for each client, less `self_peers`; fewer where fewer take part."""
        count = self.peers - self.self_peers
        by_relevance = self.peer_selection == "relevance"
        weights = None
        if self.robust == "agreement":
            weights = agreement_weights(fed, views, one_space=True)
            if batch == 0:
                fed.log_metrics("peer_weight", weights)
        return select_peers(fed, views, count, by_relevance, (round, epoch, batch), weights)

    def peer_message(
        self, fed: Federation, views: dict[str, Tensor], client: str, peers: list[str]
    ) -> dict[str, Any]:
        """What a client computes its gradient from: peers' representations, or S and alpha."""
        temperatures = self.contrast.temperatures(list(fed.infos), client, peers)
        peer_views = [views[name] for name in peers]
        if self.exchange != "paper":
            return {"peers": peer_views, "temperatures": temperatures}
        s, log_alpha = self.contrast.aggregate(views[client], peer_views, temperatures)
        return {"s": s, "log_alpha": log_alpha}

    # the client

    class Program(
        PublicAlignmentProgram,
        AbsentClassProgram,
        GroupAveragingProgram,
        SlowBackboneProgram,
        DistillationProgram,
        SharedSubspaceProgram,
        SnapshotProgram,
    ):
        algorithm: "FedMuscle"
        averaged_prefix: ClassVar[str] = "head."

        @operation
        @sends("rows")
        def align(self, epoch: int, batch: int, gradient: Tensor) -> Views:
            """Line 11 from dL/dZ, (B, d): backward and one step. Returns Z of the next batch."""
            optimizer = self.algorithm.public_optimizer(self, "align")
            optimizer.zero_grad(set_to_none=True)
            z = self.recall(epoch, batch)
            self.work += len(z)
            z.backward(gradient.to(z.device, z.dtype))
            apply_gradients(optimizer, self.training.max_grad_norm)
            del z  # while its graph lives, a GPU cannot capture the next backward pass
            return self.represent_next(epoch, batch)

        @operation
        @sends(views="rows")
        def align_to_peers(
            self, epoch: int, batch: int, peers: list[Tensor], temperatures: dict
        ) -> Aligned:
            """Line 11 from the peers' representations, (B, d) each."""
            loss = self.step_towards(self.recall(epoch, batch), peers, temperatures)
            return {"loss": loss, "views": self.represent_next(epoch, batch)}

        @operation
        @sends(views="rows")
        def align_to_aggregate(
            self, epoch: int, batch: int, s: Tensor, log_alpha: Tensor
        ) -> Aligned:
            """Line 11 as printed: from S (B^M, d) and log alpha (B^M,), eq. 5."""
            z = self.recall(epoch, batch)
            loss = self.step(self.algorithm.contrast.aggregate_value(z, s, log_alpha), len(z))
            del z
            return {"loss": loss, "views": self.represent_next(epoch, batch)}

        def blank_align(self, epoch: int, batch: int, **arguments: Any) -> Tensor:
            return self.blank_represent(epoch, batch + 1)

        def blank_align_to_peers(self, epoch: int, batch: int, **arguments: Any) -> dict[str, Any]:
            return {"loss": None, "views": self.blank_represent(epoch, batch + 1)}

        blank_align_to_aggregate = blank_align_to_peers
