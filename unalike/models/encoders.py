"""Small encoders trained from scratch. Each maps (B, *shape) to features (B, width)."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from unalike.base.errors import UserError
from unalike.models.checks import Size, check_image, check_positive


class MLP(nn.Module):
    """Linear layers with ReLU between, on the flattened input: (B, *shape) to (B, width)."""

    def __init__(self, shape: Sequence[int], hidden: Sequence[Size] = (64,), width: Size = 64):
        super().__init__()
        check_positive("mlp", shape=shape, hidden=hidden, width=width)
        self.width = width
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise([math.prod(shape), *hidden, width]):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class CNN(nn.Module):
    """Stages of 3x3 convolution, norm and ReLU with 2x2 pooling between: (B, *shape) to (B, width).

    `norm` is "none", "batch" or "group".
    """

    def __init__(
        self,
        shape: Sequence[int],
        channels: Sequence[Size] = (16, 32),
        width: Size = 64,
        norm: Literal["none", "batch", "group"] = "none",
    ):
        super().__init__()
        check_image("cnn", shape)
        check_positive("cnn", shape=shape, channels=channels, width=width)
        if norm not in ("none", "batch", "group"):
            raise UserError(f'cnn has norm "none", "batch" or "group", got {norm!r}')
        if not channels or min(shape[1:]) < 2 ** (len(channels) - 1):
            raise UserError(
                f"cnn needs one stage or more and halves the image between stages: "
                f"{len(channels)} stages do not fit an image of {shape[1]}x{shape[2]}"
            )
        self.width = width
        layers: list[nn.Module] = []
        for before, after in zip([shape[0], *channels], channels):
            if layers:
                layers.append(nn.MaxPool2d(2))
            layers.append(nn.Conv2d(before, after, 3, padding=1))
            if norm == "batch":
                layers.append(nn.BatchNorm2d(after))
            elif norm == "group":
                layers.append(nn.GroupNorm(math.gcd(8, after), after))
            layers.append(nn.ReLU())
        self.layers = nn.Sequential(*layers, nn.Conv2d(channels[-1], width, 1))
        # torch's default shrinks the signal at every stage, and small data never recover it
        for layer in self.layers:
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    def grid(self, x: Tensor) -> Tensor:
        """The feature map (B, width, h, w) that `forward` averages."""
        return self.layers(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.grid(x).mean((-2, -1))


class Transformer(nn.Module):
    """A small vision transformer: patches, learned positions, pre-norm: (B, *shape) to (B, width).

    Features are the mean over patches; there is no class token and no dropout.
    Reference: Dosovitskiy et al. 2021, https://arxiv.org/abs/2010.11929
    """

    def __init__(
        self,
        shape: Sequence[int],
        patch: Size = 2,
        depth: Size = 2,
        heads: Size = 4,
        width: Size = 32,
    ):
        super().__init__()
        check_image("transformer", shape)
        check_positive(
            "transformer", shape=shape, patch=patch, depth=depth, heads=heads, width=width
        )
        if shape[1] % patch or shape[2] % patch:
            raise UserError(
                f"transformer cuts the image into patches: {patch} must divide height and width, "
                f"got {shape[1]}x{shape[2]}"
            )
        if width % heads:
            raise UserError(
                f"transformer shares its width among heads: "
                f"{heads} heads do not divide width {width}"
            )
        self.width = width
        patches = (shape[1] // patch) * (shape[2] // patch)
        self.embed = nn.Conv2d(shape[0], width, patch, stride=patch)
        # of the size of an embedded patch: with smaller ones small data learn slowly
        self.positions = nn.Parameter(0.2 * torch.randn(patches, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)

    def grid(self, x: Tensor) -> Tensor:
        """The feature map (B, width, h, w) that `forward` averages."""
        patches = self.embed(x)  # (B, width, h, w)
        tokens = patches.flatten(2).mT + self.positions  # (B, h w, width)
        return self.norm(self.blocks(tokens)).mT.reshape(patches.shape)

    def forward(self, x: Tensor) -> Tensor:
        return self.grid(x).mean((-2, -1))


class Block(nn.Module):
    """A pre-norm transformer block: attention, then two linear layers, both residual.

    (B, tokens, width) to the same shape.
    """

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.before_mixing = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.after_attention = nn.Linear(width, width)
        self.mixing = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.attention(self.before_attention(tokens))
        return tokens + self.mixing(self.before_mixing(tokens))

    def attention(self, tokens: Tensor) -> Tensor:
        """Self-attention in plain operations.

        The fused kernel has no batching rule on a CPU, so vmap would run it client by client.
        """
        parts = self.queries_keys_values(tokens).unflatten(-1, (3, self.heads, -1))
        q, k, v = parts.permute(2, 0, 3, 1, 4)  # each (B, heads, tokens, width / heads)
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        return self.after_attention((weights @ v).transpose(1, 2).flatten(2))
