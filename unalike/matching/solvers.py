"""Transport plans between two sets of uniform weights, from a matrix of costs."""

import math
from typing import Literal

import torch
from torch import Tensor

Solver = Literal["exact", "entropic", "auto", "picked"]
MAX_EXACT = 512  # "auto" solves exactly up to so many points on a side


def solve_plans(costs: Tensor, solver: Solver = "auto", entropy: float = 0.05) -> Tensor:
    """A transport plan for every cost matrix of a batch.

    Args:
        costs: (b, n, m), at least one of each.
        solver: "exact" (needs POT), "entropic", "auto" (exact up to `MAX_EXACT` points), or
            "picked" (an assignment: each point of the smaller side gets one partner).
        entropy: weight of the entropy as a share of the median cost, for entropic plans.
    Returns: plans (b, n, m) whose rows sum to 1 / n and whose columns sum to 1 / m; for "picked"
        every pair has mass 1 / m.
    Raises: ValueError if `costs` has another shape, or POT is missing.

    >>> solve_plans(torch.tensor([[[3.0, 0.0], [0.0, 3.0]]])).tolist()
    [[[0.0, 0.5], [0.5, 0.0]]]
    """
    if costs.dim() != 3 or 0 in costs.shape:
        raise ValueError(
            "expected costs (batch, units, units), one or more of each, "
            f"got shape {tuple(costs.shape)}"
        )
    if solver == "picked":
        return assignment_plans(costs)
    if solver == "entropic" or (solver == "auto" and max(costs.shape[1:]) > MAX_EXACT):
        return entropic_plans(costs, entropy)
    return torch.stack([exact_plan(cost) for cost in costs])


def exact_plan(cost: Tensor) -> Tensor:
    """The cheapest plan (n, m) for costs (n, m), by POT's network simplex.

    It is a vertex of the transport polytope: at most n + m - 1 entries are above 0.
    """
    try:
        import ot
    except ImportError:
        raise ValueError(
            'exact plans need POT: install "unalike[matching]", or take solver entropic'
        ) from None
    n, m = cost.shape
    if n == m == 1:
        return torch.ones_like(cost)
    array = cost.detach().double().cpu().numpy()
    plan = ot.emd([1 / n] * n, [1 / m] * m, array, numItermax=2_000_000)
    return torch.from_numpy(plan).to(cost.device, cost.dtype)


def assignment_plans(costs: Tensor) -> Tensor:
    """The cheapest assignment of each point on the smaller side to one on the larger (Kuhn 1955).

    Points without a partner have no mass. Plans (b, n, m) are returned on the CPU, where they are
    read; a GPU is waited for once, and a second time if two points want the same partner.

    >>> assignment_plans(torch.tensor([[[3.0, 0.0], [1.0, 4.0], [9.0, 9.0]]])).tolist()
    [[[0.0, 0.5], [0.5, 0.0], [0.0, 0.0]]]
    """
    transposed = costs.shape[1] > costs.shape[2]
    wide = costs.detach().mT if transposed else costs.detach()  # rows are the smaller side
    partner = wide.argmin(2).cpu()  # (b, rows)
    # Where all rows want different partners, their nearest ones are the cheapest assignment.
    disputed = [n for n, nearest in enumerate(partner) if len(nearest.unique()) < len(nearest)]
    if disputed:
        from scipy.optimize import linear_sum_assignment

        array = wide.double().cpu().numpy()
        for n in disputed:
            partner[n] = torch.from_numpy(linear_sum_assignment(array[n])[1])
    plan = torch.zeros(wide.shape, dtype=costs.dtype)
    batch, row = torch.arange(len(plan))[:, None], torch.arange(wide.shape[1])
    plan[batch, row, partner] = 1 / costs.shape[2]
    return plan.mT.contiguous() if transposed else plan


def entropic_plans(
    costs: Tensor, entropy: float = 0.05, steps: int = 1000, tolerance: float = 1e-6
) -> Tensor:
    """Entropy-regularised plans by Sinkhorn's iteration in the log domain.

    Cuturi 2013, https://arxiv.org/abs/1306.0895.

    Args:
        costs: (b, n, m).
        entropy: weight of the entropy, as a share of each matrix's median cost.
        steps: most iterations.
        tolerance: relative error of the row sums at which the iteration ends.
    Returns: (b, n, m).
    """
    n, m = costs.shape[1:]
    weight = (entropy * costs.flatten(1).median(1).values).clamp(min=1e-12)[:, None, None]
    score = -costs / weight
    log_u = torch.zeros_like(score[:, :, :1])
    log_v = torch.zeros_like(score[:, :1])
    for step in range(steps):
        log_u = -math.log(n) - (score + log_v).logsumexp(2, keepdim=True)
        log_v = -math.log(m) - (score + log_u).logsumexp(1, keepdim=True)
        if step % 20 == 19:
            rows = (score + log_u + log_v).exp().sum(2) * n
            if float((rows - 1).abs().max()) < tolerance:
                break
    return (score + log_u + log_v).exp()
