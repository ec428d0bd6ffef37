"""Numbers of lower precision in forward and backward passes; weights stay as they are."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Precision = Literal["float32", "tf32", "bfloat16", "float16"]
AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_exact = False  # inside exact_arithmetic


@contextmanager
def precision_scope(precision: Precision, device: str) -> Iterator[None]:
    """Compute with this precision inside the block.

    Args:
        precision: "float32" changes nothing. "tf32" rounds the factors of matrix products and
            convolutions on a GPU to 10 bits, and does nothing on a CPU. "bfloat16" and "float16"
            compute those in 16 bits (torch.autocast).
        device: where tensors are, e.g. "cuda:1".
    """
    if _exact:
        yield
    elif precision in AUTOCAST:
        with torch.autocast(torch.device(device).type, AUTOCAST[precision]):
            yield
    elif precision == "tf32":
        matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn
        before = matmul.allow_tf32, convolution.allow_tf32
        matmul.allow_tf32 = convolution.allow_tf32 = True
        try:
            yield
        finally:
            matmul.allow_tf32, convolution.allow_tf32 = before
    else:
        yield


@contextmanager
def exact_arithmetic() -> Iterator[None]:
    """Compute without TF32 and autocast inside the block, so that equal programs agree."""
    global _exact
    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn
    before = _exact, matmul.allow_tf32, convolution.allow_tf32
    _exact, matmul.allow_tf32, convolution.allow_tf32 = True, False, False
    try:
        yield
    finally:
        _exact, matmul.allow_tf32, convolution.allow_tf32 = before


def loss_scaler(precision: Precision, device: str) -> torch.amp.GradScaler | None:
    """What keeps small gradients from becoming 0 in float16; other precisions need none."""
    return torch.amp.GradScaler(torch.device(device).type) if precision == "float16" else None
