"""The list of encoders by name. Encoder files do not import it."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from unalike.base.errors import UserError, suggest_name, unknown_name
from unalike.models.autoencoder import Autoencoder
from unalike.models.classics import VGG11, FastText, ResNet18
from unalike.models.clip import Clip, Siglip
from unalike.models.efficientnet import EfficientNetLite
from unalike.models.encoders import CNN, MLP, Transformer
from unalike.models.gru import GRU
from unalike.models.hub import Hub
from unalike.models.image_text_pair import ImageTextPair, image_and_text_names
from unalike.models.minilm import MiniLM
from unalike.models.reader import Reader
from unalike.models.small_vlm import SmallVLM
from unalike.models.tiny_vlm import TinyVLM


def build_pair(
    shape: Mapping[str, Sequence[int]],
    image: dict[str, Any],
    text: dict[str, Any],
    width: int = 128,
) -> ImageTextPair:
    """An image and its text, each by an encoder of its own: modalities by name to (B, 2, width).

    Args:
        shape: of one image (channels, height, width) and one text (words,), by modality.
        image, text: an encoder's name with its options, such as {name: cnn, channels: [8, 16]}.
    """
    encoders: dict[str, nn.Module] = {}
    for name, config in zip(image_and_text_names(shape), (image, text), strict=True):
        options = {key: value for key, value in config.items() if key != "name"}
        encoders[name] = build_encoder(config["name"], shape[name], options)
    return ImageTextPair(encoders, width)


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
    "pair": build_pair,
}
MULTIMODAL = ("autoencoder", "pair")  # the others take one tensor


def build_encoder(
    name: str, shape: Sequence[int] | Mapping[str, Sequence[int]], options: dict
) -> nn.Module:
    """Build the encoder of that name.

    Args:
        shape: of one input without the row axis; by name where inputs are modalities.
        options: the encoder's other arguments.
    Raises: UserError for an unknown name or option, or a shape it does not take.

    >>> build_encoder("mlp", (1, 8, 8), {"width": 16}).width
    16
    """
    if name not in ENCODERS:
        raise UserError(unknown_name("model", name, ENCODERS))
    parameters = inspect.signature(ENCODERS[name]).parameters
    known = [option for option in parameters if option != "shape"]
    for option in options:
        if option not in known:
            raise UserError(
                f'{name} has no field "{option}".{suggest_name(option, known)} '
                f"It has: {', '.join(known)}."
            )
    if not isinstance(shape, Mapping):
        return ENCODERS[name](tuple(shape), **options)
    if name not in MULTIMODAL:
        raise UserError(
            f"{name} takes one kind of input, the data have modalities {', '.join(shape)}; "
            f"use {' or '.join(MULTIMODAL)}"
        )
    return ENCODERS[name](shape, **options)
