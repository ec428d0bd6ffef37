"""Peers weighed by agreement: a client whose public rows look like nobody else's is left out.

Public rows are the same for all clients, so what two clients make of them can be compared, even
where their models, tasks and labels differ:
    kernel    debiased CKA, which is 0 on average for unrelated rows. A client's score is the median
              over the others, relative to the median score of all; below `CUT` it is left out.
    common    where rows are in one space, as representations that are aligned are: how much more
              alike a row and the same row of another client are than a row and other rows. A
              client whose median is negative, while that of most clients is positive, is left out;
              rows with the opposite sign have the same kernel, and pull everyone apart.
    length    also there: a client whose rows are on average more than 10 times as long, or as
              short, as those of the median client is left out. Losses look at directions only, so
              it would pass for a peer, but its own gradients vanish and it learns nothing.
A client's weight is its relative score, at most 1, or 0 where it is left out. Weights are in the
report (`peer_weight`). Those who are not left out count as without the defence, so that it costs
nothing while all are honest.

A method on a public set has the field `robust`; with "agreement" its server uses these weights.
"""

from collections.abc import Mapping
from itertools import combinations
from statistics import median
from typing import Literal

from torch import Tensor
from torch.nn.functional import normalize

from unalike.core.federation import Federation
from unalike.losses.kernels import debiased_cka

PeerRule = Literal["never", "agreement"]
CUT = 0.25  # of the median score: a client below it is left out
LENGTH_RATIO = 10.0  # to the median length of rows: beyond it, either way, a client is left out
OLD_WEIGHT = 0.9  # in the running mean of alignments over the batches of a run
MAX_ROWS = 512  # public rows that are compared


def weighs_peers(fed: Federation) -> bool:
    """Whether the method that is served weighs peers by agreement."""
    return getattr(fed.algorithm, "robust", "never") == "agreement"


def agreement_weights(
    fed: Federation, rows: Mapping[str, Tensor], one_space: bool = False
) -> dict[str, float]:
    """Weight of each client, brought up to date by what the clients sent for the same public rows.

    Args:
        rows: representations or predictions (n, ...) by client.
        one_space: rows of different clients have the same width and are to be alike.
    """
    values = {c: z[:MAX_ROWS].flatten(1).double().cpu() for c, z in rows.items()}
    weights = kernel_weights(fed, {c: z @ z.mT for c, z in values.items()})
    if one_space and len(values) >= 4:
        lengths = {c: float(z.norm(dim=1).mean()) for c, z in values.items()}
        middle = median(lengths.values())
        odd = [c for c, length in lengths.items() if not _is_near(length, middle)]
        weights |= dict.fromkeys(odd, 0.0)
        units = {c: normalize(z, dim=1) for c, z in values.items()}
        margins = {(a, b): _margin(units[a], units[b]) for a, b in combinations(units, 2)}
        scores = _median_scores(fed, "margins", margins, list(units))
        if median(scores.values()) > 0:
            weights = {c: weights[c] if scores[c] >= 0 else 0.0 for c in weights}
    return weights


def kernel_weights(fed: Federation, kernels: Mapping[str, Tensor]) -> dict[str, float]:
    """The same from kernels (n, n) of the clients' public rows."""
    if len(kernels) < 4:  # of three clients, two could be the false ones
        return dict.fromkeys(kernels, 1.0)
    own = {client: kernel.double().cpu() for client, kernel in kernels.items()}
    alignments = {(a, b): float(debiased_cka(own[a], own[b])) for a, b in combinations(own, 2)}
    scores = _median_scores(fed, "alignments", alignments, list(own))
    middle = median(scores.values())
    if middle <= 0:
        return dict.fromkeys(kernels, 1.0)
    weights = {c: min(1.0, score / middle) for c, score in scores.items()}
    return {c: weight if weight >= CUT else 0.0 for c, weight in weights.items()}


def _is_near(length: float, middle: float) -> bool:
    return middle / LENGTH_RATIO <= length <= middle * LENGTH_RATIO


def _margin(z: Tensor, other: Tensor) -> float:
    """Mean similarity of row i and row i, less that of row i and others; rows of length 1."""
    n = len(z)
    similarity = z @ other.mT
    same = similarity.diag().mean()
    return float(same - (similarity.sum() - similarity.diag().sum()) / (n * (n - 1)))


def _median_scores(
    fed: Federation, name: str, pairs: Mapping[tuple[str, str], float], clients: list[str]
) -> dict[str, float]:
    """Median over the others of the running mean of a similarity, for each client.

    Args:
        name: under which running means are kept.
        pairs: similarity now, of each two clients in one order.
    """
    means: dict[str, dict[str, float]] = fed.state.setdefault(name, {})
    for (a, b), now in pairs.items():
        before = means.setdefault(a, {}).get(b, now)
        mean = OLD_WEIGHT * before + (1 - OLD_WEIGHT) * now
        means[a][b] = mean
        means.setdefault(b, {})[a] = mean
    return {c: median(means[c][other] for other in clients if other != c) for c in clients}


def prediction_weights(fed: Federation, predictions: dict[str, Tensor]) -> dict[str, float]:
    """Weights for a mean of predictions; all 1 unless the method weighs peers.

    They are computed once for the same predictions, and logged.
    """
    if not weighs_peers(fed):
        return dict.fromkeys(predictions, 1.0)
    known, weights = fed.scratch.get("agreement", (None, {}))
    if known is not predictions:
        weights = agreement_weights(fed, predictions)
        fed.log_metrics("peer_weight", weights)
        fed.scratch["agreement"] = (predictions, weights)
    return weights
