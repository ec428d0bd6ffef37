"""The Muscle loss: an anchor contrasted with all combinations of its peers' rows at once.

z (B, d) is the anchor, peers are M matrices (B, d); rows are normalised here. With z_i, z_j^m unit
rows, FedMuscle eq. 3 reads

    L_i = -log  alpha(i, .., i) exp(sum_m z_i . z_i^m / t_m)
                / sum over j in [B]^M of alpha(j) exp(sum_m z_i . z_{j_m}^m / t_m)
    alpha(j) = exp(-sum_{m<k} gamma_mk z_{j_m}^m . z_{j_k}^k),    gamma_mk = 1 / lower_mk - 1 / t_mk

Temperatures of all functions of this file (t is the paper's tau^(N), lower its tau^(N-1)):

    temperature        one number: every t_m and every t_mk;
                       M numbers: t_m, anchor to peer m, and then t_mk = sqrt(t_m t_k);
                       a symmetric (M+1, M+1) matrix, the anchor first: t_m in row 0, then t_mk.
    lower_temperature  one number: every lower_mk;
                       a symmetric (M, M) matrix, or (M+1, M+1) with the anchor first (its row and
                       column are not read).

Infinity is allowed, diagonals are not read. Tensors may carry gradients; unlike numbers and lists,
their values are not checked.
"""

import math
from collections.abc import Sequence
from itertools import combinations, product

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import normalize, pad

from unalike.losses.contrastive import check_rows

Temperature = float | Sequence | Tensor

COLDEST = 0.006  # exp(4 / temperature), met in the gradient, must fit float64
WARM = 0.06  # from here up it fits float32, and so do the digits of alpha
BLOCK = 2**20  # combinations of peers' rows weighed at once: 4 MiB in float32


def muscle_loss(
    z: Tensor,
    peers: Sequence[Tensor],
    temperature: Temperature = 0.2,
    lower_temperature: Temperature = 0.15,
) -> Tensor:
    """Mean over the batch of L_i (FedMuscle eq. 3), exact, without the paper's B^M x d matrix.

    Time grows as B^(M+1), memory as B^M up to `BLOCK`. Any temperature from 0.006 up is safe: below
    0.06, and for tensors, whose values are not known beforehand, it is computed in float64 whatever
    the dtype of z. Four peers or more can be differentiated once only.

    Args:
        z: the anchor's representations, (B, d), any norm.
        peers: those of M peers, (B, d) each.
        temperature: tau^(N): a number, one per peer, or an (M+1, M+1) matrix with the anchor first.
        lower_temperature: tau^(N-1), in the same forms.
    Returns: a scalar.

    >>> z = torch.eye(4)
    >>> round(muscle_loss(z, [z, z, z]).item(), 3), round(muscle_loss(z, [z, -z, z]).item(), 3)
    (1.041, 3.231)
    """
    check_rows(z, peers)
    per_peer, gamma = _inverse(temperature, lower_temperature, len(peers), z.device)
    dtype = (
        torch.promote_types(z.dtype, torch.float32)
        if _is_warm(temperature) and _is_warm(lower_temperature)
        else torch.float64
    )
    anchor = normalize(z.to(dtype), dim=-1)
    rows = normalize(torch.cat(list(peers)).to(dtype), dim=-1)  # (M B, d)
    unary = (
        (anchor @ rows.mT).unflatten(1, (len(peers), -1)).transpose(0, 1)
    )  # (M, B, B), anchor x peer m
    pair = (
        (rows @ rows.mT)
        .unflatten(1, (len(peers), -1))
        .unflatten(0, (len(peers), -1))
        .transpose(1, 2)
    )  # (M, M, B, B)
    unary, pair = (
        per_peer.to(dtype)[:, None, None] * unary,
        -gamma.to(dtype)[:, :, None, None] * pair,
    )
    positive = unary.diagonal(dim1=1, dim2=2).sum(0) + pair.diagonal(dim1=2, dim2=3).sum((0, 1)) / 2
    return (_log_sum(unary, pair) - positive).mean().to(z.dtype)


