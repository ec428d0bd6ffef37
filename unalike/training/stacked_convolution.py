"""1x1 convolutions of a stack of models as matrix products.

torch.func.vmap makes one grouped convolution of the convolutions of many models. Of 1x1 kernels
cuDNN runs one group after another: with 50 models that took two thirds of a step.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

NEUTRAL = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}


class PointwiseConvolutions(TorchFunctionMode):
    """Within it, `conv2d` of 1x1 kernels at every pixel is a product of matrices."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.conv2d:
            return convolve(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *numbers: Any, **named: Any
) -> Tensor:
    """What `torch.conv2d` gives for images (n, channels, height, width).

    >>> x, weight = torch.randn(2, 3, 5, 4), torch.randn(6, 3, 1, 1)
    >>> torch.allclose(convolve(x, weight), torch.conv2d(x, weight), atol=1e-5)
    True
    """
    options = NEUTRAL | dict(zip(NEUTRAL, numbers, strict=False)) | named
    neutral = all(options[name] in (value, (value, value)) for name, value in NEUTRAL.items())
    if x.ndim != 4 or weight.shape[2:] != (1, 1) or not neutral:
        return torch.conv2d(x, weight, bias, *numbers, **named)
    output = weight.flatten(1) @ x.flatten(2)
    if bias is not None:
        output = output + bias[:, None]
    return output.unflatten(-1, x.shape[2:])
