"""The list of encoders by name. Encoder files do not import it."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from unalike.base.errors import UserError, suggest_name, unknown_name
from unalike.base.registry import find_named
from unalike.models.autoencoder import Autoencoder
from unalike.models.causal import Causal
from unalike.models.checks import Size
from unalike.models.classics import VGG11, FastText, ResNet18
from unalike.models.clip import Clip, Siglip
from unalike.models.efficientnet import EfficientNetLite
from unalike.models.encoders import CNN, MLP, Transformer
from unalike.models.gru import GRU
from unalike.models.hub import Hub
from unalike.models.image_text_pair import ImageTextPair, image_and_text_names
from unalike.models.late_fusion import LateFusion
from unalike.models.minilm import MiniLM
from unalike.models.reader import Reader
from unalike.models.series import CNN1d, GRU1d, Transformer1d
from unalike.models.small_vlm import SmallVLM
from unalike.models.table import TableEncoder
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


def build_late_fusion(
    shape: Mapping[str, Sequence[int]],
    encoder: dict[str, Any] | None = None,
    encoders: dict[str, dict[str, Any]] | None = None,
    width: Size = 64,
) -> LateFusion:
    """Modalities by name to (B, width), the mean of those that a sample has.

    Args:
        shape: of one input of each modality.
        encoder: of every modality: its name with its options; default: {name: mlp}.
        encoders: of single modalities, by name, instead.
    """
    if not isinstance(shape, Mapping):
        raise UserError(
            "late_fusion takes inputs by modality, {name: tensor}, and the data have one kind of "
            "input: use its encoder itself"
        )
    unknown = [name for name in encoders or {} if name not in shape]
    if unknown:
        raise UserError(unknown_name("modality", unknown[0], list(shape)))
    built: dict[str, nn.Module] = {}
    for name, own_shape in shape.items():
        config = (encoders or {}).get(name) or encoder or {"name": "mlp"}
        if "name" not in config:
            raise UserError(f"the encoder of {name} needs a name, such as {{name: mlp}}")
        options = {key: value for key, value in config.items() if key != "name"}
        built[name] = build_encoder(config["name"], own_shape, options)
    shapes = {name: tuple(own_shape) for name, own_shape in shape.items()}
    return LateFusion(built, shapes, width)


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
    "causal": Causal,
    "minilm": MiniLM,
    "clip": Clip,
    "siglip": Siglip,
    "vlm-tiny": TinyVLM,
    "vlm-small": SmallVLM,
    "gru": GRU,
    "cnn1d": CNN1d,
    "gru1d": GRU1d,
    "transformer1d": Transformer1d,
    "table": TableEncoder,
    "pair": build_pair,
    "late_fusion": build_late_fusion,
}
MULTIMODAL = ("autoencoder", "pair", "late_fusion")  # the others take one tensor


def build_encoder(
    name: str, shape: Sequence[int] | Mapping[str, Sequence[int]], options: dict
) -> nn.Module:
    """Build the encoder of that name.

    Args:
        name: of a shipped encoder or one of an installed package; or `module:name` of a class or
            function that returns a module.
        shape: of one input without the row axis; by name where inputs are modalities. Encoders of
            your own get it if they have a parameter `shape`.
        options: the encoder's other arguments.
    Raises: UserError for an unknown name or option, or a shape it does not take.

    >>> build_encoder("mlp", (1, 8, 8), {"width": 16}).width
    16
    """
    encoder = find_named("model", name, ENCODERS)
    parameters = inspect.signature(encoder).parameters
    known = [option for option in parameters if option != "shape"]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for option in options:
        if option not in known and not takes_any:
            raise UserError(
                f'{name} has no field "{option}".{suggest_name(option, known)} '
                f"It has: {', '.join(known)}."
            )
    if "shape" not in parameters:
        return encoder(**options)
    if not isinstance(shape, Mapping):
        return encoder(shape=tuple(shape), **options)
    if name in ENCODERS and name not in MULTIMODAL:
        raise UserError(
            f"{name} takes one kind of input, the data have modalities {', '.join(shape)}; "
            f"use {' or '.join(MULTIMODAL)}"
        )
    return encoder(shape=shape, **options)
