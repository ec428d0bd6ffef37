"""An encoder of an image with its text."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from unalike.base.errors import UserError
from unalike.models.model import find_trunk


class ImageTextPair(nn.Module):
    """Two encoders, each with a linear layer to a common width: modalities to (B, 2, width).

    Args:
        encoders: by modality, the image's first; each has an attribute `width`.
    """

    def __init__(self, encoders: Mapping[str, nn.Module], width: int = 128):
        super().__init__()
        self.width = width
        self.names = tuple(encoders)
        self.parts = nn.ModuleList(encoders.values())
        self.has_fixed_trunk = any(find_trunk(part) is not None for part in self.parts)
        self.joint = nn.ModuleList(
            nn.Linear(int(getattr(part, "width", 0)), width) for part in self.parts
        )

    def trunk(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        """Inputs by modality, passed through the fixed trunk of encoders that have one."""
        outputs = {}
        for name, part in zip(self.names, self.parts, strict=True):
            trunk = find_trunk(part)
            outputs[name] = x[name] if trunk is None else trunk(x[name])
        return outputs

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        features = []
        for name, part, joint in zip(self.names, self.parts, self.joint, strict=True):
            features.append(joint(part(x[name])))
        return torch.stack(features, 1)


def image_and_text_names(shape: Mapping[str, Sequence[int]]) -> tuple[str, str]:
    """The names of the image (three axes) and of the text (all else) among two modalities."""
    images = [name for name, axes in shape.items() if len(axes) == 3]
    if len(shape) != 2 or len(images) != 1:
        raise UserError(
            f"pair takes an image (channels, height, width) and a text (words,), got {dict(shape)}"
        )
    return images[0], next(name for name in shape if name != images[0])
