"""The losses that draw one model's rows to those of its peers, by their names. Knows nothing of clients or methods."""

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
    """The loss of that name of `z` (B, d) among its peers, M of (B, d): a scalar. Temperatures are numbers, or matrices over the anchor and
    its peers, of which the pairwise loss reads the anchor's row and the Gramian loss its mean. With `draws` the Muscle loss is estimated.

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
