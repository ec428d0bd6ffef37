"""Image encoders in the format of Hugging Face (ViT, DINOv2, Swin, ConvNeXt, ResNet and their like), whole or with LoRA. Knows no tasks."""

import math
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unalike.base.errors import UserError
from unalike.models.frozen import Frozen

HALF = {
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}  # where nothing says how images were normalised
ATTENTION = (
    "q_proj",
    "v_proj",
    "query",
    "value",
    "q_lin",
    "v_lin",
    "qkv",
)  # what LoRA's authors adapt, by the names it goes by


class Hub(Frozen):
    """A pretrained image model by its name on the Hugging Face hub, or its folder: images in [0, 1], (B, *shape) to (B, width).

    Images are stretched to the size the model was trained for, or to `size` where it takes any, and normalised as its preprocessor
    file says. `lora` is the rank of adapters that learn in its place (0: all of it learns). Needs `pip install unalike[hub]`.
    """

    def __init__(
        self, shape: Sequence[int], model: str = "", lora: int = 0, size: int | None = None
    ):
        super().__init__()
        self.image_mean: Tensor
        self.image_std: Tensor
        if len(shape) != 3 or shape[0] not in (1, 3):
            raise UserError(
                f"hub takes images of shape (1 or 3 channels, height, width), got {tuple(shape)}"
            )
        if not model or lora < 0:
            raise UserError(
                f"hub needs the model's name or folder, and a rank of LoRA of 0 or more; got model {model!r}, lora {lora}"
            )
        self.model, told = load_vision_model(model)
        self.size = size or input_size(self.model.config, told, shape)
        for name in ("image_mean", "image_std"):
            self.register_buffer(
                name, torch.tensor(told[name]).reshape(1, -1, 1, 1), persistent=False
            )
        if lora:
            adapt(self.model, lora)
            self.hold()
        self.eval()
        with torch.no_grad():
            self.width = self.grid(torch.zeros(1, *shape)).shape[1]
        self.train()

    def grid(self, x: Tensor) -> Tensor:
        """The feature map (B, width, h, w) that `forward` averages: the last one, or the last tokens without those of no place."""
        last = self.model(
            pixel_values=preprocess(x, self.size, self.image_mean, self.image_std)
        ).last_hidden_state
        if last.ndim == 4:
            return last
        program = math.isqrt(
            last.shape[1]
        )  # class and register tokens come first, and are fewer than 2 side + 1
        return last[:, last.shape[1] - program * program :].mT.unflatten(-1, (program, program))

    def forward(self, x: Tensor) -> Tensor:
        return self.grid(x).mean((-2, -1))


def preprocess(x: Tensor, size: int, mean: Tensor, std: Tensor) -> Tensor:
    """Images in [0, 1], (n, 1 or 3, h, w), as a model was trained to see them: (n, 3, size, size)."""
    x = F.interpolate(x, size=(size, size), mode="bilinear", align_corners=False, antialias=True)
    return (x.expand(-1, 3, -1, -1) - mean) / std


def load_vision_model(name: str) -> tuple[Any, dict[str, Any]]:
    """The half of a model that sees, and how its images are prepared."""
    model, told = load_pretrained(name)
    model = getattr(model, "vision_model", model)
    if getattr(model, "main_input_name", "") != "pixel_values":
        raise UserError(
            f"hub takes models of images, {name!r} is {type(model).__name__}; the model reader takes texts"
        )
    return model, told


def load_pretrained(name: str) -> tuple[Any, dict[str, Any]]:
    """A whole model, and how its images are prepared."""
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
        told = ImageProcessingMixin.get_image_processor_dict(name)[0]
    except OSError:
        told = {}
    return model, HALF | {
        key: told[key] for key in (*HALF, "size", "crop_size") if told.get(key) is not None
    }


def check_folder(encoder: str, name: str) -> None:
    """Raises ValueError where a name can only be a folder's (no name on the hub has two slashes) and no folder is there."""
    is_path = name.startswith(("/", ".", "~")) or "\\" in name or name.count("/") > 1
    if is_path and not os.path.isdir(name):
        raise UserError(
            f"{encoder} cannot load {name!r}: there is no such folder; give a folder that save_pretrained wrote, "
            "or a name on the hub, owner/model"
        )


def input_size(config: Any, told: dict[str, Any], shape: Sequence[int]) -> int:
    """Pixels along an edge: as in the model's config, else as its images were prepared, else as they are."""
    preprocess = told.get("crop_size") or told.get("size") or {}
    programs = (
        (getattr(config, "image_size", None), *preprocess.values(), shape[1])
        if isinstance(preprocess, dict)
        else (preprocess,)
    )
    return next(program for program in programs if isinstance(program, int))


def adapt(model: nn.Module, rank: int) -> None:
    """Freeze the model and put LoRA in its attention; where there is none, in every linear layer; where none, in every convolution."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise UserError("LoRA needs peft: pip install 'unalike[hub]'") from None
    named = [
        (name, layer)
        for name, layer in model.named_modules()
        if name and not name.startswith("pooler")
    ]
    linear = [name for name, layer in named if isinstance(layer, nn.Linear)]
    attention = [name for name in linear if name.rsplit(".", 1)[-1] in ATTENTION]
    convolutions = [
        name for name, layer in named if isinstance(layer, nn.Conv2d) and layer.groups == 1
    ]
    targets = attention or linear or convolutions
    if not targets:
        there = [
            f"{name} ({type(layer).__name__})"
            for name, layer in named
            if not list(layer.children())
        ]
        raise UserError(
            f"LoRA finds no linear layer or convolution in {type(model).__name__}; it has "
            f"{', '.join(there[:20]) or 'no layers'}"
        )
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets), model)
