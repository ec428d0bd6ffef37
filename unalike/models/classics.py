"""Networks that papers measure on, for small images and short texts: VGG11, ResNet-18 and fastText. Knows nothing of tasks or methods."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from unalike.models.autoencoder import Size

Norm = Literal["batch", "group", "none"]


class VGG11(nn.Module):
    """Eight 3x3 convolutions in five stages, halved after each (Simonyan 2014, A), then the mean: (B, *shape) to (B, 8 base).

    `base` is the channels of the first stage, 64 in the paper; images of 32 pixels a side or more.
    """

    def __init__(self, shape: Sequence[int], base: Size = 64, norm: Norm = "batch"):
        super().__init__()
        if len(shape) != 3 or min(shape[1:]) < 32:
            raise ValueError(
                f"vgg11 halves images five times: it takes (channels, 32 or more, 32 or more), got {tuple(shape)}"
            )
        layers: list[nn.Module] = []
        before = shape[0]
        for times in (1, "half", 2, "half", 4, 4, "half", 8, 8, "half", 8, 8, "half"):
            if isinstance(times, str):
                layers.append(nn.MaxPool2d(2))
                continue
            layers += [
                nn.Conv2d(before, times * base, 3, padding=1, bias=norm == "none"),
                normed(norm, times * base),
                nn.ReLU(),
            ]
            before = times * base
        self.layers, self.width = nn.Sequential(*layers), before
        start(self)

    def grid(self, x: Tensor) -> Tensor:
        """The feature map (B, width, h, w) that `forward` averages."""
        return self.layers(channels_last(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.grid(x).mean((-2, -1))


class ResNet18(nn.Module):
    """Four stages of two residual blocks, the first layer 3x3 as for small images (He 2016, 4.2): (B, *shape) to (B, 8 base).

    `size` is the side images are brought to first, if not as they are.
    """

    def __init__(
        self, shape: Sequence[int], base: Size = 64, norm: Norm = "batch", size: Size | None = None
    ):
        super().__init__()
        shape, self.size, self.has_fixed_trunk = (
            (shape[0], size, size) if size and len(shape) == 3 else shape,
            size,
            size is not None,
        )
        if len(shape) != 3 or min(shape[1:]) < 8:
            raise ValueError(
                f"resnet18 halves images three times: it takes (channels, 8 or more, 8 or more), got {tuple(shape)}"
            )
        self.first = nn.Sequential(
            nn.Conv2d(shape[0], base, 3, padding=1, bias=False), normed(norm, base), nn.ReLU()
        )
        widths = [base, base, base, 2 * base, 2 * base, 4 * base, 4 * base, 8 * base, 8 * base]
        self.blocks = nn.Sequential(*(Residual(a, b, norm) for a, b in pairwise(widths)))
        self.width = widths[-1]
        start(self)

    def trunk(self, x: Tensor) -> Tensor:
        """Images of its size."""
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
    """Two 3x3 convolutions added to their input; where the width grows the image is halved, and the input goes through a 1x1 one."""

    def __init__(self, before: int, after: int, norm: Norm):
        super().__init__()
        stride = 1 if before == after else 2
        self.inner = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            normed(norm, after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            normed(norm, after),
        )
        self.beside = (
            nn.Identity()
            if stride == 1
            else nn.Sequential(nn.Conv2d(before, after, 1, 2, bias=False), normed(norm, after))
        )

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) + self.beside(x)).relu()


class FastText(nn.Module):
    """The mean of the vectors of a text's words, and a linear layer (Joulin 2016): (B, words) of numbers from 0, no word, to (B, width)."""

    def __init__(
        self, shape: Sequence[int], words: Size = 20001, embedding: Size = 128, width: Size = 128
    ):
        super().__init__()
        if len(shape) != 1:
            raise ValueError(
                f"fasttext takes texts as rows of word numbers, (words,), got {tuple(shape)}"
            )
        self.vectors, self.linear, self.width = (
            nn.Embedding(words, embedding),
            nn.Linear(embedding, width),
            width,
        )

    def forward(self, x: Tensor) -> Tensor:
        there = (x > 0).unsqueeze(-1).to(self.vectors.weight.dtype)
        mean = (self.vectors(x) * there).sum(1) / there.sum(1).clamp(min=1)
        return self.linear(mean).relu()


def channels_last(x: Tensor) -> Tensor:
    """Images laid out so that convolutions and batch norms are fast."""
    return x.contiguous(memory_format=torch.channels_last)


def normed(norm: Norm, channels: int) -> nn.Module:
    if norm not in ("batch", "group", "none"):
        raise ValueError(f'norm is "batch", "group" or "none", got {norm!r}')
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(math.gcd(8, channels), channels) if norm == "group" else nn.Identity()


def start(model: nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
