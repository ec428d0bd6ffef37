"""The Muscle loss of many peers, estimated from some of their combinations.

The exact sum has B^M terms (losses/muscle.py), far too many for M = 9 and B = 32. Its M variables
are drawn one after another, each by its similarity to the anchor and to those drawn before, and
each combination is weighted by the product of the sums it was drawn from (sequential importance
sampling). The mean weight estimates the sum without bias; its logarithm, the loss, has a bias that
shrinks as 1 / draws. `unalike bench muscle-sampled` measures both.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from unalike.losses.contrastive import check_rows
from unalike.losses.muscle import Temperature, _inverse


def muscle_sampled(
    z: Tensor,
    peers: Sequence[Tensor],
    draws: Tensor,
    temperature: Temperature = 0.2,
    lower_temperature: Temperature = 0.15,
) -> Tensor:
    """An estimate of `muscle_loss`, a scalar; time and memory grow as M^2 B^2 times the draws.

    The gradient is that of the similarities in the combinations drawn, by their weights.

    Args:
        z, peers, temperature, lower_temperature: as in `muscle_loss`.
        draws: (M, B, K) uniform random numbers: K combinations per anchor.

    >>> z, *peers = torch.randn(4, 5, 8).double()
    >>> from unalike.losses import muscle_loss
    >>> bool((muscle_sampled(z, peers, torch.rand(3, 5, 4000)) - muscle_loss(z, peers)).abs() < 0.2)
    True
    """
    check_rows(z, peers)
    if draws.ndim != 3 or draws.shape[:2] != (len(peers), len(z)):
        raise ValueError(
            f"draws are (peers, rows, combinations), here ({len(peers)}, {len(z)}, any), "
            f"got {tuple(draws.shape)}."
        )
    per_peer, gamma = _inverse(temperature, lower_temperature, len(peers), z.device)
    dtype = torch.promote_types(z.dtype, torch.float32)
    per_peer, gamma, uniform = per_peer.to(dtype), gamma.to(dtype), draws.to(z.device, dtype)
    anchor = normalize(z.to(dtype), dim=-1)
    rows = [normalize(peer.to(dtype), dim=-1) for peer in peers]
    weight = positive = torch.zeros((), dtype=dtype, device=z.device)  # log, will be (B, K)
    earlier: list[Tensor] = []  # rows drawn of the peers before, (B, K)
    for m, row in enumerate(rows):
        unary = per_peer[m] * (anchor @ row.mT)  # (B, B)
        logits, own = unary[:, None, :], unary.diagonal()
        for k, chosen in enumerate(earlier):
            pair = -gamma[k, m] * (rows[k] @ row.mT)
            logits, own = logits + pair[chosen], own + pair.diagonal()  # (B, K, B), (B,)
        logits = logits.expand(-1, uniform.shape[2], -1)
        spread = logits.detach().log_softmax(-1)
        chosen = (spread.exp().cumsum(-1) < uniform[m][..., None]).sum(-1).clamp(max=len(z) - 1)
        at = chosen[..., None]
        weight = weight + (logits.gather(-1, at) - spread.gather(-1, at))[..., 0]
        positive = positive + own
        earlier.append(chosen)
    return (weight.logsumexp(1) - math.log(uniform.shape[2]) - positive).mean().to(z.dtype)
