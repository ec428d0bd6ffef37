"""Contrastive losses on paired rows: pairwise, or by the volume that rows span."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize


def infonce(z: Tensor, other: Tensor, temperature: float | Tensor = 0.2) -> Tensor:
    """InfoNCE: row i of `z` is positive with row i of `other`, negative with all other rows.

    Args:
        z, other: (B, d), any norm.
        temperature: of the softmax over rows.
    Returns: mean over rows, a scalar.
    Reference: van den Oord et al. 2018, eq. 4, https://arxiv.org/abs/1807.03748; FedMuscle, eq. 1

    >>> round(infonce(torch.eye(4), torch.eye(4), temperature=0.1).item(), 3)
    0.0
    """
    if z.ndim != 2 or z.shape != other.shape:
        raise ValueError(
            "infonce pairs rows: both sides need one shape (B, d), "
            f"got {tuple(z.shape)} and {tuple(other.shape)}."
        )
    likeness = normalize(z, dim=-1) @ normalize(other, dim=-1).mT / temperature  # (B, B)
    return -likeness.log_softmax(-1).diagonal().mean()


def nt_xent(
    z: Tensor, other: Tensor, temperature: float | Tensor = 0.5, cosine: bool = True
) -> Tensor:
    """NT-Xent: row i of `z` and row i of `other` should find each other among all 2B rows.

    Args:
        z, other: (B, d), any norm.
        temperature: of the softmax over rows.
        cosine: compare rows by their cosines; false: by their dot products, lengths included.
    Returns: mean over the 2B rows, a scalar.
    Reference: Chen et al. 2020, eq. 1, https://arxiv.org/abs/2002.05709

    >>> round(nt_xent(torch.eye(4), torch.eye(4), temperature=0.1).item(), 3)
    0.0
    """
    if z.ndim != 2 or z.shape != other.shape:
        raise ValueError(
            "nt_xent pairs rows: both sides need one shape (B, d), "
            f"got {tuple(z.shape)} and {tuple(other.shape)}."
        )
    if not len(z):
        return (z * other).sum()
    rows = torch.cat([z, other])
    if cosine:
        rows = normalize(rows, dim=-1)
    itself = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
    logits = (rows @ rows.mT / temperature).masked_fill(itself, -torch.inf)  # (2B, 2B)
    log_share = logits.log_softmax(-1)
    return -torch.cat([log_share.diagonal(len(z)), log_share.diagonal(-len(z))]).mean()


def pairwise_loss(
    z: Tensor, peers: Sequence[Tensor], temperature: float | Sequence[float] | Tensor = 0.2
) -> Tensor:
    """InfoNCE of the anchor with every peer, summed over peers.

    The Muscle loss becomes this if peers are taken as independent (FedMuscle, section 4.1, eq. 16).

    Args:
        z: anchor (B, d).
        peers: M of (B, d).
        temperature: one number, or one per peer.
    Returns: mean over rows, a scalar.

    >>> z = torch.eye(4)
    >>> bool(pairwise_loss(z, [z, -z]) == infonce(z, z) + infonce(z, -z))
    True
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
            f"temperature is one number or one per peer ({len(peers)}), "
            f"got shape {tuple(temperatures.shape)}."
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
    """Contrast the hardest positive with the two hardest negatives, and push positives apart.

    Two samples are positive if they share more than half of the union of their labels, negative if
    both have labels and share none. The loss is -log softmax of the least similar positive against
    the two most similar negatives, mean over samples that have both, plus (cosine - limit) /
    temperature, mean over positive pairs beyond the limit (Seo et al. 2024, in our reading).

    Args:
        z: (B, d), any norm.
        labels: (B, K), boolean.
    Returns: a scalar.

    >>> labels = torch.eye(2).repeat_interleave(2, 0) > 0
    >>> round(relaxed_contrast(torch.eye(4), labels, temperature=1.0).item(), 3)  # log 3
    1.099
    """
    if z.ndim != 2 or labels.ndim != 2 or len(z) != len(labels):
        raise ValueError(
            "every row has labels: (B, d) and (B, K), "
            f"got {tuple(z.shape)} and {tuple(labels.shape)}."
        )
    rows, sets = normalize(z, dim=-1), labels.to(z.dtype)
    cosines, shared, many = rows @ rows.mT, sets @ sets.mT, sets.sum(1)
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    positive = (2 * shared > many[:, None] + many - shared) & ~itself
    negative = (shared == 0) & (many[:, None] > 0) & (many > 0)
    far = cosines.masked_fill(~positive, 2.0).amin(1, keepdim=True)  # (B, 1)
    near = cosines.masked_fill(~negative, -1e3).topk(min(2, len(z)), 1).values  # (B, 2)
    costs = -(torch.cat([far, near], 1) / temperature).log_softmax(1)[:, 0]
    both = positive.any(1) & negative.any(1)
    close = positive & (cosines > limit)
    push = ((cosines - limit) / temperature * close).sum() / close.sum().clamp(min=1)
    return (costs * both).sum() / both.sum().clamp(min=1) + push