def muscle_literal(
    z: Tensor,
    peers: Sequence[Tensor],
    temperature: Temperature = 0.2,
    lower_temperature: Temperature = 0.15,
) -> Tensor:
    """The same scalar as `muscle_loss`, by the paper's own sum over B^M rows: a reference.

    >>> z, *peers = torch.randn(4, 5, 8).double()
    >>> bool((muscle_literal(z, peers) - muscle_loss(z, peers)).abs() < 1e-9)
    True
    """
    check_rows(z, peers)
    S, log_alpha = aggregate(peers, temperature, lower_temperature)
    return muscle_from_aggregate(z, S, log_alpha, positive_rows(len(z), len(peers)))


def aggregate(
    peers: Sequence[Tensor], temperature: Temperature = 0.2, lower_temperature: Temperature = 0.15
) -> tuple[Tensor, Tensor]:
    """What the paper's server sends to the anchor: S (B^M, d) and log alpha (B^M,).

    Combination j = (j_1, .., j_M) is row j_1 B^(M-1) + .. + j_M; S is sum_m z_{j_m}^m / t_m
    (FedMuscle eq. 5). Both are in the peers' dtype.

    >>> S, log_alpha = aggregate(list(torch.randn(3, 5, 8)))
    >>> S.shape, log_alpha.shape
    (torch.Size([125, 8]), torch.Size([125]))
    """
    check_rows(peers[0] if len(peers) else torch.empty(0, 0), peers)
    per_peer, gamma = _inverse(temperature, lower_temperature, len(peers), peers[0].device)
    per_peer, gamma = per_peer.to(peers[0].dtype), gamma.to(peers[0].dtype)
    S, log_alpha = peers[0].new_zeros(1, peers[0].shape[1]), peers[0].new_zeros(1)
    rows = [normalize(peer, dim=-1) for peer in peers]
    for k, row in enumerate(rows):
        # what row k adds to log alpha of all combinations of the peers before it: gamma-weighted
        # similarity to each
        before = [
            rows[m].repeat_interleave(len(row) ** (k - 1 - m), 0).repeat(len(row) ** m, 1)
            for m in range(k)
        ]
        links = sum((gamma[m, k] * before[m] for m in range(k)), torch.zeros_like(S))
        log_alpha = (log_alpha[:, None] - links @ row.mT).flatten()
        S = (S[:, None] + per_peer[k] * row).flatten(0, 1)
    return S, log_alpha


def muscle_from_aggregate(z: Tensor, S: Tensor, log_alpha: Tensor, positives: Tensor) -> Tensor:
    """The loss that the paper's client computes from the server's message (FedMuscle eq. 5).

    Args:
        z: anchor (B, d).
        S, log_alpha: (rows, d) and (rows,), from `aggregate`.
        positives: each anchor's own row (B,), `positive_rows(B, M)`.
    Returns: mean over the batch, a scalar.
    """
    if z.ndim != 2 or S.shape != (len(log_alpha), z.shape[1]) or positives.shape != z.shape[:1]:
        raise ValueError(
            f"z (B, d) needs S (rows, d), log_alpha (rows,) and positives (B,), "
            f"got {tuple(z.shape)}, {tuple(S.shape)}, {tuple(log_alpha.shape)} and "
            f"{tuple(positives.shape)}."
        )
    logits = normalize(z, dim=-1) @ S.mT + log_alpha  # (B, rows)
    return (logits.logsumexp(1) - logits.gather(1, positives.to(z.device)[:, None])[:, 0]).mean()


def positive_rows(batch: int, peers: int) -> Tensor:
    """The rows (i, .., i) of `aggregate`, one per sample: i (B^(M-1) + .. + B + 1).

    >>> positive_rows(batch=3, peers=2)
    tensor([0, 4, 8])
    """
    return torch.arange(batch) * sum(batch**power for power in range(peers))


def consistent_lower(temperature: Temperature) -> float | Tensor:
    """The lower temperature of FedMuscle's eq. 22: 1 / lower_mk = 1 / t_mk + 1 / (t_m t_k).

    A number for a number; an (M, M) matrix for M numbers, or for an (M+1, M+1) matrix with the
    anchor first. Its diagonal has no meaning.

    Args:
        temperature: a number, M numbers, or an (M+1, M+1) matrix.

    >>> round(consistent_lower(0.2), 4)
    0.0333
    >>> consistent_lower([0.2, 0.2])
    tensor([[0.0333, 0.0333],
            [0.0333, 0.0333]], dtype=torch.float64)
    """
    t = _read(temperature, "temperature", None)
    peers = len(t) - (t.ndim == 2) if t.ndim else 1
    per_peer, between = _anchor_and_pairs(temperature, peers, t.device)
    lower = 1 / (1 / between + 1 / per_peer[:, None] / per_peer)
    return lower if t.ndim else lower[0, 0] if isinstance(temperature, Tensor) else float(lower)


