"""An autoencoder over several modalities, any of which may be missing."""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from unalike.base.errors import UserError, suggest_name
from unalike.data.modalities import MARK, modalities, with_masks
from unalike.models.checks import Size


class Autoencoder(nn.Module):
    """An encoder and a mirrored decoder per modality; features are the mean code (AFMCC eq. 1).

    The mean is over the modalities that a sample has (`with_masks`).

    Args:
        shape: {name: (features,)} of all modalities of the federation; inputs may hold any of
            them. A plain shape (features,) is one modality called "x".
        hidden: widths of the encoders' hidden layers.
        width: of a code.
    """

    def __init__(
        self,
        shape: Mapping[str, Sequence[int]] | Sequence[int],
        hidden: Sequence[Size] = (512, 128),
        width: Size = 20,
    ):
        super().__init__()
        shapes = shape if isinstance(shape, Mapping) else {"x": shape}
        self.width = width
        for name in shapes:
            is_word = isinstance(name, str) and re.fullmatch(r"[\w -]+", name)
            if not is_word or hasattr(nn.ModuleDict(), name):
                raise UserError(
                    f"a modality cannot be called {name!r}: take letters, digits, - and _, "
                    "and no word of PyTorch's own"
                )
        sizes = {}
        for name, own_shape in shapes.items():
            sizes[name] = [int(torch.tensor(own_shape).prod()), *hidden, width]
        self.encoders = nn.ModuleDict({name: layers(size) for name, size in sizes.items()})
        self.decoders = nn.ModuleDict({name: layers(size[::-1]) for name, size in sizes.items()})

    def codes(self, x: dict[str, Tensor] | Tensor) -> dict[str, Tensor]:
        """Codes (n, width) by modality of the input."""
        self.check_inputs(x)
        return {name: self.encoders[name](rows.flatten(1)) for name, rows in modalities(x).items()}

    def check_inputs(self, x: dict[str, Tensor] | Tensor) -> None:
        """Raise UserError unless the autoencoder was built for such inputs."""
        self.check(modalities(x))
        for name, rows in modalities(x).items():
            encoder: Any = self.encoders[name]
            features, expected = rows.shape[1:].numel(), encoder[0].in_features
            if features != expected:
                raise UserError(
                    f'its modality "{name}" has {features} features, '
                    f"and its autoencoder was made for {expected}"
                )
            if not rows.is_floating_point():
                raise UserError(
                    f'its modality "{name}" holds {rows.dtype}, and an autoencoder takes real '
                    "numbers: give it as x.float()"
                )

    def check(self, names: Iterable[str]) -> None:
        """Raise UserError if it was built without one of these modalities."""
        for name in names:
            if name not in self.encoders:
                raise UserError(
                    f'its data have a modality "{name}" that its autoencoder was made without:'
                    f"{suggest_name(name, self.encoders)} its shape has {', '.join(self.encoders)}"
                )

    def forward(self, x: dict[str, Tensor] | Tensor) -> Tensor:
        x = with_masks(x)
        return fuse(self.codes(x), x)

    def error(self, x: dict[str, Tensor] | Tensor) -> Tensor:
        """Reconstruction error from the fused code, a scalar.

        The mean squared error over the samples that have a modality, summed over modalities.
        """
        x = with_masks(x)
        fused = fuse(self.codes(x), x)
        errors = []
        for name, rows in modalities(x).items():
            mask = x[name + MARK]
            per_sample = (self.decoders[name](fused) - rows.flatten(1)).square().mean(1)
            errors.append((mask * per_sample).sum() / mask.sum().clamp(min=1))
        return torch.stack(errors).sum()


def fuse(codes: Mapping[str, Tensor], x: Mapping[str, Tensor]) -> Tensor:
    """The mean code (..., n, width) of each sample over the modalities it has; 0 if it has none.

    Args:
        codes: by modality, (..., n, width).
        x: inputs with a mask per modality, from `with_masks`.
    """
    masks = torch.stack([x[name + MARK] for name in codes])[..., None]
    return (masks * torch.stack(list(codes.values()))).sum(0) / masks.sum(0).clamp(min=1)


def layers(sizes: Sequence[int]) -> nn.Sequential:
    """Linear layers of these sizes with ReLU between."""
    parts: list[nn.Module] = []
    for before, after in pairwise(sizes):
        if parts:
            parts.append(nn.ReLU())
        parts.append(nn.Linear(before, after))
    return nn.Sequential(*parts)
