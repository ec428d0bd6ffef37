"""Image encoders in the format of Hugging Face (ViT, DINOv2, Swin, ResNet), whole or with LoRA.

Also what encoders of texts (reader.py) and language models share: loading, and LoRA.
"""

import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unalike.base.errors import UserError, suggest_name
from unalike.base.randomness import scope
from unalike.models.checks import check_image
from unalike.models.frozen import Frozen

# normalisation where the model's files do not say
DEFAULT_PREPROCESSING = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
# the layers that LoRA's authors adapt, by the names that models have for them
ATTENTION = (
    *("q_proj", "v_proj", "query", "value", "q_lin", "v_lin"),
    *("qkv", "qkv_proj", "query_key_value", "c_attn", "Wqkv"),
)
NEEDS_HUB = "models of the hub need transformers and peft: pip install 'unalike[hub]'"


class Hub(Frozen):
    """A pretrained image model by its name on the Hugging Face hub, or its folder.

    Images in [0, 1], (B, *shape) to (B, width); resized to the model's input size and normalised as
    its preprocessor file says. Needs `pip install unalike[hub]`.

    Args:
        model: name or folder.
        lora: rank of LoRA adapters that learn while the model is frozen; 0: all of it learns.
        size: side of the resized image, for models that take any.
        targets: layers that get adapters, by the last parts of their names; default: attention.
        config: instead of `model`, a config with its `model_type`: random weights.
    """

    def __init__(
        self,
        shape: Sequence[int],
        model: str = "",
        lora: int = 0,
        size: int | None = None,
        targets: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
    ):
        super().__init__()
        self.image_mean: Tensor
        self.image_std: Tensor
        check_image("hub", shape)
        check_source("hub", model, config, lora)
        self.model, preprocessing = load_vision_model(model, config, frozen=lora > 0)
        channels = getattr(self.model.config, "num_channels", 3)
        if shape[0] not in (1, channels):
            raise UserError(
                f"hub: the model takes images of {channels} channels, or of 1, which is repeated; "
                f"these have shape {tuple(shape)}. A config may say num_channels: {shape[0]}"
            )
        self.size = size or input_size(self.model.config, preprocessing, shape)
        for name in ("image_mean", "image_std"):
            values = torch.tensor(preprocessing[name]).reshape(1, -1, 1, 1)
            if values.shape[1] != channels:  # three, by default, of a model that takes others
                values = values.mean().expand(1, channels, 1, 1).clone()
            self.register_buffer(name, values, persistent=False)
        if lora:
            add_lora(self.model, lora, targets)
            self.exclude_frozen()
        self.eval()
        with torch.no_grad():
            self.width = self.grid(torch.zeros(1, *shape)).shape[1]
        self.train()

    def grid(self, x: Tensor) -> Tensor:
        """The feature map (B, width, h, w) that `forward` averages."""
        images = preprocess(x, self.size, self.image_mean, self.image_std)
        last = self.model(pixel_values=images).last_hidden_state
        if last.ndim == 4:
            return last
        # tokens (B, L, width): class and register tokens come first, fewer than 2 side + 1
        side = math.isqrt(last.shape[1])
        return last[:, last.shape[1] - side * side :].mT.unflatten(-1, (side, side))

    def forward(self, x: Tensor) -> Tensor:
        return self.grid(x).mean((-2, -1))

    def save_preprocessing(self, folder: str | os.PathLike) -> None:
        """Write preprocessor_config.json, by which transformers prepares images as done here."""
        settings = {
            "image_processor_type": "ViTImageProcessor",
            "do_resize": True,
            "size": {"height": self.size, "width": self.size},
            "resample": 2,  # bilinear
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": self.image_mean.flatten().tolist(),
            "image_std": self.image_std.flatten().tolist(),
        }
        Path(folder, "preprocessor_config.json").write_text(json.dumps(settings, indent=1))