def information_bound(loss: float | Tensor, batch: int, peers: int) -> float | Tensor:
    """Lower bound in nats on the information that the anchor shares with its peers: M log B - L.

    It holds in the mean over batches (FedMuscle, theorem 1).

    Args:
        loss: the Muscle loss L.
        batch: B, rows that were compared.
        peers: M.

    >>> information_bound(0.0, batch=32, peers=1) == math.log(32)
    True
    """
    return peers * math.log(batch) - loss


def _log_sum(unary: Tensor, pair: Tensor) -> Tensor:
    """log sum over j in [B]^M of exp(sum_m unary[m, i, j_m] + sum_{m<k} pair[m, k, j_m, j_k]).

    Args:
        unary: (M, B, B), anchor x peer.
        pair: (M, M, B, B), peer x peer, read where m < k.
    Returns: (B,).
    """
    if len(unary) == 1:
        return unary[0].logsumexp(1)
    blocks = _blocks(*unary.shape[:2])
    if len(blocks) == 1 and len(unary) < 4:  # too small to repay the calls that a Function costs
        return _weigh(*_cut(unary, pair, blocks[0]))[-1].logsumexp(1)
    return _LogSum.apply(unary, pair)[0]


class _LogSum(torch.autograd.Function):
    """`_log_sum` with less memory than autograd uses.

    A single block is kept for the backward pass, several are computed again there. The gradient is
    made of marginals of p_i(j), the share of combination j in anchor i's sum.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(unary: Tensor, pair: Tensor) -> tuple[Tensor, ...]:
        blocks = _blocks(*unary.shape[:2])
        if len(blocks) == 1:
            weighed = _weigh(*_cut(unary, pair, blocks[0]))
            return weighed[-1].logsumexp(1), *weighed
        return (
            torch.stack(
                [_weigh(*_cut(unary, pair, block))[-1].logsumexp(1) for block in blocks]
            ).logsumexp(0),
        )

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs, *output)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, *_) -> tuple[Tensor, Tensor | None]:
        unary, pair, total, *stored = ctx.saved_tensors
        peers, batch = unary.shape[:2]
        to_unary, to_pair = (
            torch.zeros_like(unary),
            torch.zeros_like(pair) if ctx.needs_input_grad[1] else None,
        )
        for block in _blocks(peers, batch):
            around = [
                (part.start, batch - part.stop) for part in block
            ]  # the rows that are not in this block
            sizes = [part.stop - part.start for part in block]
            reach, weights, summed, logits = stored or _weigh(*_cut(unary, pair, block))
            ratio = grad[:, None] * (logits - total[:, None]).exp() / summed
            per_peer, per_pair = _marginals(
                reach, weights, summed, ratio, sizes, _head(peers, batch), to_pair is not None
            )
            to_unary = to_unary + torch.stack(
                [pad(share, gap) for share, gap in zip(per_peer, around, strict=True)]
            )
            if to_pair is not None:
                whole = {
                    (m, k): pad(share, around[k] + around[m]) for (m, k), share in per_pair.items()
                }
                none = torch.zeros_like(whole[0, 1])
                table = [whole.get((m, k), none) for m in range(peers) for k in range(peers)]
                to_pair = to_pair + torch.stack(table).unflatten(0, (peers, peers))
        return to_unary, to_pair


def _head(peers: int, batch: int) -> int:
    """How many peers are summed out first, by a matrix product.

    Two if their combinations with the anchors fit a block, else one.
    """
    return 2 if peers > 2 and batch**3 <= BLOCK else 1


def _blocks(peers: int, batch: int) -> list[tuple[slice, ...]]:
    """The rows with which each peer takes part in each block.

    All rows where possible, fewer for the first peers after the head.
    """
    room, ranges, split = BLOCK, {}, _head(peers, batch)
    for m in (*range(split), *reversed(range(split, peers))):
        size = max(1, min(batch, room))
        ranges[m] = [slice(start, min(start + size, batch)) for start in range(0, batch, size)]
        room //= size
    return list(product(*(ranges[m] for m in range(peers))))


def _cut(
    unary: Tensor, pair: Tensor, block: tuple[slice, ...]
) -> tuple[list[Tensor], dict[tuple[int, int], Tensor]]:
    """M of (B, n_m) and, for each m < k, (n_m, n_k): the logits of one block."""
    links = {(m, k): pair[m, k, block[m], block[k]] for m, k in combinations(range(len(block)), 2)}
    return [unary[m, :, part] for m, part in enumerate(block)], links


def _weigh(
    unary: list[Tensor], pair: dict[tuple[int, int], Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split the peers into a head and a tail; one matrix product sums the head out.

    Returns reach (B, head), weights (head, tail), their product (B, tail), and the logits that
    remain to be summed, (B, tail). Only the product leaves the log domain: each column of weights
    is shifted to a maximum of 1, and head logits stay within 2 / temperature of 0 because rows are
    unit vectors, so that no sum can overflow or vanish, whatever gamma is.
    """
    peers, split = len(unary), _head(len(unary), len(unary[0]))
    # head to tail, (n_m, tail)
    across = [_outer([pair[m, k] for k in range(split, peers)]) for m in range(split)]
    joint = (
        across[0].clone()
        if split == 1
        else (pair[0, 1][:, :, None] + across[0][:, None]).add_(across[1])
    )
    shift = joint.detach().amax(tuple(range(split)))  # (tail,)
    weights, reach = joint.sub_(shift).exp_().flatten(0, split - 1), _outer(unary[:split]).exp()
    summed = reach @ weights
    return (
        reach,
        weights,
        summed,
        summed.log() + (shift + _within(pair, split, peers)) + _outer(unary[split:]),
    )


