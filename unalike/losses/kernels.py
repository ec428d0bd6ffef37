"""How alike two kernels of the same samples are. Knows nothing of clients or models."""

from torch import Tensor


def cka(kernel: Tensor, other: Tensor) -> Tensor:
    """Centred kernel alignment of two (n, n) kernels, a scalar: 1 where they are one up to scale (Kornblith 2019, eq. 2 and 4).

    >>> import torch
    >>> z = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> round(cka(z @ z.mT, 3 * z @ z.mT).item(), 4)
    1.0
    """
    if kernel.ndim != 2 or kernel.shape[0] != kernel.shape[1] or kernel.shape != other.shape:
        raise ValueError(f"cka compares two square kernels of one size, got {tuple(kernel.shape)} and {tuple(other.shape)}")
    a, b = _centred(kernel), _centred(other)
    return (a * b).sum() / (a.square().sum() * b.square().sum()).clamp(min=1e-24).sqrt()


def _centred(kernel: Tensor) -> Tensor:
    return kernel - kernel.mean(0, keepdim=True) - kernel.mean(1, keepdim=True) + kernel.mean()
