"""k-means of several clients whose rows stay with them. Depends on torch only.

Clients send centres, sums of squared distances, and sums and numbers of rows by cluster, never a
row. Each client proposes the centres of k-means on its own rows, and the server adds proposals by
k-means on all these centres (k-FED, Dennis et al. 2021, https://arxiv.org/abs/2103.00697). Every
proposal is improved by Lloyd's algorithm, whose sums the clients send and the server adds up, and
the one with the least total distance over all clients wins. From the same start it ends as k-means
on everyone's rows together.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from unalike.tasks.kmeans import kmeans

SERVER_PROPOSALS = 10
MAX_ROUNDS = 100  # of Lloyd's algorithm; one message each way in each


def federated_kmeans(
    features: Sequence[Tensor], clusters: int, seed: int, starts: int = 100
) -> tuple[list[Tensor], Tensor]:
    """Cluster the rows of several clients together.

    Args:
        features: one (n, width) per client, finite.
        clusters: number of clusters; clients with fewer rows propose nothing.
        seed: of the initialisations.
        starts: initialisations of each client's own k-means.
    Returns: clusters (n,) of each client's rows, and the common centres (clusters, width) float64.
    Raises: ValueError if no client has as many rows as clusters.
    """
    rows = [x.detach().double() for x in features]
    proposals = []
    for own in rows:
        if len(own) >= clusters:
            proposals.append(kmeans(own, clusters, seed, starts)[1].to(own))
    if not proposals:
        sizes = [len(own) for own in rows]
        raise ValueError(
            f"no client has the {clusters} rows that {clusters} clusters need, got {sizes}"
        )
    pooled = torch.cat(proposals)
    for i in range(SERVER_PROPOSALS):
        proposals.append(kmeans(pooled, clusters, seed + i, starts=1)[1].to(pooled))
    centres = torch.stack(proposals)  # (proposals, clusters, width)
    distances = torch.zeros(())
    for _ in range(MAX_ROUNDS):
        replies = [summarise(own, centres) for own in rows]
        sums = torch.stack([reply[0] for reply in replies]).sum(0)
        counts = torch.stack([reply[1] for reply in replies]).sum(0)[..., None]
        distances = torch.stack([reply[2] for reply in replies]).sum(0)
        before = centres
        # A cluster without rows stays where it is.
        centres = torch.where(counts > 0, sums / counts.clamp(min=1), centres)
        if torch.allclose(centres, before, rtol=0, atol=1e-9):
            break
    best = centres[int(distances.argmin())]
    return [torch.cdist(own, best).argmin(-1).cpu() for own in rows], best.cpu()


def summarise(rows: Tensor, centres: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What a client sends in a round of Lloyd's algorithm.

    Args:
        rows: its own, (n, width).
        centres: (proposals, clusters, width).
    Returns: by proposal the sum of the rows nearest to each centre (proposals, clusters, width),
        their number (proposals, clusters), and the sum of all rows' squared distances to their
        nearest centre (proposals,).

    >>> rows = torch.tensor([[0.0], [1.0], [5.0]])
    >>> sums, counts, distance = summarise(rows, torch.tensor([[[0.0], [4.0]]]))
    >>> sums.flatten().tolist(), counts.flatten().tolist(), distance.tolist()
    ([1.0, 5.0], [2.0, 1.0], [2.0])
    """
    distances = torch.cdist(rows.expand(len(centres), -1, -1), centres).square()
    nearest, assigned = distances.min(-1)  # (proposals, n)
    members = torch.zeros_like(distances).scatter_(-1, assigned[..., None], 1.0)
    return members.mT @ rows, members.sum(1), nearest.sum(-1)
