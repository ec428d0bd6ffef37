"""Which clients a client is aligned with."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from unalike.base.randomness import stream
from unalike.core.federation import Federation
from unalike.core.safeguard import NOT_CROSS_VALIDATED


def select_peers(
    fed: Federation,
    views: dict[str, Tensor],
    count: int,
    moment: tuple[int, ...] = (),
    weights: Mapping[str, float] | None = None,
) -> dict[str, list[str]]:
    """Up to `count` random peers for each client; clients without any are left out.

    Args:
        views: representations (B, d) of the same rows, by client. Peers are chosen among these.
        moment: numbers that name the random draw, e.g. round, epoch, batch.
        weights: by client (agreement.py); nobody of weight 0 is a peer. None: all may be.
    """
    candidates = eligible_peers(fed, views, count)
    if weights is not None:
        candidates = [c for c in candidates if weights[c] > 0]
    peers = {}
    for client in views:
        others = [c for c in candidates if c != client]
        generator = stream(fed.seed, "peers", *moment, client)
        drawn = [others[i] for i in torch.randperm(len(others), generator=generator)]
        if drawn:
            peers[client] = drawn[:count]
    return peers


def check_peer_count(count: int, clients: int, available: str) -> list[tuple[str, str]]:
    """A problem, as (field, sentence), where so many clients are too few for `count` peers each.

    Args:
        available: how many clients there are, and what to do about it.
    """
    if clients > count:
        return []
    need = "1 peer needs 2 clients" if count == 1 else f"{count} peers need {count + 1} clients"
    return [("peers", f"{need}{available}")]


def eligible_peers(fed: Federation, clients: Iterable[str], count: int) -> list[str]:
    """Clients that may be peers. Those evaluated by the safeguard are not, if enough others remain:
    what a peer learnt from them would bring their labels back to their own fold replicas."""
    cross_validated = cross_validated_clients(fed)
    if len(fed.infos) - len(cross_validated) > count:
        return [c for c in clients if c not in cross_validated]
    return list(clients)


def cross_validated_clients(fed: Federation) -> set[str]:
    """With the safeguard: clients with fold replicas, since they have received nothing that was
    derived from their own labels."""
    return set(fed.infos) - set(fed.state.get(NOT_CROSS_VALIDATED, [])) if fed.guarded else set()
