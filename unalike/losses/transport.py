"""What an image says of each label, by carrying patches to labels: Sinkhorn's plan and what is read from it. Knows no encoders.

S (..., patches, labels): similarities, scaled (20 x cosine, as CLIP's are). Batched over whatever comes before: images, conditions.
"""

import math

import torch
from torch import Tensor


def sinkhorn(cost: Tensor, rows: Tensor, weight: float = 0.2, steps: int = 10) -> Tensor:
    """Plans (..., n, m) from rows of given weights `rows` (..., n) to m columns of equal weight, with entropy of weight `weight`.

    A fixed number of steps in logarithms (Cuturi 2013; FedMPT, eq. 9 and 10); the last makes the columns right, and the gradient is that
    of the steps. Ten bring costs between 0 and 1 with entropy 0.2 to within 1e-5 of the rows; with 0.02, FedMPT's default, they do so for
    the costs of 49 patches whose cosines lie within 0.7 of each other, and wider apart it takes more.

    >>> plan = sinkhorn(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([0.5, 0.5]), weight=0.05)
    >>> plan.mul(100).round().tolist()
    [[50.0, 0.0], [0.0, 50.0]]
    """
    if cost.ndim < 2 or rows.shape != cost.shape[:-1]:
        raise ValueError(
            f"sinkhorn takes costs (..., n, m) and weights (..., n) of rows, got {tuple(cost.shape)} and {tuple(rows.shape)}"
        )
    if not weight > 0 or steps < 1:
        raise ValueError(
            f"sinkhorn takes an entropy above 0 and 1 step or more, got weight {weight:g}, steps {steps}"
        )
    score, given = -cost / weight, rows.log()
    across = torch.zeros_like(score[..., 0, :])  # log v
    for _ in range(steps):
        down = given - (score + across[..., None, :]).logsumexp(-1)  # log u
        across = -math.log(cost.shape[-1]) - (score + down[..., None]).logsumexp(-2)
    return (score + down[..., None] + across[..., None, :]).exp()


def importance(similarity: Tensor, temperature: float = 4.0) -> Tensor:
    """How much each patch counts (..., patches), sums to 1: a softmax of the entropy of what it says of the labels (eq. 8)."""
    told = similarity.log_softmax(-1)
    entropy = -(told.exp() * told).sum(-1)
    return (entropy / temperature).softmax(-1)


def transport(
    similarity: Tensor, temperature: float = 4.0, weight: float = 0.2, steps: int = 10
) -> Tensor:
    """The plan between patches and labels, where a patch is the cheaper for a label the more it stands out among the patches (eq. 7)."""
    cost = 1 - (similarity / temperature).softmax(-2)
    return sinkhorn(cost, importance(similarity, temperature), weight, steps)