def preprocess(x: Tensor, size: int, mean: Tensor, std: Tensor) -> Tensor:
    """Resize and normalise images in [0, 1] to (n, channels, size, size).

    Args:
        x: (n, channels or 1, h, w); one channel is repeated.
        mean: (1, channels, 1, 1), and so is `std`.
    """
    x = F.interpolate(x, size=(size, size), mode="bilinear", align_corners=False, antialias=True)
    return (x.expand(-1, mean.shape[1], -1, -1) - mean) / std


def load_vision_model(
    name: str, config: Mapping[str, Any] | None = None, frozen: bool = False
) -> tuple[Any, dict[str, Any]]:
    """A model's image encoder, and how its images are preprocessed; see `load_model`."""
    model, preprocessing = load_pretrained(name, config, frozen)
    model = getattr(model, "vision_model", model)
    if getattr(model, "main_input_name", "") != "pixel_values":
        raise UserError(
            f"hub takes models of images, {name or 'the config'!r} is {type(model).__name__}; "
            "the model reader takes texts"
        )
    return model, preprocessing


def load_pretrained(
    name: str, config: Mapping[str, Any] | None = None, frozen: bool = False
) -> tuple[Any, dict[str, Any]]:
    """A whole model, and how its images are preprocessed; see `load_model`.

    Returns: the model, and a dict with `image_mean`, `image_std` and perhaps `size`, `crop_size`.
    """
    model = load_model("hub", "AutoModel", name, config, frozen)
    stored: dict[str, Any] = {}
    if config is None:
        from transformers.image_processing_base import ImageProcessingMixin

        with suppress(OSError):
            stored = ImageProcessingMixin.get_image_processor_dict(name)[0]
    preprocessing: dict[str, Any] = dict(DEFAULT_PREPROCESSING)
    for key in (*DEFAULT_PREPROCESSING, "size", "crop_size"):
        if stored.get(key) is not None:
            preprocessing[key] = stored[key]
    return model, preprocessing


def check_source(encoder: str, model: str, config: Mapping[str, Any] | None, lora: int = 0) -> None:
    """Raise UserError unless there is a name or a config, and a rank of LoRA that can be."""
    if bool(model) == (config is not None) or lora < 0:
        raise UserError(
            f"{encoder} needs the model's name or folder (model: ...), or else a config with its "
            f"model_type (config: ...), and a rank of LoRA of 0 or more; got model {model!r}, "
            f"config {config!r}, lora {lora}"
        )


def load_model(
    encoder: str,
    auto_class: str,
    name: str,
    config: Mapping[str, Any] | None = None,
    frozen: bool = False,
) -> Any:
    """A transformers model: of that name or folder, or with random weights from a config.

    Args:
        encoder: for error messages.
        auto_class: of transformers, e.g. "AutoModel".
        frozen: random weights (from a config, or missing in the files) do not depend on the run's
            seed and the client: all clients have the same ones under their adapters.
    """
    try:
        import transformers
    except ImportError:
        raise UserError(NEEDS_HUB) from None
    auto = getattr(transformers, auto_class)
    if config is None:
        check_folder(encoder, name)
        try:
            # weights that the files lack, such as a pooler's, are random
            with scope(0, "missing weights") if frozen else nullcontext():
                return auto.from_pretrained(name)
        except (OSError, ValueError) as problem:
            reason = str(problem).splitlines()[0]
            raise UserError(f"{encoder} cannot load {name!r}: {reason}") from None
    try:
        whole = transformers.AutoConfig.for_model(**config)
        text = json.dumps(dict(config), sort_keys=True)
        with scope(0, "config", text) if frozen else nullcontext():
            return auto.from_config(whole)
    except (TypeError, ValueError, KeyError) as problem:
        reason = str(problem).splitlines()[0][:200]
        raise UserError(
            f"{encoder} cannot build a model from the config {dict(config)!r}: {reason}; "
            "it has a model_type, such as vit or bert, and the fields of that type's config"
        ) from None


