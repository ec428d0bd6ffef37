"""Alignment of representations on a public set: the server's half. It knows public rows and losses,
no labels. The client's half is `public_alignment.py`.

Lines are those of Algorithm 1 of FedMuscle, https://arxiv.org/abs/2602.01626. What the server
sends in line 10 is `exchange`; the update is the same:
    gradient   dL/dZ, (B, d), computed by the server: as small as Z whatever M is (ours)
    peers      the representations of the M peers, (B, d) each
    paper      S (B^M, d) and alpha (B^M,), as printed
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from unalike.base.message import Value
from unalike.base.randomness import stream
from unalike.core.algorithm import Algorithm
from unalike.core.federation import Federation
from unalike.methods.agreement import PeerRule, agreement_weights
from unalike.methods.anchored_contrast import AnchoredContrast, LossName, Temperature
from unalike.methods.peer_selection import (
    check_peer_count,
    cross_validated_clients,
    select_peers,
)
from unalike.methods.public_data import check_batch
from unalike.methods.quantization import MessageDtype, columns, dequantize, quantize
from unalike.training.loop import Positive

OPERATIONS = {"gradient": "align", "peers": "align_to_peers", "paper": "align_to_aggregate"}


@dataclass
class Alignment(Algorithm):
    """Fields of the alignment, with the defaults of FedMuscle's paper, and one pass of it.

    A method derives from it and calls `align` for each pass over the public set; its `Program`
    derives from `PublicAlignmentProgram`.

    Args:
        peers: M, clients that each client is aligned with at a time.
        width: d, of the representations; a projection is added where an encoder has another width.
        batch: B, public rows per batch.
        passes: T, passes over the public set per round.
        temperature: tau^(N); a (clients, clients) matrix has one per pair.
        lower_temperature: tau^(N-1); "consistent" solves eq. 22.
        loss: eq. 3, or one that the paper compares it with.
        samples: index tuples j drawn to estimate eq. 3; None: all if feasible.
        exchange: what the server sends in line 10, see the top of this file.
        sync: "epoch": one exchange per pass, implies "peers"; "batch": with every batch.
        robust: whether peers whose public rows agree with nobody's are left out (agreement.py).
        message_dtype: what representations, and what answers them, are rounded to for the way
            (quantization.py); None: sent as they are.
        pass_rows: public rows of a pass, others each time, in whole batches; None: all.
    """

    needs_public: ClassVar[bool] = True
    draws_peers_each_batch: ClassVar[bool] = False  # if not, once a pass, as in section 5

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
    robust: PeerRule = "never"
    message_dtype: MessageDtype | None = None
    pass_rows: Positive | None = None

    @classmethod
    def for_engine(cls, fields: dict[str, Any], slow_messages: bool) -> dict[str, Any]:
        """Where a message takes seconds: one exchange per pass, unless `sync` is given."""
        return {"sync": "epoch", **fields} if slow_messages else fields

    @property
    def contrast(self) -> AnchoredContrast:
        """The loss with its settings."""
        return AnchoredContrast(self.loss, self.temperature, self.lower_temperature, self.samples)

    def check(self, clients: int, public_rows: int) -> list[tuple[str, str]]:
        problems = check_batch(self.batch, public_rows) + self.contrast.check(clients)
        available = f", the federation has {clients}. Lower algorithm.peers or add clients."
        problems += check_peer_count(self.peers, clients, available)
        if self.exchange == "paper" and self.message_dtype is not None:
            problems.append(("message_dtype", "the paper's aggregate is sent as it is: leave out."))
        if self.pass_rows is not None and self.pass_rows < self.batch:
            sentence = f"must be at least a batch, {self.batch}, got {self.pass_rows}."
            problems.append(("pass_rows", sentence))
        if self.exchange == "paper" and (self.loss != "muscle" or self.sync == "epoch"):
            problems.append(("exchange", 'paper is for loss "muscle", sync "batch" only.'))
        if self.exchange == "paper" and self.contrast.count_samples(self.peers, self.batch):
            size = f"the paper's aggregate has {self.batch}^{self.peers} rows"
            problems.append(("exchange", f"{size}. Lower algorithm.peers, or use gradient."))
        return problems

    def axis_lengths(self) -> dict[str, int]:
        return super().axis_lengths() | {"columns": columns(self.width, self.message_dtype)}

    def privacy_problem(self) -> str | None:
        if self.message_dtype is not None:
            return (
                "with message_dtype rows are rounded before they are noised, which noise does not "
                "survive; leave algorithm.message_dtype out"
            )
        return super().privacy_problem()

    def check_round(self, clients: int) -> list[tuple[str, str]]:
        remedy = "Lower algorithm.peers or raise federation.participation."
        available = f" a round, {clients} {'is' if clients == 1 else 'are'} sampled. {remedy}"
        return check_peer_count(self.peers, clients, available)

    def align(self, fed: Federation, round: int, epoch: int) -> dict[str, float]:
        """Lines 8 to 13: one pass over the public set. Returns each client's mean loss."""
        if self.sync == "epoch":
            return self.align_once(fed, round, epoch)
        return self.align_by_batch(fed, round, epoch)

    def align_by_batch(self, fed: Federation, round: int, epoch: int) -> dict[str, float]:
        """A pass over the public set with one exchange per batch; returns each client's mean loss.

        Clients answer an update with their representations of the next batch.
        """
        losses = defaultdict(list)  # tensors: reading them at each batch would stall a GPU
        views: dict[str, Tensor] = {}
        order = fed.public(self.batch)
        sizes = [len(rows) for rows in order.batches(round, epoch, self.pass_rows)]
        for batch, (rows, next_rows) in enumerate(zip(sizes, [*sizes[1:], 0], strict=True)):
            where: dict[str, Any] = {"epoch": epoch, "batch": batch}
            if not views:  # line 9, for the first batch, or where nobody answered the last one
                replies = fed.call("represent", **where, sizes={"rows": rows})
                views = self.unpack(fed, "represent", dict(replies))
            draw = batch if self.draws_peers_each_batch else 0
            peers = self.draw_peers(fed, views, round, epoch, draw)
            generator = stream(fed.seed, "combinations", round, epoch, batch)
            gradients, batch_losses = self.server_gradients(fed, views, peers, generator)
            messages: dict[str, dict[str, Value]] = {}
            for client, names in peers.items():  # line 10
                if client in gradients:
                    messages[client] = {"gradient": quantize(gradients[client], self.message_dtype)}
                else:
                    messages[client] = self.peer_message(fed, views, client, names)
            replies = fed.call(  # line 11
                OPERATIONS[self.exchange],
                per_client_operation={c: "align_to_peers" for c in peers if "peers" in messages[c]},
                per_client=messages,
                sizes={"rows": next_rows},
                **where,
            )
            views = {}
            for client, reply in replies.items():
                if client in gradients:
                    views[client] = reply
                    continue
                views[client] = reply["views"]
                if reply["loss"] is not None:  # None with privacy
                    batch_losses[client] = reply["loss"]
            views = self.unpack(fed, OPERATIONS[self.exchange], views)
            for client, loss in batch_losses.items():
                losses[client].append(torch.as_tensor(loss, dtype=torch.float64))
        return {client: float(torch.stack(values).mean()) for client, values in losses.items()}

    def server_gradients(
        self,
        fed: Federation,
        views: dict[str, Tensor],
        peers: dict[str, list[str]],
        generator: torch.Generator,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """dL/dZ (B, d) and the loss of each client that does not compute them itself.

        Those with fold replicas of the safeguard do: each replica has a gradient of its own.
        """
        if self.exchange != "gradient":
            return {}, {}
        replicated = cross_validated_clients(fed)
        anchors = {c: names for c, names in peers.items() if c not in replicated}
        return self.contrast.gradients(list(fed.infos), views, anchors, generator)

    def unpack(
        self, fed: Federation, operation: str, views: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Representations (B, d) by client, from what was sent. A client that sent something else
        is refused."""
        unpacked = {}
        for client, sent in views.items():
            like = sent.dtype if self.message_dtype is None else torch.float32
            try:
                rows = dequantize(sent, self.message_dtype, self.width, like)
            except ValueError as error:
                fed.refuse(client, operation, str(error))
                continue
            # NaN and infinity of real numbers were found when the message came.
            if not sent.is_floating_point() and not rows.isfinite().all():
                fed.refuse(client, operation, "its representations hold NaN or infinity")
                continue
            unpacked[client] = rows
        return unpacked

    def align_once(self, fed: Federation, round: int, epoch: int) -> dict[str, float]:
        """A pass over the public set with a single exchange of all representations."""
        rows = sum(map(len, fed.public(self.batch).batches(round, epoch, self.pass_rows)))
        replies = fed.call("represent_all", epoch=epoch, sizes={"rows": rows})
        views = self.unpack(fed, "represent_all", dict(replies))
        peers = self.draw_peers(fed, views, round, epoch, 0)
        messages = {c: self.peer_message(fed, views, c, names) for c, names in peers.items()}
        return dict(fed.call("align_all", epoch=epoch, per_client=messages))

    def draw_peers(
        self, fed: Federation, views: dict[str, Tensor], round: int, epoch: int, batch: int
    ) -> dict[str, list[str]]:
        """Line 10: M peers for each client; fewer where fewer take part."""
        weights = None
        if self.robust == "agreement":
            weights = agreement_weights(fed, views, one_space=True)
            if batch == 0:
                fed.log_metrics("peer_weight", weights)
        return select_peers(fed, views, self.peers, (round, epoch, batch), weights)

    def peer_message(
        self, fed: Federation, views: dict[str, Tensor], client: str, peers: list[str]
    ) -> dict[str, Any]:
        """What a client computes its gradient from: peers' representations, or S and alpha."""
        temperatures = self.contrast.temperatures(list(fed.infos), client, peers)
        peer_views = [views[name] for name in peers]
        if self.exchange != "paper":
            sent = [quantize(view, self.message_dtype) for view in peer_views]
            return {"peers": sent, "temperatures": temperatures}
        s, log_alpha = self.contrast.aggregate(views[client], peer_views, temperatures)
        return {"s": s, "log_alpha": log_alpha}