def _marginals(
    reach: Tensor,
    weights: Tensor,
    summed: Tensor,
    ratio: Tensor,
    sizes: list[int],
    split: int,
    wants_pairs: bool,
) -> tuple[list[Tensor], dict[tuple[int, int], Tensor]]:
    """Marginals of one block: grad_i p_i(j_m), and sum_i grad_i p_i(j_m, j_k) for m < k.

    ratio (B, tail) is grad_i p_i(tail) / summed, so that grad_i p_i(head, tail) = reach x weights x
    ratio. Returns M of (B, n_m), and (n_m, n_k) by (m, k).
    """
    head, tail = reach * (ratio @ weights.mT), ratio * summed  # (B, head), (B, tail)
    per_peer = [_keep(head.unflatten(1, sizes[:split]), 0, 1 + m) for m in range(split)]
    per_peer += [
        _keep(tail.unflatten(1, sizes[split:]), 0, 1 + m) for m in range(len(sizes) - split)
    ]
    if not wants_pairs:
        return per_peer, {}
    per_pair = {(0, 1): head.sum(0).unflatten(0, sizes[:split])} if split == 2 else {}
    within = tail.sum(0).unflatten(0, sizes[split:])  # (n_k, ..)
    joint = (reach.mT @ ratio).mul_(weights).unflatten(0, sizes[:split])  # (n_1[, n_2], tail)
    across = [
        _keep(joint, m, split).unflatten(1, sizes[split:]) for m in range(split)
    ]  # (n_m, n_k, ..)
    for m, k in set(combinations(range(len(sizes)), 2)) - per_pair.keys():
        per_pair[m, k] = (
            _keep(across[m], 0, 1 + k - split) if m < split else _keep(within, m - split, k - split)
        )
    return per_peer, per_pair


def _within(pair: dict[tuple[int, int], Tensor], first: int, peers: int) -> Tensor | float:
    """Pair logits between the peers from `first` on, for every combination, (n_first .. n_M,).

    0 if there is only one such peer.
    """
    total: Tensor | float = 0.0
    for m, k in combinations(range(peers - first), 2):
        # along axes m and k of one axis per peer
        between = pair[first + m, first + k]
        total = total + between.unflatten(0, (*[1] * m, -1, *[1] * (k - m - 1))).unflatten(
            -1, (-1, *[1] * (peers - first - k - 1))
        )
    return total.flatten() if isinstance(total, Tensor) else total


