"""k-means with several starts at once, on the CPU or a GPU. Depends on torch only."""

import torch
from torch import Tensor

MAX_DISTANCES = 50_000_000  # distances held in memory at once
MAX_ITERATIONS = 300


def kmeans(
    features: Tensor,
    clusters: int,
    generator_seed: int,
    starts: int = 100,
    centres: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Cluster features by k-means: k-means++ initialisation, then Lloyd's algorithm.

    Args:
        features: (n, width), finite.
        clusters: number of clusters, at most n.
        generator_seed: seed of the initialisation.
        starts: number of initialisations; the one with the lowest sum of squared distances wins.
        centres: (clusters, width), a single start from these; cluster k grows from centre k.
    Returns: cluster of each row (n,) int64, and the centres (clusters, width) float64, on the CPU.
    Raises: ValueError if the arguments do not fit each other.

    >>> rows = torch.tensor([[0.0], [0.1], [5.0]])
    >>> kmeans(rows, 2, generator_seed=0, centres=torch.tensor([[4.0], [1.0]]))[0]
    tensor([1, 1, 0])
    """
    if features.ndim != 2:
        raise ValueError(f"k-means takes features (n, width), got shape {tuple(features.shape)}")
    if not 1 <= clusters <= len(features):
        raise ValueError(
            f"k-means cannot find {clusters} clusters in {len(features)} samples: "
            "lower the clusters or give more samples"
        )
    finite = features.isfinite().all(1)
    if not finite.all():
        raise ValueError(
            f"k-means needs finite features, got NaN or infinity in {int((~finite).sum())} "
            f"of {len(features)} samples"
        )
    if centres is not None and centres.shape != (clusters, features.shape[1]):
        raise ValueError(
            f"k-means starts from {clusters} centres of width {features.shape[1]}, "
            f"got shape {tuple(centres.shape)}"
        )
    x = features.detach().double()
    if centres is not None:
        assignments, final, _ = _lloyd(x, centres.to(x)[None])
        return assignments[0].cpu(), final[0].cpu()
    at_once = max(1, MAX_DISTANCES // (len(x) * clusters))  # starts that fit in memory together
    generator = torch.Generator(x.device).manual_seed(generator_seed)
    chunks = []
    for done in range(0, starts, at_once):
        initial = _plus_plus(x, clusters, min(at_once, starts - done), generator)
        chunks.append(_lloyd(x, initial))
    assignments, final, inertia = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    best = int(inertia.argmin())
    return assignments[best].cpu(), final[best].cpu()


def _plus_plus(x: Tensor, clusters: int, starts: int, generator: torch.Generator) -> Tensor:
    """Draw initial centres (starts, clusters, width) from the rows of x (n, width).

    k-means++: a row is drawn with a probability proportional to its squared distance to the
    nearest centre drawn before.
    """
    first = torch.randint(len(x), (starts,), generator=generator, device=x.device)
    centres = [x[first]]
    lengths = (x * x).sum(-1)[:, None]
    nearest = torch.full((starts, len(x)), torch.inf, dtype=x.dtype, device=x.device)
    while len(centres) < clusters:
        distance = _partial_distances(x, centres[-1][:, None])[..., 0] + lengths  # (n, starts)
        nearest = torch.minimum(nearest, distance.clamp_(min=0).mT)
        weights = nearest + torch.finfo(x.dtype).tiny  # if all rows are equal: any of them
        centres.append(x[torch.multinomial(weights, 1, generator=generator)[:, 0]])
    return torch.stack(centres, 1)


def _lloyd(x: Tensor, centres: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Run Lloyd's algorithm from `centres` (starts, clusters, width) until nothing changes.

    A cluster that loses all rows gets the row farthest from its centre.
    Returns: clusters (starts, n), centres, and sums of squared distances (starts,).
    """
    centres = centres.clone()
    clusters = centres.shape[1]
    assignments = torch.full((len(x), len(centres)), -1, device=x.device)
    running = torch.arange(len(centres), device=x.device)  # starts that have not converged
    lengths = (x * x).sum(-1)[:, None]
    for _ in range(MAX_ITERATIONS):
        distance, nearest = _partial_distances(x, centres[running]).min(-1)  # (n, starts)
        changed = (nearest != assignments[:, running]).any(0)
        assignments[:, running] = nearest
        running = running[changed]
        nearest = nearest[:, changed]
        distance = distance[:, changed]
        if not len(running):
            break
        members, sizes = _membership(nearest, clusters, x)
        if not sizes.all():
            _refill_empty(nearest, distance + lengths, clusters)
            members, sizes = _membership(nearest, clusters, x)
        sums = (members.flatten(1).mT @ x).reshape(*sizes.shape, -1)
        centres[running] = sums / sizes[..., None]
    inertia = (_partial_distances(x, centres).amin(-1) + lengths).clamp(min=0).sum(0)
    return assignments.mT, centres, inertia


def _membership(assignments: Tensor, clusters: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return one-hot clusters (n, starts, clusters) and the cluster sizes (starts, clusters)."""
    members = x.new_zeros(*assignments.shape, clusters).scatter_(-1, assignments[..., None], 1.0)
    return members, members.sum(0)


def _refill_empty(assignments: Tensor, distance: Tensor, clusters: int) -> None:
    """Give each empty cluster the row farthest from its centre, as scikit-learn does.

    Changes `assignments` (n, starts) and `distance` (n, starts).
    """
    sizes = torch.stack([column.bincount(minlength=clusters) for column in assignments.mT])
    for start in (sizes == 0).any(-1).nonzero()[:, 0].tolist():
        for empty in (sizes[start] == 0).nonzero()[:, 0].tolist():
            spare = sizes[start][assignments[:, start]] > 1  # never the last row of a cluster
            row = int(torch.where(spare, distance[:, start], -1.0).argmax())
            sizes[start, assignments[row, start]] -= 1
            sizes[start, empty] += 1
            assignments[row, start] = empty
            distance[row, start] = 0.0


def _partial_distances(x: Tensor, centres: Tensor) -> Tensor:
    """Return squared distances (n, starts, clusters) minus the squared length of each row.

    That length is the same for all centres. One matrix product serves all starts.
    """
    flat = centres.flatten(0, 1)
    distances = torch.addmm((flat * flat).sum(-1), x, flat.mT, alpha=-2)
    return distances.reshape(len(x), *centres.shape[:2])
