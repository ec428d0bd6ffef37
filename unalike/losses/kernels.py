"""Similarity of two kernels of the same samples."""

from collections.abc import Mapping
from itertools import permutations

from torch import Tensor


def pairwise_cka(views: Mapping[str, Tensor]) -> dict[tuple[str, str], float]:
    """Linear CKA of each two representations of the same rows, (n, d) each, in both orders."""
    grams = {name: z @ z.mT for name, z in views.items()}
    return {(a, b): float(cka(grams[a], grams[b])) for a, b in permutations(views, 2)}


def cka(kernel: Tensor, other: Tensor) -> Tensor:
    """Centred kernel alignment of two (n, n) kernels, a scalar: 1 if they are equal up to scale.

    Reference: Kornblith et al. 2019, eq. 2 and 4, https://arxiv.org/abs/1905.00414

    >>> import torch
    >>> z = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> round(cka(z @ z.mT, 3 * z @ z.mT).item(), 4)
    1.0
    """
    if kernel.ndim != 2 or kernel.shape[0] != kernel.shape[1] or kernel.shape != other.shape:
        raise ValueError(
            "cka compares two square kernels of one size, "
            f"got {tuple(kernel.shape)} and {tuple(other.shape)}"
        )
    a, b = _centred(kernel), _centred(other)
    return (a * b).sum() / (a.square().sum() * b.square().sum()).clamp(min=1e-24).sqrt()


def debiased_cka(kernel: Tensor, other: Tensor) -> Tensor:
    """Centred kernel alignment without the diagonals, a scalar: 0 on average for unrelated rows.

    Reference: the unbiased HSIC of Song et al. 2012, eq. 5, https://www.jmlr.org/papers/v13/song12a.html
    Kernels (n, n) with n above 3; 0 where one of them is constant.
    """
    if kernel.ndim != 2 or kernel.shape != other.shape or len(kernel) < 4:
        raise ValueError(
            "debiased_cka compares two square kernels of at least 4 rows, "
            f"got {tuple(kernel.shape)} and {tuple(other.shape)}"
        )
    own = _unbiased_hsic(kernel, kernel) * _unbiased_hsic(other, other)
    if not own > 0:
        return kernel.new_zeros(())
    return _unbiased_hsic(kernel, other) / own.sqrt()


def _unbiased_hsic(kernel: Tensor, other: Tensor) -> Tensor:
    n = len(kernel)
    a = kernel - kernel.diag().diag()
    b = other - other.diag().diag()
    products = (a * b).sum()
    means = a.sum() * b.sum() / ((n - 1) * (n - 2))
    crossed = 2 * (a.sum(0) @ b.sum(1)) / (n - 2)
    return (products + means - crossed) / (n * (n - 3))


def _centred(kernel: Tensor) -> Tensor:
    return kernel - kernel.mean(0, keepdim=True) - kernel.mean(1, keepdim=True) + kernel.mean()
