"""An autoencoder over several modalities, any of which may be missing. Knows nothing of clients or losses."""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from unalike.base.errors import suggest_name
from unalike.data.modalities import MARK, modalities, with_masks

Size = Annotated[int, Field(ge=1)]


class Autoencoder(nn.Module):
    """An encoder and a mirrored decoder for each modality, and one fused feature: the mean of the codes that are there (AFMCC eq. 1).

    `shape` has the modalities of the whole federation, {name: (features,)}; inputs may hold any of them, and any sample may lack some
    of those (see `with_masks`). A plain shape (features,) is one modality called "x".
    """

    def __init__(
        self,
        shape: Mapping[str, Sequence[int]] | Sequence[int],
        hidden: Sequence[Size] = (512, 128),
        width: Size = 20,
    ):
        super().__init__()
        named = shape if isinstance(shape, Mapping) else {"x": shape}
        self.width = width
        for name in named:
            if (
                not isinstance(name, str)
                or not re.fullmatch(r"[\w -]+", name)
                or hasattr(nn.ModuleDict(), name)
            ):
                raise ValueError(
                    f"a modality cannot be called {name!r}: take letters, digits, - and _, and no word of PyTorch's own"
                )
        sizes = {
            name: [int(torch.tensor(its).prod()), *hidden, width] for name, its in named.items()
        }
        self.encoders = nn.ModuleDict({name: layers(size) for name, size in sizes.items()})
        self.decoders = nn.ModuleDict({name: layers(size[::-1]) for name, size in sizes.items()})

    def codes(self, x: dict[str, Tensor] | Tensor) -> dict[str, Tensor]:
        """(n, width) of each modality there is."""
        self.check_inputs(x)
        return {name: self.encoders[name](rows.flatten(1)) for name, rows in modalities(x).items()}

    def check_inputs(self, x: dict[str, Tensor] | Tensor) -> None:
        """Raises ValueError where it was not made for such rows."""
        self.check(modalities(x))
        for name, rows in modalities(x).items():
            first: Any = self.encoders[name]
            wide, made = rows.shape[1:].numel(), first[0].in_features
            if wide != made:
                raise ValueError(
                    f'its modality "{name}" has {wide} features, and its autoencoder was made for {made}'
                )
            if not rows.is_floating_point():
                raise ValueError(
                    f'its modality "{name}" holds {rows.dtype}, and an autoencoder takes real numbers: give it as x.float()'
                )

    def check(self, names: Iterable[str]) -> None:
        """Raises ValueError where it was made without one of these modalities."""
        for name in names:
            if name not in self.encoders:
                raise ValueError(
                    f'its data have a modality "{name}" that its autoencoder was made without:{suggest_name(name, self.encoders)} '
                    f"its shape has {', '.join(self.encoders)}"
                )

    def forward(self, x: dict[str, Tensor] | Tensor) -> Tensor:
        x = with_masks(x)
        return fuse(self.codes(x), x)

    def error(self, x: dict[str, Tensor] | Tensor) -> Tensor:
        """Mean squared error of each modality rebuilt from the fused feature, over the samples that have it; the sum over modalities."""
        x = with_masks(x)
        h = fuse(self.codes(x), x)
        errors = {
            name: (self.decoders[name](h) - rows.flatten(1)).square().mean(1)
            for name, rows in modalities(x).items()
        }
        return torch.stack(
            [
                (x[name + MARK] * each).sum() / x[name + MARK].sum().clamp(min=1)
                for name, each in errors.items()
            ]
        ).sum()


def fuse(codes: Mapping[str, Tensor], x: Mapping[str, Tensor]) -> Tensor:
    """(..., n, width): for each sample the mean of those codes (..., n, width) whose modality it has by the marks in x; 0 for none."""
    there = torch.stack([x[name + MARK] for name in codes])[..., None]
    return (there * torch.stack(list(codes.values()))).sum(0) / there.sum(0).clamp(min=1)


def layers(sizes: Sequence[int]) -> nn.Sequential:
    """Linear layers with ReLU between."""
    parts: list[nn.Module] = []
    for i, (wide, next_wide) in enumerate(pairwise(sizes)):
        parts += [nn.ReLU()] * (i > 0) + [nn.Linear(wide, next_wide)]
    return nn.Sequential(*parts)
