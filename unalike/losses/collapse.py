"""A simplex of prototypes, losses that draw class features to it, and how far features have collapsed. Knows no clients or models.

K classes, d channels. w (K, d) are the prototypes, f (B, K, d) one feature a class and sample, y (B, K) labels: 1 present, 0 absent,
anything below 0 or NaN unknown. Losses are sums over a sample's classes, means over the batch, as in FedNCA.
"""

import torch
from torch import Tensor
from torch.nn.functional import normalize


def simplex_etf(classes: int, width: int) -> Tensor:
    """K unit vectors as far apart as can be, (K, d) float64: sqrt(K / (K - 1)) (I - 11^T / K), then zeros; cosines are -1 / (K - 1).

    >>> simplex_etf(2, 3)
    tensor([[ 0.7071, -0.7071,  0.0000],
            [-0.7071,  0.7071,  0.0000]], dtype=torch.float64)
    """
    if classes < 2:
        raise ValueError(f"a simplex of prototypes needs 2 classes or more, got {classes}")
    if width < classes:
        raise ValueError(
            f"{classes} classes need {classes} channels or more to be as far apart as can be, the features have {width}: "
            "widen the encoder"
        )
    simplex = (classes / (classes - 1)) ** 0.5 * (
        torch.eye(classes, dtype=torch.float64) - 1 / classes
    )
    return torch.cat([simplex, simplex.new_zeros(classes, width - classes)], 1)


def rejection(logits: Tensor, y: Tensor, margin: float = 0.3) -> Tensor:
    """The feature of an absent class should look like no class: a scalar.

    logits (B, K, K), entry (b, k, j) how much the feature for class k of sample b looks like class j. Of each absent class the largest
    logit counts, and of the batch only as many as there are present ones, the largest: max(sigmoid - margin, 0).
    """
    _check(logits, y)
    largest = logits.amax(-1).sigmoid()  # (B, K)
    hardest = torch.where(y == 0, largest, 0.0).flatten().sort(descending=True).values
    counted = torch.arange(len(hardest), device=y.device) < (y == 1).sum()
    return ((hardest - margin).clamp(min=0) * counted).sum() / len(y)


def prototype_contrast(f: Tensor, w: Tensor, y: Tensor, temperature: float = 0.07) -> Tensor:
    """The feature of a present class should be nearer to its own prototype than to others: a scalar, InfoNCE with prototypes.

    >>> w = simplex_etf(3, 3)
    >>> bool(prototype_contrast(w[None], w, torch.ones(1, 3)) < 1e-8)
    True
    """
    _check(f, y)
    cosines = normalize(f, dim=-1) @ normalize(w.to(f.dtype), dim=-1).mT  # (B, K, K)
    costs = -(cosines / temperature).log_softmax(-1).diagonal(dim1=-2, dim2=-1)  # (B, K)
    return (costs * (y == 1)).sum() / len(y)


def collapse(f: Tensor, w: Tensor, y: Tensor) -> dict[str, float]:
    """How near features of present classes are to neural collapse (Papyan 2020); not a loss.

    `spread`: mean squared distance from the class mean over that of class means from their mean; 0 is full collapse. `alignment`: mean
    cosine of class means to their prototypes. What is undefined is left out: both without a present label, spread with one class.
    """
    _check(f, y)
    present = (y == 1).to(f.dtype)  # (B, K)
    count = present.sum(0)
    seen = count > 0
    if not seen.any():
        return {}
    means = torch.einsum("bk,bkd->kd", present, f) / count.clamp(min=1)[:, None]  # (K, d)
    within = ((f - means).square().sum(-1) * present).sum(0) / count.clamp(min=1)  # (K,)
    between = (means[seen] - means[seen].mean(0)).square().sum(-1).mean()
    told = {
        "alignment": torch.nn.functional.cosine_similarity(means, w.to(f.dtype), dim=-1)[seen]
        .mean()
        .item()
    }
    if seen.sum() > 1 and between > 0:
        told["spread"] = (within[seen].mean() / between).item()
    return told


def _check(given: Tensor, y: Tensor) -> None:
    if given.ndim != 3 or y.shape != given.shape[:2]:
        raise ValueError(
            f"class features and logits are (B, K, ...) for labels (B, K), got {tuple(given.shape)} and {tuple(y.shape)}"
        )
