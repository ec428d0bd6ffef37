"""What AFMCC minimises: reconstruction, contrast with the fused row, balance between classes. Knows nothing of clients or models.

h (N, d) are fused rows, z (N, d) one modality's rows, p (N, K) rows of probabilities. `weights` (N,), where given, is 1 for rows that
count and 0 for rows that fill up a stack: those may hold any finite numbers, and the result is that of leaving them out.
"""

import torch
from torch import Tensor
from torch.nn.functional import normalize


def class_correlation(p: Tensor, weights: Tensor | None = None) -> Tensor:
    """How often two classes are given to the same row: Q = (K / N) P P^T, (K, K), for p (N, K) = P^T (AFMCC eq. 4).

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
    """Keeps clusters apart and of one size: ||Q - Q_target||^2, Q_target = flexibility I + (1 - flexibility) / K 11^T, a scalar.

    p (N, K), as (h @ W.mT).softmax(-1). `flexibility`, the paper's lambda, is 1 for clusters as tight as points, 0 for none at all.
    A term to add to any contrastive method, on features of any make (AFMCC eq. 5; with 0.01 before it in its Table 3c).

    >>> class_correlation_loss(torch.eye(3), flexibility=1.0).item(), class_correlation_loss(torch.full((3, 3), 1 / 3), 0.0).item() < 1e-12
    (0.0, True)
    """
    if not 0 <= flexibility <= 1:
        raise ValueError(
            f"flexibility lies between 0 (one loose cluster) and 1 (tight clusters), got {flexibility}."
        )
    Q = class_correlation(p, weights)
    target = flexibility * torch.eye(len(Q), dtype=p.dtype, device=p.device) + (
        1 - flexibility
    ) / len(Q)
    return (Q - target).square().sum()


def fusion_contrast(
    h: Tensor, z: Tensor, temperature: float | Tensor = 0.5, weights: Tensor | None = None
) -> Tensor:
    """Fused row i should be nearer to row i of one modality than to its other rows: a scalar, the mean over rows (AFMCC eq. 3).

    h, z (N, d), any length. Unlike in `infonce`, the denominator leaves out j = i, so that the loss may be negative. The paper's L_d
    is the sum over modalities. A row with no other to compare with costs nothing.

    >>> round(fusion_contrast(torch.eye(4), torch.eye(4), temperature=0.5).item(), 3)      # log 3 - 1 / 0.5
    -0.901
    """
    if h.ndim != 2 or h.shape != z.shape:
        raise ValueError(
            f"fusion_contrast pairs rows: both sides need one shape (N, d), got {tuple(h.shape)} and {tuple(z.shape)}."
        )
    share = _shares(h, weights)
    likeness = normalize(h, dim=-1) @ normalize(z, dim=-1).mT / temperature  # (N, N)
    left_out = torch.eye(len(h), dtype=torch.bool, device=h.device) | (
        share == 0
    )  # pairs i, j that are no contrast
    others = likeness.masked_fill(left_out, -torch.inf).logsumexp(-1)
    cost = torch.where(left_out.all(-1), 0.0, others - likeness.diagonal())
    return (share * cost).sum()


def reconstruction(
    x: Tensor, x_hat: Tensor, per: str = "feature", weights: Tensor | None = None
) -> Tensor:
    """Squared error of x_hat against x, both (N, ...), mean over rows: a scalar (AFMCC eq. 2, for one modality).

    `per`: "feature" takes the mean over a row's features, "sample" their sum, which is eq. 2 as printed. They differ by the number of
    features, and so in what the paper's alpha and beta mean.

    >>> x, x_hat = torch.zeros(2, 5), torch.ones(2, 5)
    >>> reconstruction(x, x_hat).item(), reconstruction(x, x_hat, per="sample").item()
    (1.0, 5.0)
    """
    if x.ndim < 2 or x.shape != x_hat.shape:
        raise ValueError(
            f"reconstruction compares rows: both need one shape (N, ...), got {tuple(x.shape)} and {tuple(x_hat.shape)}."
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
            f"weights are one number a row: {len(rows)} rows, got weights of shape {tuple(weights.shape)}."
        )
    weights = weights.to(rows.dtype)
    return weights / weights.sum().clamp(min=torch.finfo(rows.dtype).tiny)
