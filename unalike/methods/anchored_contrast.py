"""The contrastive loss of one client, the anchor, against its peers, and its gradients.

A thin layer over `unalike.losses`: temperatures of the pairs at hand, the decision between summing
over all index tuples of eq. 3 and drawing some, and one stacked computation for several anchors.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from unalike.base.message import Value
from unalike.losses import anchored_loss, consistent_lower
from unalike.losses.muscle import COLDEST, aggregate, muscle_from_aggregate, positive_rows
from unalike.training.cuda_graphs import GraphedFunction

LossName = Literal["muscle", "pairwise", "gramian"]
Temperature = float | list[list[float]]
Temperatures = dict[str, Value]  # keys "temperature" and "lower_temperature"
Peers = dict[str, list[str]]  # peers by client

STACKED_PEERS = 3  # up to this number of peers all anchors fit into one stacked computation
SUMMED_TUPLES = 2**25  # up to this number of index tuples eq. 3 is summed exactly
DEFAULT_SAMPLES = 64  # drawn where there are more
USE_CUDA_GRAPHS = True


@dataclass(frozen=True)
class AnchoredContrast:
    """The loss and its settings.

    Args:
        temperature: tau^(N), a number or a (clients, clients) matrix.
        lower_temperature: tau^(N-1), likewise; "consistent" solves eq. 22.
        samples: index tuples drawn per row to estimate the Muscle loss; None: all, if feasible.
    """

    loss: LossName
    temperature: Temperature
    lower_temperature: Temperature | Literal["consistent"]
    samples: int | None = None

    def check(self, clients: int) -> list[tuple[str, str]]:
        """Problems with the temperatures, as (field, sentence)."""
        problems = []
        for field in ("temperature", "lower_temperature"):
            value = getattr(self, field)
            if isinstance(value, str):
                continue
            if isinstance(value, list) and [len(row) for row in value] != [clients] * clients:
                sentence = f"a matrix needs {clients} rows of {clients}, one per pair of clients."
                problems.append((field, sentence))
            elif not bool((torch.tensor(value, dtype=torch.float64) >= COLDEST).all()):
                problems.append((field, f"must be at least {COLDEST:g}, got {value}."))
        return problems

    def temperatures(
        self, clients: Sequence[str], anchor: str, peers: Sequence[str]
    ) -> Temperatures:
        """Both temperatures for an anchor and its peers: numbers, or matrices whose row 0 is the
        anchor's.

        Args:
            clients: all clients, in the order of the matrices' rows.
        """
        order = [clients.index(c) for c in (anchor, *peers)]
        upper = _submatrix(self.temperature, order)
        if self.lower_temperature != "consistent":
            lower = _submatrix(self.lower_temperature, order)
        elif isinstance(upper, list):
            matrix = torch.tensor(upper, dtype=torch.float64)
            lower = torch.as_tensor(consistent_lower(matrix)).tolist()
        else:
            lower = consistent_lower(upper)
        return {"temperature": upper, "lower_temperature": lower}

    def count_samples(self, peers: int, rows: int) -> int:
        """How many index tuples are drawn with so many peers; 0: all are summed."""
        if self.loss != "muscle" or (self.samples is None and rows**peers <= SUMMED_TUPLES):
            return 0
        return self.samples or DEFAULT_SAMPLES

    def draw_samples(
        self, peers: int, rows: int, generator: torch.Generator | None = None
    ) -> Tensor | None:
        """Uniform numbers (peers, rows, samples) that decide which index tuples are drawn for an
        anchor with so many peers; None: all are summed."""
        count = self.count_samples(peers, rows)
        return torch.rand(peers, rows, count, generator=generator) if count else None

    def value(
        self,
        z: Tensor,
        peers: Sequence[Tensor],
        temperatures: Temperatures,
        draws: Tensor | None = None,
    ) -> Tensor:
        """The loss, a scalar, of an anchor z (B, d) against peers, each (B, d)."""
        return anchored_loss(
            self.loss,
            z,
            peers,
            _beside(z, temperatures["temperature"]),
            _beside(z, temperatures["lower_temperature"]),
            draws,
        )

    def gradients(
        self,
        clients: Sequence[str],
        views: dict[str, Tensor],
        peers: Peers,
        generator: torch.Generator | None = None,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """dL/dZ (B, d) and the loss of every client in `peers`.

        Args:
            clients: all clients, in the order of the temperatures' rows.
            views: representations (B, d) by client.
        """
        draws = {
            c: self.draw_samples(len(names), len(views[c]), generator) for c, names in peers.items()
        }
        if self._can_stack(peers, draws):
            return self._stacked_gradients(clients, views, peers, draws)
        gradients, losses = {}, {}
        for client, names in peers.items():
            z = views[client].clone().requires_grad_()
            peer_views = [views[name] for name in names]
            temperatures = self.temperatures(clients, client, names)
            loss = self.value(z, peer_views, temperatures, draws[client])
            gradients[client] = torch.autograd.grad(loss, z)[0]
            losses[client] = loss.detach()
        return gradients, losses

    def _can_stack(self, peers: Peers, draws: dict[str, Tensor | None]) -> bool:
        """Whether all anchors have equally many peers and one temperature, and fit into memory."""
        counts = {len(names) for names in peers.values()}
        per_pair = isinstance(self.temperature, list) or isinstance(self.lower_temperature, list)
        if per_pair or len(counts) != 1:
            return False
        sampled = any(draw is not None for draw in draws.values())
        return sampled or max(counts) <= STACKED_PEERS

    def _stacked_gradients(
        self,
        clients: Sequence[str],
        views: dict[str, Tensor],
        peers: Peers,
        draws: dict[str, Tensor | None],
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        anchors = torch.stack([views[c] for c in peers])  # (clients, B, d)
        columns = zip(*peers.values(), strict=True)  # the first peer of each client, the second ...
        peer_views = [torch.stack([views[name] for name in column]) for column in columns]
        drawn_tuples = [draw for draw in draws.values() if draw is not None]
        more = [torch.stack(drawn_tuples).to(anchors)] if drawn_tuples else []
        temperatures: dict[str, Any] = self.temperatures(clients, next(iter(peers)), [])
        function = stacked(self.loss, **temperatures)
        losses, gradients = function(anchors, peer_views, *more)
        # A copy: the next replay of a CUDA graph overwrites its outputs.
        losses = losses.to(torch.float64, copy=True)
        by_client = dict(zip(peers, gradients.unbind(), strict=True))
        return by_client, dict(zip(peers, losses.unbind(), strict=True))

    def aggregate(
        self, z: Tensor, peers: Sequence[Tensor], temperatures: Temperatures
    ) -> tuple[Tensor, Tensor]:
        """The paper's S (B^M, d) and log alpha (B^M,) of eq. 5 for an anchor z (B, d)."""
        return aggregate(
            peers,
            _beside(z, temperatures["temperature"]),
            _beside(z, temperatures["lower_temperature"]),
        )

    def aggregate_value(self, z: Tensor, s: Tensor, log_alpha: Tensor) -> Tensor:
        """The loss of eq. 5, a scalar, of an anchor z (B, d) from S (B^M, d), log alpha (B^M,)."""
        peers = round(math.log(len(log_alpha), len(z)))
        s = s.to(z.device, z.dtype)
        log_alpha = log_alpha.to(z.device, z.dtype)
        return muscle_from_aggregate(z, s, log_alpha, positive_rows(len(z), peers))


