"""Standard networks of the literature for small images and short texts: VGG11, ResNet-18, fastText.

Each maps (B, *shape) to features (B, width).
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from unalike.base.errors import UserError
from unalike.models.checks import Size

Norm = Literal["batch", "group", "none"]


class VGG11(nn.Module):
    """Eight 3x3 convolutions in five stages, halved after each, then the mean: to (B, 8 base).

    Args:
        shape: images of 32 pixels a side or more.
        base: channels of the first stage, 64 in the paper.

    Reference: Simonyan and Zisserman 2015, configuration A, https://arxiv.org/abs/1409.1556
    """

    def __init__(self, shape: Sequence[int], base: Size = 64, norm: Norm = "batch"):
        super().__init__()
        if len(shape) != 3 or min(shape[1:]) < 32:
            raise UserError(
                "vgg11 halves images five times: "
                f"it takes (channels, 32 or more, 32 or more), got {tuple(shape)}"
            )
        layers: list[nn.Module] = []
        before = shape[0]
        for stage in ((1,), (2,), (4, 4), (8, 8), (8, 8)):
            for factor in stage:
                after = factor * base
                conv = nn.Conv2d(before, after, 3, padding=1, bias=norm == "none")
                layers += [conv, build_norm(norm, after), nn.ReLU()]
                before = after
            layers.append(nn.MaxPool2d(2))
        self.layers = nn.Sequential(*layers)
        self.width = before
        init_convolutions(self)

    def grid(self, x: Tensor) -> Tensor:
        """The feature map (B, width, h, w) that `forward` averages."""
        return self.layers(channels_last(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.grid(x).mean((-2, -1))


class ResNet18(nn.Module):
    """Four stages of two residual blocks; a 3x3 first layer, as for small images: to (B, 8 base).

    Args:
        shape: images of 8 pixels a side or more.
        size: resize images to this side first.

    Reference: He et al. 2016, section 4.2, https://arxiv.org/abs/1512.03385
    """

    def __init__(
        self, shape: Sequence[int], base: Size = 64, norm: Norm = "batch", size: Size | None = None
    ):
        super().__init__()
        if size and len(shape) == 3:
            shape = (shape[0], size, size)
        if len(shape) != 3 or min(shape[1:]) < 8:
            raise UserError(
                "resnet18 halves images three times: "
                f"it takes (channels, 8 or more, 8 or more), got {tuple(shape)}"
            )
        self.size = size
        self.has_fixed_trunk = size is not None
        self.first = nn.Sequential(
            nn.Conv2d(shape[0], base, 3, padding=1, bias=False), build_norm(norm, base), nn.ReLU()
        )
        widths = [base, base, base, 2 * base, 2 * base, 4 * base, 4 * base, 8 * base, 8 * base]
        self.blocks = nn.Sequential(*(Residual(a, b, norm) for a, b in pairwise(widths)))
        self.width = widths[-1]
        init_convolutions(self)

    def trunk(self, x: Tensor) -> Tensor:
        """Images resized to `size`."""
        if self.size is None or x.shape[-2:] == (self.size, self.size):
            return x
        return interpolate(
            x, size=(self.size, self.size), mode="bilinear", align_corners=False, antialias=True
        )

    def grid(self, x: Tensor) -> Tensor:
        """The feature map (B, width, h, w) that `forward` averages."""
        return self.blocks(self.first(channels_last(self.trunk(x))))

    def forward(self, x: Tensor) -> Tensor:
        return self.grid(x).mean((-2, -1))


class Residual(nn.Module):
    """Two 3x3 convolutions added to their input.

    Where the width grows the image is halved, and the input passes a 1x1 convolution.
    """

    def __init__(self, before: int, after: int, norm: Norm):
        super().__init__()
        stride = 1 if before == after else 2
        self.inner = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            build_norm(norm, after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            build_norm(norm, after),
        )
        self.beside: nn.Module = nn.Identity()
        if stride > 1:
            self.beside = nn.Sequential(
                nn.Conv2d(before, after, 1, 2, bias=False), build_norm(norm, after)
            )

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) + self.beside(x)).relu()


class FastText(nn.Module):
    """The mean of a text's word vectors and a linear layer: word numbers (B, words) to (B, width).

    Word number 0 is padding.
    Reference: Joulin et al. 2016, https://arxiv.org/abs/1607.01759
    """

    def __init__(
        self, shape: Sequence[int], words: Size = 20001, embedding: Size = 128, width: Size = 128
    ):
        super().__init__()
        if len(shape) != 1:
            raise UserError(
                f"fasttext takes texts as rows of word numbers, (words,), got {tuple(shape)}"
            )
        self.width = width
        self.vectors = nn.Embedding(words, embedding)
        self.linear = nn.Linear(embedding, width)

    def forward(self, x: Tensor) -> Tensor:
        mask = (x > 0).unsqueeze(-1).to(self.vectors.weight.dtype)
        mean = (self.vectors(x) * mask).sum(1) / mask.sum(1).clamp(min=1)
        return self.linear(mean).relu()


def channels_last(x: Tensor) -> Tensor:
    """Images in the memory layout in which convolutions and batch norms are fast.

    In a stack of models they stay as they are: torch.func.vmap knows no layouts.
    """
    if torch._C._functorch.is_batchedtensor(x):
        return x
    return x.contiguous(memory_format=torch.channels_last)


def build_norm(norm: Norm, channels: int) -> nn.Module:
    """The normalisation layer of that name."""
    if norm not in ("batch", "group", "none"):
        raise UserError(f'norm is "batch", "group" or "none", got {norm!r}')
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(math.gcd(8, channels), channels) if norm == "group" else nn.Identity()


def init_convolutions(model: nn.Module) -> None:
    """Kaiming initialisation of all convolutions, in place."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
