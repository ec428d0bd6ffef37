"""Contrast between rows that show the same sample: in pairs, or by the volume they span. Knows nothing of clients or models."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize


def infonce(z: Tensor, other: Tensor, temperature: float | Tensor = 0.2) -> Tensor:
    """Row i of `z` should find row i of `other`. Both (B, d), any length; returns a scalar, the mean over rows.

    >>> round(infonce(torch.eye(4), torch.eye(4), temperature=0.1).item(), 3)
    0.0

    van den Oord 2018, eq. 4; FedMuscle, eq. 1.
    """
    if z.ndim != 2 or z.shape != other.shape:
        raise ValueError(
            f"infonce pairs rows: both sides need one shape (B, d), got {tuple(z.shape)} and {tuple(other.shape)}."
        )
    likeness = normalize(z, dim=-1) @ normalize(other, dim=-1).mT / temperature  # (B, B)
    return -likeness.log_softmax(-1).diagonal().mean()


def nt_xent(z: Tensor, other: Tensor, temperature: float | Tensor = 0.5) -> Tensor:
    """Each of the 2B rows of `z` and `other` should find its partner, row i of the one and row i of the other, among all the others.

    Both (B, d), any length; returns a scalar, the mean over rows (Chen 2020, eq. 1).

    >>> round(nt_xent(torch.eye(4), torch.eye(4), temperature=0.1).item(), 3)
    0.0
    """
    if z.ndim != 2 or z.shape != other.shape:
        raise ValueError(
            f"nt_xent pairs rows: both sides need one shape (B, d), got {tuple(z.shape)} and {tuple(other.shape)}."
        )
    if not len(z):
        return (z * other).sum()
    rows = normalize(torch.cat([z, other]), dim=-1)
    itself = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
    likeness = (
        (rows @ rows.mT / temperature).masked_fill(itself, -torch.inf).log_softmax(-1)
    )  # (2B, 2B)
    return -torch.cat([likeness.diagonal(len(z)), likeness.diagonal(-len(z))]).mean()


def pairwise_loss(
    z: Tensor, peers: Sequence[Tensor], temperature: float | Sequence[float] | Tensor = 0.2
) -> Tensor:
    """Row i of `z` should find row i of every peer, one peer at a time: InfoNCE summed over peers, mean over rows.

    z (B, d); peers, a list of M (B, d); temperature, one number or M of them. Returns a scalar.

    >>> z = torch.eye(4)
    >>> bool(pairwise_loss(z, [z, -z]) == infonce(z, z) + infonce(z, -z))
    True

    FedMuscle, section 4.1: what the Muscle loss becomes when peers are taken as independent of each other (eq. 16).
    """
    check_rows(z, peers)
    temperatures = (
        z.new_full((), temperature)
        if isinstance(temperature, int | float)
        # a GPU fills, and does not wait
        else torch.as_tensor(temperature, dtype=z.dtype, device=z.device)
    )
    if temperatures.shape not in ((), (len(peers),)):
        raise ValueError(
            f"temperature is one number or one per peer ({len(peers)}), got shape {tuple(temperatures.shape)}."
        )
    return torch.stack(
        [
            infonce(z, peer, t)
            for peer, t in zip(peers, temperatures.expand(len(peers)), strict=True)
        ]
    ).sum()


def relaxed_contrast(
    z: Tensor, labels: Tensor, temperature: float = 0.05, limit: float = 0.7
) -> Tensor:
    """The least alike sample of its kind should be nearer than the two most alike of other kinds, and none of its kind nearer than `limit`.

    z (B, d), any length; labels (B, K) of truth values. Two are of a kind where they share more than half of the labels they have
    together, of other kinds where they share none. Returns a scalar: -log softmax over those three, mean over samples that have both,
    and (cosine - limit) / temperature, mean over pairs of a kind beyond the limit (Seo 2024, in our reading).

    >>> round(relaxed_contrast(torch.eye(4), torch.eye(2).repeat_interleave(2, 0) > 0, temperature=1.0).item(), 3)     # all at one distance
    1.099
    """
    if z.ndim != 2 or labels.ndim != 2 or len(z) != len(labels):
        raise ValueError(
            f"every row has labels: (B, d) and (B, K), got {tuple(z.shape)} and {tuple(labels.shape)}."
        )
    rows, sets = normalize(z, dim=-1), labels.to(z.dtype)
    cosines, shared, many = rows @ rows.mT, sets @ sets.mT, sets.sum(1)
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    group_key = (2 * shared > many[:, None] + many - shared) & ~itself
    foreign = (shared == 0) & (many[:, None] > 0) & (many > 0)
    far = cosines.masked_fill(~group_key, 2.0).amin(1, keepdim=True)  # (B, 1)
    near = cosines.masked_fill(~foreign, -1e3).topk(min(2, len(z)), 1).values  # (B, 2)
    costs = -(torch.cat([far, near], 1) / temperature).log_softmax(1)[:, 0]
    both, close = group_key.any(1) & foreign.any(1), group_key & (cosines > limit)
    push = ((cosines - limit) / temperature * close).sum() / close.sum().clamp(min=1)
    return (costs * both).sum() / both.sum().clamp(min=1) + push


def gramian_loss(z: Tensor, peers: Sequence[Tensor], temperature: float | Tensor = 0.2) -> Tensor:
    """Row i of `z` should span less volume with row i of all peers than with row j of all peers, j != i.

    z (B, d); peers, a list of M (B, d); all normalised here. Returns a scalar, the mean over rows of
    -log softmax_j(-Vol(z_i, z_j^1, ..., z_j^M) / temperature) at j = i. With M + 1 > d every volume is zero and so is the gradient.

    >>> round(gramian_loss(torch.eye(4), [torch.eye(4)], temperature=0.1).item(), 3)
    0.0

    FedMuscle, appendix L (Cicchetti et al. 2025, one direction: z is the anchor).
    """
    check_rows(z, peers)
    anchor = normalize(z.double(), dim=-1)
    stack = normalize(torch.stack(list(peers), 1).double(), dim=-1)  # (B, M, d)
    cosines = torch.einsum("id,jmd->ijm", anchor, stack)  # (B, B, M)
    # det [[1, c], [c, K]] = det K - c . adj(K) c: Schur's complement multiplied out, so that K may be singular
    determinant, adjugate = _determinant_and_adjugate(stack @ stack.mT)  # (B,), (B, M, M)
    squared = determinant - torch.einsum("ijm,jmk,ijk->ij", cosines, adjugate, cosines)
    volume = squared.clamp(
        min=1e-12
    ).sqrt()  # the floor keeps the slope of sqrt finite; below it the slope is zero
    return -(-volume / temperature).log_softmax(-1).diagonal().mean().to(z.dtype)


def check_rows(z: Tensor, peers: Sequence[Tensor]) -> None:
    """Say what is wrong when `peers` is not a list of at least one (B, d), the shape of `z`."""
    if len(peers) == 0:
        raise ValueError("an anchor needs at least one peer to be compared with, got none.")
    shapes = [tuple(peer.shape) for peer in peers]
    if z.ndim != 2 or any(shape != tuple(z.shape) for shape in shapes):
        raise ValueError(
            f"the anchor and all its peers need one shape (B, d), got {tuple(z.shape)} and {shapes}."
        )


def _determinant_and_adjugate(square: Tensor) -> tuple[Tensor, Tensor]:
    """(..., M, M) -> (...,), (..., M, M), polynomials of the entries and so smooth everywhere (Faddeev and LeVerrier)."""
    size = square.shape[-1]
    eye = torch.eye(size, dtype=square.dtype, device=square.device)
    partial, coefficient = eye.expand_as(square), -_trace(square)
    for k in range(2, size + 1):
        partial = square @ partial + coefficient[..., None, None] * eye
        coefficient = -_trace(square @ partial) / k
    return (-1) ** size * coefficient, (-1) ** (size - 1) * partial


def _trace(square: Tensor) -> Tensor:
    return square.diagonal(dim1=-2, dim2=-1).sum(-1)
