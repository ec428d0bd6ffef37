"""Optimal transport from image patches to labels (FedMPT): Sinkhorn's plan.

S (..., patches, labels) are scaled similarities (20 x cosine, as CLIP's), batched over images and
conditions.
"""

import math

import torch
from torch import Tensor


def sinkhorn(cost: Tensor, rows: Tensor, weight: float = 0.2, steps: int = 10) -> Tensor:
    """Plans (..., n, m) from rows of weights `rows` to m columns of equal weight.

    A fixed number of Sinkhorn steps in the log domain; the last one makes the columns exact, and
    the gradient is that of the steps. Ten steps bring costs between 0 and 1 with entropy 0.2 to
    within 1e-5 of the rows; with 0.02, FedMPT's default, they do so for the costs of 49 patches
    whose cosines lie within 0.7 of each other, and wider apart it takes more.

    Args:
        cost: (..., n, m).
        rows: weights (..., n).
        weight: of the entropy.
        steps: Sinkhorn iterations.
    References: Cuturi 2013, https://arxiv.org/abs/1306.0895; FedMPT, eq. 9 and 10

    >>> cost = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    >>> plan = sinkhorn(cost, torch.tensor([0.5, 0.5]), weight=0.05)
    >>> plan.mul(100).round().tolist()
    [[50.0, 0.0], [0.0, 50.0]]
    """
    if cost.ndim < 2 or rows.shape != cost.shape[:-1]:
        raise ValueError(
            "sinkhorn takes costs (..., n, m) and weights (..., n) of rows, "
            f"got {tuple(cost.shape)} and {tuple(rows.shape)}"
        )
    if not weight > 0 or steps < 1:
        raise ValueError(
            "sinkhorn takes an entropy above 0 and 1 step or more, "
            f"got weight {weight:g}, steps {steps}"
        )
    score, log_rows = -cost / weight, rows.log()
    across = torch.zeros_like(score[..., 0, :])  # log v
    for _ in range(steps):
        down = log_rows - (score + across[..., None, :]).logsumexp(-1)  # log u
        across = -math.log(cost.shape[-1]) - (score + down[..., None]).logsumexp(-2)
    return (score + down[..., None] + across[..., None, :]).exp()


def importance(similarity: Tensor, temperature: float = 4.0, certain: bool = False) -> Tensor:
    """Weights of patches (..., patches), which sum to 1: a softmax of entropies (FedMPT eq. 8).

    A patch's entropy is that of its softmax over labels.

    Args:
        similarity: cosines (..., patches, labels).
        temperature: of the softmax over patches.
        certain: whether patches of low entropy weigh more; as printed those of high entropy do.

    >>> similarity = torch.tensor([[0.0, 9.0], [1.0, 1.0]])  # the first patch is sure of its label
    >>> [importance(similarity, 0.1, certain).argmax().item() for certain in (False, True)]
    [1, 0]
    """
    log_share = similarity.log_softmax(-1)
    entropy = -(log_share.exp() * log_share).sum(-1)
    return ((-entropy if certain else entropy) / temperature).softmax(-1)


def transport(
    similarity: Tensor,
    temperature: float = 4.0,
    weight: float = 0.2,
    steps: int = 10,
    certain: bool = False,
) -> Tensor:
    """The plan (..., patches, labels) between patches and labels (FedMPT eq. 7).

    A patch is cheap for a label on which it stands out among the patches.

    Args:
        similarity: cosines (..., patches, labels).
        temperature: of the patches' importance.
        weight: of the plan's entropy.
        steps: Sinkhorn iterations.
        certain: whether patches of low entropy weigh more (`importance`).
    """
    cost = 1 - (similarity / temperature).softmax(-2)
    return sinkhorn(cost, importance(similarity, temperature, certain), weight, steps)
