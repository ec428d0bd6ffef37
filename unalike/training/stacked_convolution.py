"""Convolutions of a stack of models as matrix products.

torch.func.vmap makes one grouped convolution of the convolutions of many models. For small models
a GPU then spends most of its time with reordering numbers: a product of matrices is several times
as fast.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

# Bytes that the patches of one convolution may take, over all models. With more, memory costs more
# than what is gained.
MAX_PATCH_BYTES = 2**30


class MatrixConvolutions(TorchFunctionMode):
    """Within it, `conv2d` is a product of matrices, forwards and backwards.

    Args:
        models: how many there are in the stack.
    """

    def __init__(self, models: int):
        super().__init__()
        self.models = models

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.conv2d:
            return self.convolve(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def convolve(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        """What `torch.conv2d` gives for one model's images (n, channels, height, width)."""
        numbers = [stride, padding, dilation]
        if groups != 1 or x.ndim != 4 or any(isinstance(number, str) for number in numbers):
            return torch.conv2d(x, weight, bias, stride, padding, dilation, groups)
        strides, paddings, dilations = (
            (number, number) if isinstance(number, int) else tuple(number) for number in numbers
        )
        sides = [
            (x.shape[2 + i] + 2 * paddings[i] - dilations[i] * (weight.shape[2 + i] - 1) - 1)
            // strides[i]
            + 1
            for i in (0, 1)
        ]
        positions = sides[0] * sides[1]
        patch_numbers = self.models * len(x) * weight[0].numel() * positions
        if patch_numbers * x.element_size() > MAX_PATCH_BYTES:
            return torch.conv2d(x, weight, bias, stride, padding, dilation, groups)
        kernel = tuple(weight.shape[2:])
        patches = F.unfold(x, kernel, dilations, paddings, strides)  # (n, patch, positions)
        output = weight.flatten(1) @ patches
        if bias is not None:
            output = output + bias[:, None]
        return output.unflatten(-1, sides)
