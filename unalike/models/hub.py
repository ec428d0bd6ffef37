"""Image encoders in the format of Hugging Face (ViT, DINOv2, Swin, ResNet), whole or with LoRA."""

import math
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unalike.base.errors import UserError
from unalike.models.checks import check_rgb_or_grey
from unalike.models.frozen import Frozen

# normalisation where the model's files do not say
DEFAULT_PREPROCESSING = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
# the layers that LoRA's authors adapt, by the names that models have for them
ATTENTION = ("q_proj", "v_proj", "query", "value", "q_lin", "v_lin", "qkv")


class Hub(Frozen):
    """A pretrained image model by its name on the Hugging Face hub, or its folder.

    Images in [0, 1], (B, *shape) to (B, width); resized to the model's input size and normalised as
    its preprocessor file says. Needs `pip install unalike[hub]`.

    Args:
        model: name or folder.
        lora: rank of LoRA adapters that learn while the model is frozen; 0: all of it learns.
        size: side of the resized image, for models that take any.
    """

    def __init__(
        self, shape: Sequence[int], model: str = "", lora: int = 0, size: int | None = None
    ):
        super().__init__()
        self.image_mean: Tensor
        self.image_std: Tensor
        check_rgb_or_grey("hub", shape)
        if not model or lora < 0:
            raise UserError(
                "hub needs the model's name or folder, and a rank of LoRA of 0 or more; "
                f"got model {model!r}, lora {lora}"
            )
        self.model, preprocessing = load_vision_model(model)
        self.size = size or input_size(self.model.config, preprocessing, shape)
        for name in ("image_mean", "image_std"):
            values = torch.tensor(preprocessing[name]).reshape(1, -1, 1, 1)
            self.register_buffer(name, values, persistent=False)
        if lora:
            add_lora(self.model, lora)
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


def preprocess(x: Tensor, size: int, mean: Tensor, std: Tensor) -> Tensor:
    """Resize and normalise images (n, 1 or 3, h, w) in [0, 1] to (n, 3, size, size)."""
    x = F.interpolate(x, size=(size, size), mode="bilinear", align_corners=False, antialias=True)
    return (x.expand(-1, 3, -1, -1) - mean) / std


def load_vision_model(name: str) -> tuple[Any, dict[str, Any]]:
    """A model's image encoder, and how its images are preprocessed."""
    model, preprocessing = load_pretrained(name)
    model = getattr(model, "vision_model", model)
    if getattr(model, "main_input_name", "") != "pixel_values":
        raise UserError(
            f"hub takes models of images, {name!r} is {type(model).__name__}; "
            "the model reader takes texts"
        )
    return model, preprocessing


def load_pretrained(name: str) -> tuple[Any, dict[str, Any]]:
    """A whole model, and how its images are preprocessed.

    Returns: the model, and a dict with `image_mean`, `image_std` and perhaps `size`, `crop_size`.
    """
    check_folder("hub", name)
    try:
        from transformers import AutoModel
        from transformers.image_processing_base import ImageProcessingMixin
    except ImportError:
        raise UserError(
            "models of the hub need transformers and peft: pip install 'unalike[hub]'"
        ) from None
    try:
        model = AutoModel.from_pretrained(name)
    except (OSError, ValueError) as problem:
        raise UserError(f"hub cannot load {name!r}: {str(problem).splitlines()[0]}") from None
    try:
        stored = ImageProcessingMixin.get_image_processor_dict(name)[0]
    except OSError:
        stored = {}
    preprocessing = dict(DEFAULT_PREPROCESSING)
    for key in (*DEFAULT_PREPROCESSING, "size", "crop_size"):
        if stored.get(key) is not None:
            preprocessing[key] = stored[key]
    return model, preprocessing


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


def add_lora(model: nn.Module, rank: int) -> None:
    """Freeze the model and add LoRA adapters, in place.

    They go into attention; without attention into all linear layers; without these into all
    convolutions.
    Reference: Hu et al. 2022, https://arxiv.org/abs/2106.09685
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise UserError("LoRA needs peft: pip install 'unalike[hub]'") from None
    layers = {name: layer for name, layer in model.named_modules() if name}
    layers = {name: layer for name, layer in layers.items() if not name.startswith("pooler")}
    linear, convolutions = [], []
    for name, layer in layers.items():
        if isinstance(layer, nn.Linear):
            linear.append(name)
        elif isinstance(layer, nn.Conv2d) and layer.groups == 1:
            convolutions.append(name)
    attention = [name for name in linear if name.rsplit(".", 1)[-1] in ATTENTION]
    targets = attention or linear or convolutions
    if not targets:
        leaves = []
        for name, layer in layers.items():
            if not list(layer.children()):
                leaves.append(f"{name} ({type(layer).__name__})")
        raise UserError(
            f"LoRA finds no linear layer or convolution in {type(model).__name__}; it has "
            f"{', '.join(leaves[:20]) or 'no layers'}"
        )
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets), model)
