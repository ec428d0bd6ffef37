"""Encoders of time series, trained from scratch: (B, channels, steps) to features (B, width).

Each has `grid(x)`, the features of every step (B, width, steps), for tasks that label steps. For
texts there are `gru`, `fasttext`, `reader` and `minilm`.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from unalike.base.errors import UserError
from unalike.models.checks import Size, check_positive
from unalike.models.encoders import Block


def check_series(name: str, shape: Sequence[int]) -> None:
    """Raise UserError unless the shape is (channels, steps)."""
    if len(shape) != 2:
        raise UserError(
            f"{name} takes time series of shape (channels, steps), got {tuple(shape)}; "
            "a series of one channel is x.unsqueeze(1)"
        )


class CNN1d(nn.Module):
    """Stages of convolution, norm and ReLU with pooling by 2 between: (B, channels, steps).

    Args:
        channels: of each stage.
        kernel: steps that a convolution sees, an odd number.
        norm: "none", "batch" or "group".
        pool: halve the steps between stages; False: `grid` keeps one place per step.
    """

    def __init__(
        self,
        shape: Sequence[int],
        channels: Sequence[Size] = (16, 32),
        width: Size = 64,
        kernel: Size = 5,
        norm: Literal["none", "batch", "group"] = "none",
        pool: bool = True,
    ):
        super().__init__()
        check_series("cnn1d", shape)
        check_positive("cnn1d", shape=shape, channels=channels, width=width, kernel=kernel)
        if norm not in ("none", "batch", "group"):
            raise UserError(f'cnn1d has norm "none", "batch" or "group", got {norm!r}')
        if kernel % 2 == 0:
            raise UserError(f"cnn1d needs an odd kernel, so that steps keep their place: {kernel}")
        if not channels or (pool and shape[1] < 2 ** (len(channels) - 1)):
            raise UserError(
                "cnn1d needs one stage or more and halves the series between stages: "
                f"{len(channels)} stages do not fit {shape[1]} steps"
            )
        self.width = width
        layers: list[nn.Module] = []
        for before, after in zip([shape[0], *channels], channels):
            if layers and pool:
                layers.append(nn.MaxPool1d(2))
            layers.append(nn.Conv1d(before, after, kernel, padding=kernel // 2))
            if norm == "batch":
                layers.append(nn.BatchNorm1d(after))
            elif norm == "group":
                layers.append(nn.GroupNorm(math.gcd(8, after), after))
            layers.append(nn.ReLU())
        self.layers = nn.Sequential(*layers, nn.Conv1d(channels[-1], width, 1))
        # torch's default shrinks the signal at every stage, and small data never recover it
        for layer in self.layers:
            if isinstance(layer, nn.Conv1d):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    def grid(self, x: Tensor) -> Tensor:
        """Features (B, width, steps) that `forward` averages; fewer steps where it pools."""
        return self.layers(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.grid(x).mean(-1)


class GRU1d(nn.Module):
    """A bidirectional GRU over the steps, averaged: (B, channels, steps) to (B, width).

    Reference: Chung et al. 2014, https://arxiv.org/abs/1412.3555
    """

    def __init__(self, shape: Sequence[int], width: Size = 64, depth: Size = 1):
        super().__init__()
        check_series("gru1d", shape)
        check_positive("gru1d", shape=shape, width=width, depth=depth)
        self.width = width
        self.ahead = nn.GRU(shape[0], width, depth, batch_first=True)
        self.back = nn.GRU(shape[0], width, depth, batch_first=True)

    def grid(self, x: Tensor) -> Tensor:
        """Features (B, width, steps), the mean of both directions."""
        steps = x.mT
        backward = self.back(steps.flip(1))[0].flip(1)
        return ((self.ahead(steps)[0] + backward) / 2).mT

    def forward(self, x: Tensor) -> Tensor:
        return self.grid(x).mean(-1)


class Transformer1d(nn.Module):
    """Patches of steps, learned positions, pre-norm blocks: (B, channels, steps) to (B, width).

    Reference: Nie et al. 2023 (patches of time series), https://arxiv.org/abs/2211.14730
    """

    def __init__(
        self,
        shape: Sequence[int],
        patch: Size = 4,
        depth: Size = 2,
        heads: Size = 4,
        width: Size = 32,
    ):
        super().__init__()
        check_series("transformer1d", shape)
        check_positive(
            "transformer1d", shape=shape, patch=patch, depth=depth, heads=heads, width=width
        )
        if shape[1] % patch:
            raise UserError(
                f"transformer1d cuts the series into patches: {patch} must divide its "
                f"{shape[1]} steps"
            )
        if width % heads:
            raise UserError(
                "transformer1d shares its width among heads: "
                f"{heads} heads do not divide width {width}"
            )
        self.width = width
        self.embed = nn.Conv1d(shape[0], width, patch, stride=patch)
        # of the size of an embedded patch: with smaller ones small data learn slowly
        self.positions = nn.Parameter(0.2 * torch.randn(shape[1] // patch, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)

    def grid(self, x: Tensor) -> Tensor:
        """Features (B, width, patches) that `forward` averages."""
        tokens = self.embed(x).mT + self.positions  # (B, patches, width)
        return self.norm(self.blocks(tokens)).mT

    def forward(self, x: Tensor) -> Tensor:
        return self.grid(x).mean(-1)
