"""Losses of AFMCC: reconstruction, contrast with the fused row, balance between classes.

h (N, d) are fused rows, z (N, d) one modality's rows, p (N, K) rows of probabilities. `weights`
(N,), if passed, is 1 for rows that count and 0 for padding: padding may hold any finite numbers,
and the result is that of leaving it out.
"""

import torch
from torch import Tensor
from torch.nn.functional import normalize


def class_correlation(p: Tensor, weights: Tensor | None = None) -> Tensor:
    """How often two classes are assigned to the same row: Q = (K / N) P P^T, (K, K).

    p (N, K) is the paper's P^T (AFMCC eq. 4).

    Args:
        p: (N, K), the paper's P^T: probabilities of the clusters.
        weights: of each row, (N,); None: all the same.

    >>> class_correlation(torch.eye(3))
    tensor([[1., 0., 0.],
            [0., 1., 0.],
            [0., 0., 1.]])
    """
    if p.ndim != 2:
        raise ValueError(
            f"class_correlation takes probabilities (N, K), got shape {tuple(p.shape)}."
        )
    share = _shares(p, weights)
    return p.shape[1] * (share[:, None] * p).mT @ p


def class_correlation_loss(
    p: Tensor, flexibility: float = 0.3, weights: Tensor | None = None
) -> Tensor:
    """Keeps clusters apart and of one size: ||Q - Q_target||^2, a scalar (AFMCC eq. 5).

    Q_target = flexibility I + (1 - flexibility) / K 11^T. A term to add to any contrastive method,
    on any features; its weight is 0.01 in the paper's Table 3c.

    Args:
        p: probabilities (N, K), such as (h @ W.mT).softmax(-1).
        flexibility: the paper's lambda; 1 for clusters as tight as points, 0 for no clusters.
        weights: of each row, (N,); None: all the same.

    >>> class_correlation_loss(torch.eye(3), flexibility=1.0).item()
    0.0
    >>> class_correlation_loss(torch.full((3, 3), 1 / 3), 0.0).item() < 1e-12
    True
    """
    if not 0 <= flexibility <= 1:
        raise ValueError(
            "flexibility lies between 0 (one loose cluster) and 1 (tight clusters), "
            f"got {flexibility}."
        )
    Q = class_correlation(p, weights)
    identity = torch.eye(len(Q), dtype=p.dtype, device=p.device)
    target = flexibility * identity + (1 - flexibility) / len(Q)
    return (Q - target).square().sum()


def fusion_contrast(
    h: Tensor, z: Tensor, temperature: float | Tensor = 0.5, weights: Tensor | None = None
) -> Tensor:
    """Fused row i should be nearer to row i of one modality than to its other rows (AFMCC eq. 3).

    Unlike in `infonce`, the denominator leaves out j = i, so that the loss may be negative. The
    paper's L_d is the sum over modalities. A row with no other to compare with costs nothing.

    Args:
        h, z: (N, d), any norm.
        temperature: of the softmax over rows.
        weights: of each row, (N,); None: all the same.
    Returns: mean over rows, a scalar.

    >>> loss = fusion_contrast(torch.eye(4), torch.eye(4), temperature=0.5)
    >>> round(loss.item(), 3)  # log 3 - 1 / 0.5
    -0.901
    """
    if h.ndim != 2 or h.shape != z.shape:
        raise ValueError(
            "fusion_contrast pairs rows: both sides need one shape (N, d), "
            f"got {tuple(h.shape)} and {tuple(z.shape)}."
        )
    share = _shares(h, weights)
    likeness = normalize(h, dim=-1) @ normalize(z, dim=-1).mT / temperature  # (N, N)
    # pairs i, j that are no contrast: a row with itself or with padding
    excluded = torch.eye(len(h), dtype=torch.bool, device=h.device) | (share == 0)
    negatives = likeness.masked_fill(excluded, -torch.inf).logsumexp(-1)
    cost = torch.where(excluded.all(-1), 0.0, negatives - likeness.diagonal())
    return (share * cost).sum()


def reconstruction(
    x: Tensor, x_hat: Tensor, per: str = "feature", weights: Tensor | None = None
) -> Tensor:
    """Squared error of x_hat against x, mean over rows, a scalar (AFMCC eq. 2, one modality).

    Args:
        x, x_hat: (N, ...).
        per: "feature" takes the mean over a row's features, "sample" their sum, which is eq. 2 as
            printed. They differ by the number of features, and so in what the paper's alpha and
            beta mean.
        weights: of each row, (N,); None: all the same.

    >>> x, x_hat = torch.zeros(2, 5), torch.ones(2, 5)
    >>> reconstruction(x, x_hat).item(), reconstruction(x, x_hat, per="sample").item()
    (1.0, 5.0)
    """
    if x.ndim < 2 or x.shape != x_hat.shape:
        raise ValueError(
            "reconstruction compares rows: both need one shape (N, ...), "
            f"got {tuple(x.shape)} and {tuple(x_hat.shape)}."
        )
    if per not in ("feature", "sample"):
        raise ValueError(f'reconstruction is counted per "feature" or per "sample", got {per!r}.')
    error = (x_hat - x).square().flatten(1)
    return (_shares(x, weights) * (error.mean(1) if per == "feature" else error.sum(1))).sum()


def _shares(rows: Tensor, weights: Tensor | None) -> Tensor:
    """(N,): what each row is of the mean over rows; 0 for all where every weight is 0."""
    if weights is None:
        return rows.new_full((len(rows),), 1 / max(len(rows), 1))
    if weights.shape != rows.shape[:1]:
        raise ValueError(
            f"weights are one number a row: {len(rows)} rows, "
            f"got weights of shape {tuple(weights.shape)}."
        )
    weights = weights.to(rows.dtype)
    return weights / weights.sum().clamp(min=torch.finfo(rows.dtype).tiny)
