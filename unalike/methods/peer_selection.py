"""Which clients a client is aligned with: random ones, or those with the most similar views."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from unalike.base.randomness import stream
from unalike.core.federation import Federation
from unalike.core.safeguard import NOT_CROSS_VALIDATED
from unalike.losses.kernels import pairwise_cka

OLD_WEIGHT = 0.9  # in the running mean of relevance
NEW_WEIGHT = 0.1


def select_peers(
    fed: Federation,
    views: dict[str, Tensor],
    count: int,
    by_relevance: bool = False,
    moment: tuple[int, ...] = (),
    weights: Mapping[str, float] | None = None,
) -> dict[str, list[str]]:
    """Up to `count` peers for each client; clients without any are left out, unless count is 0.

    Args:
        views: representations (B, d) of the same rows, by client. Peers are chosen among these.
        by_relevance: the most similar ones (`update_relevance`) instead of random ones.
        moment: numbers that name the random draw, e.g. round, epoch, batch.
        weights: by client (agreement.py); nobody of weight 0 is a peer. None: all may be.
    """
    candidates = eligible_peers(fed, views, count)
    if weights is not None:
        candidates = [c for c in candidates if weights[c] > 0]
    relevance = update_relevance(fed, views) if by_relevance else {}
    peers = {}
    for client in views:
        ranked = [c for c in candidates if c != client]
        if by_relevance:
            ranked.sort(key=lambda c: -relevance[client][c])
        else:
            generator = stream(fed.seed, "peers", *moment, client)
            ranked = [ranked[i] for i in torch.randperm(len(ranked), generator=generator)]
        if ranked[:count] or count == 0:
            peers[client] = ranked[:count]
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


def update_relevance(fed: Federation, views: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """Running mean of linear CKA between all pairs of clients, brought up to date by a batch."""
    relevance: dict[str, dict[str, float]]
    relevance = fed.state.setdefault("relevance", {c: {} for c in fed.infos})
    for (a, b), similarity in pairwise_cka(views).items():
        before = relevance[a].get(b, similarity)
        relevance[a][b] = OLD_WEIGHT * before + NEW_WEIGHT * similarity
    return relevance
