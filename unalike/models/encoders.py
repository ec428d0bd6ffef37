"""Small encoders, from an input to features of one width. Knows nothing of tasks, heads or methods."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from unalike.base.errors import UserError, suggest_name, unknown_name
from unalike.models.autoencoder import Autoencoder, Size
from unalike.models.classics import VGG11, FastText, ResNet18
from unalike.models.clip import Clip, Siglip
from unalike.models.efficientnet import EfficientNetLite
from unalike.models.hub import Hub
from unalike.models.minilm import MiniLM
from unalike.models.pairs import GRU, Pair
from unalike.models.reader import Reader
from unalike.models.small_vlm import SmallVLM
from unalike.models.tiny_vlm import TinyVLM


class MLP(nn.Module):
    """Linear layers with ReLU between, on the flattened input: (B, *shape) to (B, width)."""

    def __init__(self, shape: Sequence[int], hidden: Sequence[Size] = (64,), width: Size = 64):
        super().__init__()
        check_positive("mlp", shape=shape, hidden=hidden, width=width)
        self.width = width
        sizes = [math.prod(shape), *hidden, width]
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise(sizes):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class CNN(nn.Module):
    """Stages of 3x3 convolution, norm and ReLU, halved between stages: (B, *shape) to (B, width).

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
            raise ValueError(f'cnn has norm "none", "batch" or "group", got {norm!r}')
        if not channels or min(shape[1:]) < 2 ** (len(channels) - 1):
            raise ValueError(
                f"cnn needs one stage or more and halves the image between stages: {len(channels)} stages do not "
                f"fit an image of {shape[1]}x{shape[2]}"
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
        for layer in self.layers:
            if isinstance(
                layer, nn.Conv2d
            ):  # torch's own start shrinks the signal at every stage, and few samples never regrow it
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    def grid(self, x: Tensor) -> Tensor:
        """The feature map (B, width, h, w) that `forward` averages."""
        return self.layers(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.grid(x).mean((-2, -1))


class Transformer(nn.Module):
    """A small vision transformer: patches, learned positions, pre-norm blocks: (B, *shape) to (B, width).

    Features are the mean over patches; there is no class token and no dropout (Dosovitskiy 2021).
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
            raise ValueError(
                f"transformer cuts the image into patches: {patch} must divide height and width, "
                f"got {shape[1]}x{shape[2]}"
            )
        if width % heads:
            raise ValueError(
                f"transformer shares its width among heads: {heads} heads do not divide width {width}"
            )
        self.width = width
        patches = (shape[1] // patch) * (shape[2] // patch)
        self.embed = nn.Conv2d(shape[0], width, patch, stride=patch)
        self.positions = nn.Parameter(
            0.2 * torch.randn(patches, width)
        )  # as loud as a patch, or small data learn slowly
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
    """Attention, then two linear layers, each on normalised tokens and added to them: (B, tokens, width) to the same."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mixing = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.after_attention = nn.Linear(width, width)
        self.mixing = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.attention(self.before_attention(tokens))
        return tokens + self.mixing(self.before_mixing(tokens))

    def attention(self, tokens: Tensor) -> Tensor:
        """Written out: on CPU the fused kernel has no batching rule, and vmap would run it client by client."""
        parts = self.queries_keys_values(tokens).unflatten(-1, (3, self.heads, -1))
        q, k, v = parts.permute(2, 0, 3, 1, 4)  # each (B, heads, tokens, width / heads)
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        return self.after_attention((weights @ v).transpose(1, 2).flatten(2))


ENCODERS: dict[str, Callable[..., nn.Module]] = {
    "mlp": MLP,
    "cnn": CNN,
    "transformer": Transformer,
    "autoencoder": Autoencoder,
    "efficientnet": EfficientNetLite,
    "hub": Hub,
    "vgg11": VGG11,
    "resnet18": ResNet18,
    "fasttext": FastText,
    "reader": Reader,
    "minilm": MiniLM,
    "clip": Clip,
    "siglip": Siglip,
    "vlm-tiny": TinyVLM,
    "vlm-small": SmallVLM,
    "gru": GRU,
    "pair": Pair,
}


def build_encoder(
    name: str, shape: Sequence[int] | Mapping[str, Sequence[int]], options: dict
) -> nn.Module:
    """The encoder of that name for inputs of that shape.

    >>> build_encoder("mlp", (1, 8, 8), {"width": 16}).width
    16
    """
    if name not in ENCODERS:
        raise UserError(unknown_name("model", name, ENCODERS))
    allowed = [
        option for option in inspect.signature(ENCODERS[name]).parameters if option != "shape"
    ]
    for option in options:
        if option not in allowed:
            raise UserError(
                f'{name} has no field "{option}".{suggest_name(option, allowed)} It has: {", ".join(allowed)}.'
            )
    if isinstance(shape, Mapping) and name not in ("autoencoder", "pair"):
        raise UserError(
            f"{name} takes one kind of input, the data have modalities {', '.join(shape)}; use autoencoder or pair"
        )
    return ENCODERS[name](shape if isinstance(shape, Mapping) else tuple(shape), **options)


def check_image(name: str, shape: Sequence[int]) -> None:
    if len(shape) != 3:
        raise ValueError(
            f"{name} takes images of shape (channels, height, width), got {tuple(shape)}"
        )


def check_positive(encoder: str, **sizes: int | Sequence[int]) -> None:
    """Raises ValueError unless every size is a whole number of 1 or more, or several of them."""
    for name, size in sizes.items():
        for number in size if isinstance(size, (list, tuple, torch.Size)) else [size]:
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(
                    f"{encoder} needs {name} of whole numbers of 1 or more, got {size!r}"
                )
