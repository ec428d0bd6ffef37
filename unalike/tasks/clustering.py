"""Groups to be found without labels, which only score them. Knows nothing of where features come from or how they are learnt."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from unalike.tasks.classification import UNKNOWN
from unalike.tasks.task import Task, check_whole

ROOM = 50_000_000  # distances that k-means may hold at once


@dataclass(frozen=True)
class Clustering(Task):
    """Output (B,) the group of each sample, or (B, K) scores, the highest being its group; labels (B,) whole numbers, -1 where unknown.

    Groups have no order: they are matched with classes only to be scored.
    """

    name: ClassVar[str] = "clustering"
    metric: ClassVar[str] = "acc"
    labelled: ClassVar[bool] = False

    def head(self, width: int) -> nn.Module:
        """From features (B, width) to scores (B, K): the matrix W of AFMCC eq. 4."""
        return nn.Linear(width, len(self.labels), bias=False)

    def loss(self, output: Tensor, y: Tensor) -> NoReturn:
        raise ValueError(
            "clustering has no labels to learn from: use a method that brings its own loss, such as afmcc"
        )

    def imitate(self, output: Tensor, teacher: Tensor) -> NoReturn:
        raise ValueError(
            "clustering has no teacher to imitate, groups have no order: use a method that brings its own loss, such as afmcc"
        )

    def meter(self) -> "ClusteringMeter":
        return ClusteringMeter()

    def check(self, y: Tensor) -> None:
        check_whole(y, self.name, ("n",))
        wrong = y[(y < UNKNOWN) | (y >= len(self.labels))]
        if len(wrong):
            raise ValueError(
                f"label {int(wrong[0])} does not fit {len(self.labels)} clusters: labels run from 0 to "
                f"{len(self.labels) - 1}, {UNKNOWN} where unknown"
            )


class ClusteringMeter:
    """Keeps group and truth of every sample: how groups are best matched with classes is known only at the end."""

    def __init__(self):
        self.groups, self.truth = [], []

    def add(self, output: Tensor, y: Tensor) -> None:
        output = output.detach()
        self.groups.append((output.argmax(-1) if output.ndim == 2 else output).cpu())
        self.truth.append(y.cpu())

    def result(self) -> dict[str, float]:
        empty = torch.zeros(0, dtype=torch.int64)
        return clustering_scores(torch.cat([empty, *self.groups]), torch.cat([empty, *self.truth]))


def clustering_scores(predicted: Tensor, y: Tensor) -> dict[str, float]:
    """How well groups agree with classes, in percent: acc, nmi, ari. Both (n,) whole numbers; samples with label -1 count for nothing, and
    where there are no others nothing can be said.

    acc is the share of samples right under the best matching of groups with classes, one to one (Hungarian); nmi is normalised by the
    mean of the two entropies; ari is 0 by chance.

    >>> clustering_scores(torch.tensor([2, 2, 0, 0]), torch.tensor([0, 0, 1, 1]))
    {'acc': 100.0, 'nmi': 100.0, 'ari': 100.0}
    """
    from scipy.optimize import linear_sum_assignment
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
    from sklearn.metrics.cluster import contingency_matrix

    if predicted.ndim != 1 or predicted.shape != y.shape or predicted.is_floating_point():
        raise ValueError(
            f"groups and labels are whole numbers, one a sample, got {tuple(predicted.shape)} {predicted.dtype} "
            f"and {tuple(y.shape)} {y.dtype}"
        )
    predicted, y = predicted.cpu(), y.cpu()
    known = y != UNKNOWN
    groups, truth = predicted[known].numpy(), y[known].numpy()
    if not len(truth):
        return {}
    together = contingency_matrix(truth, groups)  # classes x groups
    return {
        "acc": 100
        * float(together[linear_sum_assignment(together, maximize=True)].sum() / len(truth)),
        "nmi": 100 * float(normalized_mutual_info_score(truth, groups)),
        "ari": 100 * float(adjusted_rand_score(truth, groups)),
    }


def kmeans(
    features: Tensor,
    clusters: int,
    generator_seed: int,
    starts: int = 100,
    centres: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Groups (n,) int64 and their centres (clusters, width) float64 for features (n, width): the best of `starts` runs, all at once.

    Where `centres` are given there is one run, from there, and group k is the one that grew from centre k.

    >>> kmeans(torch.tensor([[0.0], [0.1], [5.0]]), 2, generator_seed=0, centres=torch.tensor([[4.0], [1.0]]))[0]
    tensor([1, 1, 0])
    """
    if features.ndim != 2:
        raise ValueError(f"k-means takes features (n, width), got shape {tuple(features.shape)}")
    if not 1 <= clusters <= len(features):
        raise ValueError(
            f"k-means cannot find {clusters} clusters in {len(features)} samples: lower the clusters or give more samples"
        )
    if not (finite := features.isfinite().all(1)).all():
        raise ValueError(
            f"k-means needs finite features, got NaN or infinity in {int((~finite).sum())} of {len(features)} samples"
        )
    if centres is not None and centres.shape != (clusters, features.shape[1]):
        raise ValueError(
            f"k-means starts from {clusters} centres of width {features.shape[1]}, got shape {tuple(centres.shape)}"
        )
    x = features.detach().double()
    if centres is not None:
        begun = centres.to(x)[None]
        groups, ends, _ = _lloyd(x, begun)
        return groups[0].cpu(), ends[0].cpu()
    at_once = max(1, ROOM // (len(x) * clusters))  # starts that fit in memory together
    generator = torch.Generator(x.device).manual_seed(generator_seed)
    found = [
        _lloyd(x, _spread(x, clusters, min(at_once, starts - done), generator))
        for done in range(0, starts, at_once)
    ]
    groups, ends, spreads = (torch.cat(parts) for parts in zip(*found, strict=True))
    best = int(spreads.argmin())
    return groups[best].cpu(), ends[best].cpu()


def _spread(x: Tensor, clusters: int, starts: int, generator: torch.Generator) -> Tensor:
    """First centres (starts, clusters, width): rows drawn with chances by their squared distance to those drawn before (k-means++)."""
    picked = [x[torch.randint(len(x), (starts,), generator=generator, device=x.device)]]
    nearest = torch.full((starts, len(x)), torch.inf, dtype=x.dtype, device=x.device)
    while len(picked) < clusters:
        nearest = torch.minimum(
            nearest,
            (_nearness(x, picked[-1][:, None])[..., 0] + (x * x).sum(-1)[:, None]).clamp_(min=0).mT,
        )
        chances = nearest + torch.finfo(x.dtype).tiny  # all rows alike: any of them
        picked.append(x[torch.multinomial(chances, 1, generator=generator)[:, 0]])
    return torch.stack(picked, 1)


def _lloyd(x: Tensor, centres: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Groups (starts, n), centres and sum of squared distances (starts,) where they settle; a group without rows gets the farthest one."""
    centres = centres.clone()
    groups = torch.full((len(x), len(centres)), -1, device=x.device)
    moving = torch.arange(len(centres), device=x.device)  # starts that have not settled
    lengths = (x * x).sum(-1)[:, None]
    for _ in range(300):
        far, found = _nearness(x, centres[moving]).min(-1)  # (n, starts)
        moved = (found != groups[:, moving]).any(0)
        groups[:, moving] = found
        moving, found, far = moving[moved], found[:, moved], far[:, moved]
        if not len(moving):
            break
        belongs, sizes = _belongs(found, centres.shape[1], x)
        if not sizes.all():
            _fill(found, far + lengths, centres.shape[1])
            belongs, sizes = _belongs(found, centres.shape[1], x)
        centres[moving] = (belongs.flatten(1).mT @ x).reshape(*sizes.shape, -1) / sizes[..., None]
    return groups.mT, centres, (_nearness(x, centres).amin(-1) + lengths).clamp(min=0).sum(0)


def _belongs(groups: Tensor, clusters: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """(n, starts, clusters): 1 where a row is in a group, else 0; and how many rows each has (starts, clusters)."""
    belongs = x.new_zeros(*groups.shape, clusters).scatter_(-1, groups[..., None], 1.0)
    return belongs, belongs.sum(0)


def _fill(groups: Tensor, far: Tensor, clusters: int) -> None:
    """Groups (n, starts) that lost all their rows get the rows farthest from their centres, as in scikit-learn. Changes `groups`."""
    sizes = torch.stack([own.bincount(minlength=clusters) for own in groups.mT])
    for start in (sizes == 0).any(-1).nonzero()[:, 0].tolist():
        for empty in (sizes[start] == 0).nonzero()[:, 0].tolist():
            spare = sizes[start][groups[:, start]] > 1  # never the last row of another group
            row = int(torch.where(spare, far[:, start], -1.0).argmax())
            sizes[start, groups[row, start]] -= 1
            sizes[start, empty] += 1
            groups[row, start], far[row, start] = empty, 0.0


def _nearness(x: Tensor, centres: Tensor) -> Tensor:
    """Squared distances (n, starts, clusters) less the squared length of each row, which is the same to all centres."""
    flat = centres.flatten(0, 1)
    return torch.addmm((flat * flat).sum(-1), x, flat.mT, alpha=-2).reshape(
        len(x), *centres.shape[:2]
    )  # one product for all starts


def federated_scores(
    features: Sequence[Tensor],
    labels: Sequence[Tensor],
    clusters: int,
    seed: int,
    starts: int = 100,
    normalise: bool = True,
) -> dict[str, Any]:
    """Scores of all clients' features by the two usual protocols: `acc`, `nmi`, `ari`, and the same under `joint`.

    `labels`, one (n,) a client; the rest as in `federated_groups`.
    """
    if not features or [len(each) for each in features] != [len(each) for each in labels]:
        raise ValueError(
            f"scores need as many labels as rows for each of one client or more, got rows {[len(each) for each in features]} "
            f"and labels {[len(each) for each in labels]}"
        )
    groups, _, joint = federated_groups(features, clusters, seed, starts, normalise)
    y = torch.cat([each.cpu() for each in labels])
    return {**clustering_scores(torch.cat(groups), y), "joint": clustering_scores(joint, y)}


def federated_groups(
    features: Sequence[Tensor], clusters: int, seed: int, starts: int = 100, normalise: bool = True
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Groups of all clients' rows, one (n,) a client, their centres (clusters, width), and the groups of all rows taken together.

    `features`, one (n, width) a client; rows are brought to length 1 unless `normalise` is False. The first follow FMCSC (Chen et al.
    2024), and AFMCC with it: k-means on the first client's features, its centres start k-means on each other client's. The second is
    k-means on everyone's features together, which no server could do without seeing them.
    """
    rows = [
        normalize(each.detach().double(), dim=-1) if normalise else each.detach().double()
        for each in features
    ]
    groups: list[Tensor] = []
    centres: list[Tensor] = []
    for client, own in enumerate(rows):
        try:
            found, around = kmeans(own, clusters, seed, starts, centres[0] if centres else None)
        except ValueError as problem:
            raise ValueError(f"client {client}: {problem}") from None
        groups.append(found)
        centres.append(around)
    return groups, centres, kmeans(torch.cat(rows), clusters, seed, starts)[0]
