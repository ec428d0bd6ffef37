"""Rows of numbers in fewer bytes: what a message on the public set may be rounded to.

    bfloat16    2 bytes a number
    int8, int4  1 byte, or half a byte, a number, and 1 byte a row for its scale, a power of 2^(1/4)

The size depends on the shape alone, so that it is known before a run. Scales are finite whatever
the bytes are; a row with NaN or infinity has a scale of its own and is NaN again.
"""

from typing import Literal

import torch
from torch import Tensor

MessageDtype = Literal["bfloat16", "int8", "int4"]

STEPS = 4  # scales are powers of 2^(1/4), from 2^-31 to 2^31: a row uses 5/6 of the grid or more
LARGEST = {"int8": 127, "int4": 7}
NOT_FINITE = -128  # the scale's byte of a row with NaN or infinity


def quantize(rows: Tensor, dtype: MessageDtype | None) -> Tensor:
    """Rows (n, width) as they are sent, (n, `columns(width, dtype)`). None: as they are.

    >>> rows = torch.tensor([[1.0, -0.5, 0.0]])
    >>> quantize(rows, "int8")
    tensor([[108, -54,   0, -27]], dtype=torch.int8)
    """
    if dtype is None:
        return rows
    if dtype == "bfloat16":
        return rows.to(torch.bfloat16)
    largest = LARGEST[dtype]
    rows = rows.detach().to(torch.float64)
    peak = rows.abs().amax(1, keepdim=True)
    finite = peak.isfinite()
    tiny = torch.finfo(torch.float32).tiny
    exponent = (torch.log2(peak.clamp(min=tiny) / largest) * STEPS).ceil()
    exponent = exponent.nan_to_num(0.0).clamp(NOT_FINITE + 1, 127)
    whole = (rows / torch.exp2(exponent / STEPS)).nan_to_num(0.0).round().clamp(-largest, largest)
    exponent = torch.where(finite, exponent, float(NOT_FINITE)).to(torch.int8)
    whole = whole.to(torch.int8)
    if dtype == "int4":
        whole = torch.nn.functional.pad(whole, (0, whole.shape[1] % 2))
        low, high = whole[:, 0::2], whole[:, 1::2]
        whole = (low & 15) | (high << 4)
    return torch.cat([whole, exponent], 1)


def dequantize(sent: Tensor, dtype: MessageDtype | None, width: int, like: torch.dtype) -> Tensor:
    """Rows (n, width) of the dtype `like`, from what `quantize` gave.

    Raises: ValueError where that is no such tensor.

    >>> dequantize(torch.tensor([[108, -54, 0, -27]]).to(torch.int8), "int8", 3, torch.float32)
    tensor([[ 1.0034, -0.5017,  0.0000]])
    """
    if dtype is None:
        fits = sent.is_floating_point()
    else:
        fits = sent.dtype == (torch.bfloat16 if dtype == "bfloat16" else torch.int8)
    if not fits or sent.shape[1:] != (columns(width, dtype),):
        raise ValueError(
            f"expected rows of {columns(width, dtype)} numbers, {dtype or 'real'}, got "
            f"{tuple(sent.shape)} of {str(sent.dtype).removeprefix('torch.')}"
        )
    if dtype is None or dtype == "bfloat16":
        return sent.to(like)
    whole, exponent = sent[:, :-1], sent[:, -1:]
    if dtype == "int4":
        # The arithmetic shift brings back the sign of a number of 4 bits.
        pairs = torch.stack([(whole << 4) >> 4, whole >> 4], 2)
        whole = pairs.flatten(1)[:, :width]
    rows = whole.to(like) * torch.exp2(exponent.to(torch.float64) / STEPS).to(like)
    return rows.masked_fill(exponent == NOT_FINITE, float("nan"))


def columns(width: int, dtype: MessageDtype | None) -> int:
    """Columns of what `quantize` gives for rows of this width.

    >>> columns(256, None), columns(256, "int8"), columns(256, "int4")
    (256, 257, 129)
    """
    if dtype == "int8":
        return width + 1
    return (width + 1) // 2 + 1 if dtype == "int4" else width