def check_folder(encoder: str, name: str) -> None:
    """Raise UserError if a name can only be a folder's and there is no such folder.

    No name on the hub has two slashes.
    """
    is_path = name.startswith(("/", ".", "~")) or "\\" in name or name.count("/") > 1
    if is_path and not os.path.isdir(name):
        raise UserError(
            f"{encoder} cannot load {name!r}: there is no such folder; "
            "give a folder that save_pretrained wrote, or a name on the hub, owner/model"
        )


def input_size(config: Any, preprocessing: dict[str, Any], shape: Sequence[int]) -> int:
    """Side of the model's input images in pixels.

    As in the model's config, else as its images were preprocessed, else as the images are.
    """
    stored = preprocessing.get("crop_size") or preprocessing.get("size") or {}
    if not isinstance(stored, dict):
        return stored
    sides = (getattr(config, "image_size", None), *stored.values(), shape[1])
    return next(side for side in sides if isinstance(side, int))


def add_lora(model: nn.Module, rank: int, names: Sequence[str] = ()) -> None:
    """Freeze the model and add LoRA adapters, in place.

    They go into the layers named; by default into attention; without attention into all linear
    layers; without these into all convolutions. The product B A is scaled by 2 at every rank.
    Reference: Hu et al. 2022, https://arxiv.org/abs/2106.09685

    Args:
        names: last parts of layers' names, e.g. ["q_proj", "mlp.fc1"].
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise UserError("LoRA needs peft: pip install 'unalike[hub]'") from None
    linear, convolutions = find_adaptable(model)
    if names:
        targets = match_targets(model, [*linear, *convolutions], names)
    else:
        attention = [name for name in linear if name.rsplit(".", 1)[-1] in ATTENTION]
        targets = attention or linear or convolutions
    if not targets:
        leaves = []
        for name, layer in model.named_modules():
            if name and not list(layer.children()):
                leaves.append(f"{name} ({type(layer).__name__})")
        raise UserError(
            f"LoRA finds no linear layer or convolution in {type(model).__name__}; it has "
            f"{', '.join(leaves[:20]) or 'no layers'}"
        )
    transposed = any(is_transposed(model.get_submodule(name)) for name in targets)
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=targets, fan_in_fan_out=transposed
    )
    with warnings.catch_warnings():
        # peft says that it turns fan_in_fan_out off for plain linear layers among the targets
        warnings.simplefilter("ignore")
        inject_adapter_in_model(config, model)
    for name in targets:
        adapted: Any = model.get_submodule(name)
        if isinstance(adapted.base_layer, nn.Conv2d):  # some models ask convolutions for these
            for attribute in ("kernel_size", "stride", "padding", "dilation"):
                setattr(adapted, attribute, getattr(adapted.base_layer, attribute))


def find_adaptable(model: nn.Module) -> tuple[list[str], list[str]]:
    """Names of linear layers and of convolutions that can get LoRA adapters; poolers are not used.

    Output embeddings (`lm_head`) are left out.
    """
    linear, convolutions = [], []
    for name, layer in model.named_modules():
        if not name or name.startswith("pooler") or name.endswith("lm_head"):
            continue
        if isinstance(layer, nn.Linear) or is_transposed(layer):
            linear.append(name)
        elif isinstance(layer, nn.Conv2d) and layer.groups == 1:
            convolutions.append(name)
    return linear, convolutions


def is_transposed(layer: nn.Module) -> bool:
    """Whether a layer is GPT-2's linear layer, whose weight is (inputs, outputs)."""
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")


def match_targets(model: nn.Module, available: Sequence[str], names: Sequence[str]) -> list[str]:
    """Layers whose names end with one of these; UserError for one that matches none."""
    targets = []
    for wanted in names:
        found = [name for name in available if f".{name}".endswith(f".{wanted}")]
        if not found:
            ends = sorted({name.rsplit(".", 1)[-1] for name in available})
            raise UserError(
                f"LoRA finds no layer {wanted!r} in {type(model).__name__}."
                f"{suggest_name(wanted, ends)} It has: {', '.join(ends)}."
            )
        targets += found
    return list(dict.fromkeys(targets))
