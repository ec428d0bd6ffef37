"""An autoencoder over several modalities, any of which may be missing. Knows nothing of clients or losses."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

Size = Annotated[int, Field(ge=1)]


class Autoencoder(nn.Module):
    """An encoder and a mirrored decoder for each modality, and one fused feature: the mean of the codes that are there (AFMCC eq. 1).

    `shape` has the modalities of the whole federation, {name: (features,)}; inputs may hold any of them. A plain shape (features,)
    is one modality called "x".
    """

    def __init__(self, shape: Mapping[str, Sequence[int]] | Sequence[int], hidden: Sequence[Size] = (512, 128), width: Size = 20):
        super().__init__()
        named = shape if isinstance(shape, Mapping) else {"x": shape}
        self.width = width
        sizes = {name: [int(torch.tensor(its).prod()), *hidden, width] for name, its in named.items()}
        self.encoders = nn.ModuleDict({name: layers(size) for name, size in sizes.items()})
        self.decoders = nn.ModuleDict({name: layers(size[::-1]) for name, size in sizes.items()})

    def codes(self, x: dict[str, Tensor] | Tensor) -> dict[str, Tensor]:
        """(n, width) of each modality there is."""
        return {name: self.encoders[name](rows.flatten(1)) for name, rows in modalities(x).items()}

    def forward(self, x: dict[str, Tensor] | Tensor) -> Tensor:
        return fuse(list(self.codes(x).values()))


def fuse(codes: list[Tensor]) -> Tensor:
    return torch.stack(codes).mean(0)


def modalities(x: dict[str, Tensor] | Tensor) -> dict[str, Tensor]:
    return x if isinstance(x, dict) else {"x": x}


def layers(sizes: Sequence[int]) -> nn.Sequential:
    """Linear layers with ReLU between."""
    parts: list[nn.Module] = []
    for i, (wide, next_wide) in enumerate(pairwise(sizes)):
        parts += [nn.ReLU()] * (i > 0) + [nn.Linear(wide, next_wide)]
    return nn.Sequential(*parts)
