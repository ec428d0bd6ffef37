"""A simplex of class prototypes, losses towards it, and measures of neural collapse.

K classes, d channels. w (K, d) are prototypes, f (B, K, d) one feature per class and sample, y
(B, K) labels: 1 present, 0 absent, below 0 or NaN unknown. Losses are sums over a sample's classes
and means over the batch, as in FedNCA.
"""

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize


def simplex_etf(classes: int, width: int) -> Tensor:
    """K unit vectors with the largest possible mutual angles (simplex ETF), (K, d) float64.

    sqrt(K / (K - 1)) (I - 11^T / K), padded with zeros; their cosines are -1 / (K - 1).

    Args:
        classes: K, at least 2.
        width: d, at least K - 1.

    >>> simplex_etf(2, 3)
    tensor([[ 0.7071, -0.7071,  0.0000],
            [-0.7071,  0.7071,  0.0000]], dtype=torch.float64)
    """
    if classes < 2:
        raise ValueError(f"a simplex of prototypes needs 2 classes or more, got {classes}")
    if width < classes:
        raise ValueError(
            f"{classes} classes need {classes} channels or more to be as far apart as can be, "
            f"the features have {width}: widen the encoder"
        )
    centred = torch.eye(classes, dtype=torch.float64) - 1 / classes
    simplex = (classes / (classes - 1)) ** 0.5 * centred
    return torch.cat([simplex, simplex.new_zeros(classes, width - classes)], 1)


def rejection(logits: Tensor, y: Tensor, margin: float = 0.3) -> Tensor:
    """The feature of an absent class should look like no class: a scalar.

    The cost of an absent class is max(sigmoid - margin, 0) of its largest logit. Only the largest
    costs of a batch count, as many as it has present classes.

    Args:
        logits: (B, K, K); entry (b, k, j) scores the feature for class k of sample b as class j.
        y: (B, K): 1 present, 0 absent, -1 unknown.
        margin: probability up to which nothing is lost.
    """
    _check(logits, y)
    largest = logits.amax(-1).sigmoid()  # (B, K)
    hardest = torch.where(y == 0, largest, 0.0).flatten().sort(descending=True).values
    counted = torch.arange(len(hardest), device=y.device) < (y == 1).sum()
    return ((hardest - margin).clamp(min=0) * counted).sum() / len(y)


def prototype_contrast(f: Tensor, w: Tensor, y: Tensor, temperature: float = 0.07) -> Tensor:
    """The feature of a present class should be nearest to its own prototype: InfoNCE, a scalar.

    Args:
        f: features (B, K, d), one for each class.
        w: prototypes (K, d).
        y: (B, K): 1 present, 0 absent, -1 unknown.
        temperature: of the softmax over prototypes.

    >>> w = simplex_etf(3, 3)
    >>> bool(prototype_contrast(w[None], w, torch.ones(1, 3)) < 1e-8)
    True
    """
    _check(f, y)
    cosines = normalize(f, dim=-1) @ normalize(w.to(f.dtype), dim=-1).mT  # (B, K, K)
    costs = -(cosines / temperature).log_softmax(-1).diagonal(dim1=-2, dim2=-1)  # (B, K)
    return (costs * (y == 1)).sum() / len(y)


def collapse(f: Tensor, w: Tensor, y: Tensor) -> dict[str, float]:
    """How close features of present classes are to neural collapse; not a loss.

    Args:
        f: features (B, K, d), one for each class.
        w: prototypes (K, d).
        y: (B, K): 1 present, 0 absent, -1 unknown.
    Returns: `spread`, the mean squared distance from the class mean over that of class means from
        their mean (0 is full collapse), and `alignment`, the mean cosine of class means and their
        prototypes. Without a present label neither is defined, with one class `spread` is not: what
        is undefined is left out.
    Reference: Papyan et al. 2020, https://arxiv.org/abs/2008.08186
    """
    _check(f, y)
    present = (y == 1).to(f.dtype)  # (B, K)
    count = present.sum(0)
    occurs = count > 0
    if not occurs.any():
        return {}
    means = torch.einsum("bk,bkd->kd", present, f) / count.clamp(min=1)[:, None]  # (K, d)
    within = ((f - means).square().sum(-1) * present).sum(0) / count.clamp(min=1)  # (K,)
    between = (means[occurs] - means[occurs].mean(0)).square().sum(-1).mean()
    cosines = cosine_similarity(means, w.to(f.dtype), dim=-1)[occurs]
    measures = {"alignment": cosines.mean().item()}
    if occurs.sum() > 1 and between > 0:
        measures["spread"] = (within[occurs].mean() / between).item()
    return measures


def _check(features: Tensor, y: Tensor) -> None:
    if features.ndim != 3 or y.shape != features.shape[:2]:
        raise ValueError(
            "class features and logits are (B, K, ...) for labels (B, K), "
            f"got {tuple(features.shape)} and {tuple(y.shape)}"
        )
