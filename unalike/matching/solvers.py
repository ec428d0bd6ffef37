"""Transport plans between two sets of equal weights, from what it costs to bring one to the other. Knows matrices only."""

import math
from typing import Literal

import torch
from torch import Tensor

Solver = Literal["exact", "entropic", "auto", "picked"]
LARGEST = 512  # auto: up to so many on a side a plan is exact


def plans(costs: Tensor, solver: Solver = "auto", share: float = 0.05) -> Tensor:
    """A plan for each matrix of costs (b, n, m): rows sum to 1 / n, columns to 1 / m; if picked, those that have a partner to 1 / m.

    >>> plans(torch.tensor([[[3.0, 0.0], [0.0, 3.0]]])).tolist()
    [[[0.0, 0.5], [0.5, 0.0]]]
    """
    if costs.dim() != 3 or 0 in costs.shape:
        raise ValueError(
            f"plans takes costs (clients, units, units), one or more of each, got {tuple(costs.shape)}"
        )
    if solver == "picked":
        return picked(costs)
    if solver == "entropic" or (solver == "auto" and max(costs.shape[1:]) > LARGEST):
        return entropic(costs, share)
    return torch.stack([exact(cost) for cost in costs])


def exact(cost: Tensor) -> Tensor:
    """The cheapest plan (n, m), a vertex: no more than n + m - 1 entries are above 0 (POT's network simplex)."""
    try:
        import ot
    except ImportError:
        raise ValueError(
            'exact plans need POT: install "unalike[matching]", or take solver entropic'
        ) from None
    n, m = cost.shape
    if n == m == 1:
        return torch.ones_like(cost)
    given = cost.detach().double().cpu().numpy()
    found = ot.emd([1 / n] * n, [1 / m] * m, given, numItermax=2_000_000)
    return torch.from_numpy(found).to(cost.device, cost.dtype)


def picked(costs: Tensor) -> Tensor:
    """Each of the fewer with one of the more, the cheapest way, and the rest with nobody: 1 / m for every pair (Kuhn 1955). A GPU is waited
    for once, where two want the same twice, and plans (b, n, m) lie beside the processor, which reads them.

    >>> picked(torch.tensor([[[3.0, 0.0], [1.0, 4.0], [9.0, 9.0]]])).tolist()
    [[[0.0, 0.5], [0.5, 0.0], [0.0, 0.0]]]
    """
    few = costs.detach() if costs.shape[1] <= costs.shape[2] else costs.detach().mT
    nearest, own = few.argmin(2).cpu(), torch.arange(few.shape[1])
    disputed = [
        len(each.unique()) < len(each) for each in nearest
    ]  # otherwise nobody wants another's, and nothing can be cheaper
    if any(disputed):
        from scipy.optimize import linear_sum_assignment

        given = few.double().cpu().numpy()
        for n in (n for n, so in enumerate(disputed) if so):
            nearest[n] = torch.from_numpy(linear_sum_assignment(given[n])[1])
    plan = torch.zeros(few.shape, dtype=costs.dtype)
    plan[torch.arange(len(plan))[:, None], own, nearest] = 1 / costs.shape[2]
    return plan if few.shape == costs.shape else plan.mT.contiguous()


def entropic(costs: Tensor, share: float = 0.05, steps: int = 1000, within: float = 1e-6) -> Tensor:
    """Plans (b, n, m) with entropy of weight `share` of each median cost, by Sinkhorn's steps in logarithms (Cuturi 2013)."""
    n, m = costs.shape[1:]
    weight = (share * costs.flatten(1).median(1).values).clamp(min=1e-12)[:, None, None]
    score = -costs / weight
    down, across = torch.zeros_like(score[:, :, :1]), torch.zeros_like(score[:, :1])
    for step in range(steps):
        down = -math.log(n) - (score + across).logsumexp(2, keepdim=True)
        across = -math.log(m) - (score + down).logsumexp(1, keepdim=True)
        if (
            step % 20 == 19
            and float(((score + down + across).exp().sum(2) * n - 1).abs().max()) < within
        ):
            break
    return (score + down + across).exp()