def gramian_loss(z: Tensor, peers: Sequence[Tensor], temperature: float | Tensor = 0.2) -> Tensor:
    """Row i of `z` should span less volume with rows i of all peers than with rows j != i.

    The mean over rows of -log softmax_j(-Vol(z_i, z_j^1, ..., z_j^M) / temperature) at j = i. With
    M + 1 > d every volume is zero, and so is the gradient.

    Args:
        z: anchor (B, d), any norm.
        peers: M of (B, d).
        temperature: of the softmax over rows.
    Returns: a scalar.
    Reference: Cicchetti et al. 2025, one direction (z is the anchor); FedMuscle, appendix L

    >>> round(gramian_loss(torch.eye(4), [torch.eye(4)], temperature=0.1).item(), 3)
    0.0
    """
    check_rows(z, peers)
    anchor = normalize(z.double(), dim=-1)
    stack = normalize(torch.stack(list(peers), 1).double(), dim=-1)  # (B, M, d)
    cosines = torch.einsum("id,jmd->ijm", anchor, stack)  # (B, B, M)
    # det [[1, c], [c, K]] = det K - c . adj(K) c: Schur's complement multiplied out, so that K may
    # be singular
    determinant, adjugate = _determinant_and_adjugate(stack @ stack.mT)  # (B,), (B, M, M)
    squared = determinant - torch.einsum("ijm,jmk,ijk->ij", cosines, adjugate, cosines)
    # the floor keeps the slope of sqrt finite; below it the slope is zero
    volume = squared.clamp(min=1e-12).sqrt()
    return -(-volume / temperature).log_softmax(-1).diagonal().mean().to(z.dtype)


def check_rows(z: Tensor, peers: Sequence[Tensor]) -> None:
    """Raise ValueError unless `peers` are one or more tensors of the shape (B, d) of `z`."""
    if len(peers) == 0:
        raise ValueError("an anchor needs at least one peer to be compared with, got none.")
    shapes = [tuple(peer.shape) for peer in peers]
    if z.ndim != 2 or any(shape != tuple(z.shape) for shape in shapes):
        raise ValueError(
            "the anchor and all its peers need one shape (B, d), "
            f"got {tuple(z.shape)} and {shapes}."
        )


def _determinant_and_adjugate(square: Tensor) -> tuple[Tensor, Tensor]:
    """(..., M, M) to (...,) and (..., M, M), by the Faddeev-LeVerrier algorithm.

    They are polynomials of the entries, and so smooth where the matrix is singular.
    """
    size = square.shape[-1]
    eye = torch.eye(size, dtype=square.dtype, device=square.device)
    partial, coefficient = eye.expand_as(square), -_trace(square)
    for k in range(2, size + 1):
        partial = square @ partial + coefficient[..., None, None] * eye
        coefficient = -_trace(square @ partial) / k
    return (-1) ** size * coefficient, (-1) ** (size - 1) * partial


def _trace(square: Tensor) -> Tensor:
    return square.diagonal(dim1=-2, dim2=-1).sum(-1)
