"""The losses that align one model's representations with its peers', by name."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from unalike.losses.contrastive import gramian_loss, pairwise_loss
from unalike.losses.muscle import muscle_loss
from unalike.losses.sampled import muscle_sampled


def anchored_loss(
    name: Literal["muscle", "pairwise", "gramian"],
    z: Tensor,
    peers: Sequence[Tensor],
    temperature: float | Tensor,
    lower_temperature: float | Tensor,
    draws: Tensor | None = None,
) -> Tensor:
    """The loss of that name, a scalar.

    Args:
        name: of the loss.
        z: the anchor's representations, (B, d).
        peers: those of M peers, (B, d) each.
        temperature, lower_temperature: numbers, or matrices over the anchor and its peers, of which
            the pairwise loss uses the anchor's row and the Gramian loss its mean.
        draws: (M, B, K) uniform random numbers; with them the Muscle loss is estimated.

    >>> import torch
    >>> round(anchored_loss("pairwise", torch.eye(4), [torch.eye(4)] * 2, 0.1, 0.1).item(), 3)
    0.0
    """
    if draws is not None:
        return muscle_sampled(z, peers, draws, temperature, lower_temperature)
    if name == "muscle":
        return muscle_loss(z, peers, temperature, lower_temperature)
    per_peer = temperature[0, 1:] if isinstance(temperature, Tensor) else temperature
    if name == "pairwise":
        return pairwise_loss(z, peers, per_peer)
    return gramian_loss(z, peers, per_peer.mean() if isinstance(per_peer, Tensor) else per_peer)