def _outer(logits: list[Tensor]) -> Tensor:
    """M of (B, n_m) -> (B, n_1 .. n_M): the sum for every combination, last peer fastest."""
    total = logits[0]
    for more in logits[1:]:
        total = (total[:, :, None] + more[:, None, :]).flatten(1)
    return total


def _keep(table: Tensor, *axes: int) -> Tensor:
    """Sum out every axis but these."""
    summed = [axis for axis in range(table.ndim) if axis not in axes]
    return table.sum(summed) if summed else table


def _inverse(
    temperature: Temperature, lower_temperature: Temperature, peers: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """1 / t_m (M,) and gamma_mk (M, M) with zeros on the diagonal, float64."""
    if isinstance(temperature, int | float) and isinstance(
        lower_temperature, int | float
    ):  # what most want, in few calls
        _check(temperature, temperature, "temperature")
        _check(lower_temperature, lower_temperature, "lower_temperature")
        gamma = torch.full(
            (peers, peers),
            1 / lower_temperature - 1 / temperature,
            dtype=torch.float64,
            device=device,
        )
        return torch.full(
            (peers,), 1 / temperature, dtype=torch.float64, device=device
        ), gamma.fill_diagonal_(0)
    per_peer, between = _anchor_and_pairs(temperature, peers, device)
    lower = _read(lower_temperature, "lower_temperature", device)
    if lower.shape == (peers + 1, peers + 1):
        lower = lower[1:, 1:]
    if lower.shape not in ((), (peers, peers)):
        raise ValueError(
            f"lower_temperature is one number, a ({peers}, {peers}) matrix between the peers, or "
            f"({peers + 1}, {peers + 1}) with the anchor first, got shape {tuple(lower.shape)}."
        )
    gamma = (1 / lower - 1 / between).masked_fill(
        torch.eye(peers, dtype=torch.bool, device=device), 0
    )
    return 1 / per_peer, (gamma + gamma.mT) / 2  # symmetric also where a learnt tensor is not quite


def _anchor_and_pairs(
    temperature: Temperature, peers: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """t_m (M,) and t_mk (M, M), float64."""
    t = _read(temperature, "temperature", device)
    if t.shape == ():
        return t.expand(peers), t.expand(peers, peers)
    if t.shape == (peers,):
        return t, torch.outer(t, t).sqrt()
    if t.shape == (peers + 1, peers + 1):
        return t[0, 1:], t[1:, 1:]
    raise ValueError(
        f"temperature is one number, {peers} of them (one per peer), or a "
        f"({peers + 1}, {peers + 1}) matrix with the anchor first, got shape {tuple(t.shape)}."
    )


def _read(value: Temperature, name: str, device: torch.device | None) -> Tensor:
    """The temperature as a float64 tensor, with ones on the diagonal of a matrix.

    Numbers and lists are checked.
    """
    t = torch.as_tensor(
        value, dtype=torch.float64, device=device if isinstance(value, Tensor) else None
    )
    if t.ndim == 2 and t.shape[0] == t.shape[1]:
        t = torch.where(torch.eye(len(t), dtype=torch.bool, device=t.device), 1.0, t)
    if isinstance(value, Tensor):
        return t
    _check(float(t.min()), value, name)
    if t.ndim == 2 and not (t.shape[0] == t.shape[1] and torch.allclose(t, t.mT)):
        raise ValueError(f"{name} as a matrix must be square and symmetric, got {value}.")
    return (
        t.to(device) if t.ndim else torch.full((), float(t), dtype=t.dtype, device=device)
    )  # a GPU fills, and does not wait


def _check(coldest: float, value: Temperature, name: str) -> None:
    if name == "temperature" and not coldest >= COLDEST:
        raise ValueError(f"temperature must be at least {COLDEST}, got {value}.")
    if not coldest > 0:
        raise ValueError(f"{name} must be above 0, got {value}.")


def _is_warm(value: Temperature) -> bool:
    """Float32 will do: known beforehand, and `WARM` throughout."""
    if isinstance(value, int | float):
        return value >= WARM
    return not isinstance(value, Tensor) and float(_read(value, "temperatures", None).min()) >= WARM