@cache
def stacked(loss: LossName, temperature: float, lower_temperature: float) -> GraphedFunction:
    """Losses and gradients of several anchors (clients, B, d) at once, with equally many peers."""
    contrast = AnchoredContrast(loss, temperature, lower_temperature)
    temperatures: Temperatures = {
        "temperature": temperature,
        "lower_temperature": lower_temperature,
    }

    def value(z: Tensor, peers: list[Tensor], draws: Tensor | None = None) -> Tensor:
        return contrast.value(z, peers, temperatures, draws)

    def compute(anchors: Tensor, peers: list[Tensor], *draws: Tensor) -> tuple[Tensor, Tensor]:
        anchors = anchors.detach().requires_grad_()
        losses = torch.func.vmap(value)(anchors, peers, *draws)
        return losses.detach(), torch.autograd.grad(losses.sum(), anchors)[0]

    return GraphedFunction(compute, USE_CUDA_GRAPHS)


def _submatrix(temperature: Any, order: list[int]) -> Any:
    """Rows and columns of a matrix in this order; a number stays as it is."""
    if not isinstance(temperature, list):
        return temperature
    return torch.tensor(temperature, dtype=torch.float64)[order][:, order].tolist()


def _beside(z: Tensor, temperature: Any) -> Any:
    """A matrix, which messages carry as lists, as a tensor on z's device; a number as it is."""
    if not isinstance(temperature, list):
        return temperature
    return torch.tensor(temperature, dtype=z.dtype, device=z.device)
