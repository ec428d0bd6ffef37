"""Late fusion: an encoder for each modality, and the mean of the features a sample has."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from unalike.base.errors import UserError
from unalike.data.modalities import MARK, modalities, with_masks
from unalike.models.model import width_of


class LateFusion(nn.Module):
    """Features (n, width): the mean over the modalities that each sample has.

    Beside modality `left`, `left?` (n,) says which samples have it; without it all do. A modality
    that the input lacks altogether is missing in every sample. Modalities may be any inputs that
    their encoders take.

    Args:
        encoders: by modality.
        shape: of one input of each modality.
        width: of the features; each encoder's are brought to it by a linear layer.
    """

    def __init__(
        self,
        encoders: Mapping[str, nn.Module],
        shape: Mapping[str, tuple[int, ...]],
        width: int = 64,
    ):
        super().__init__()
        self.width = width
        self.encoders = nn.ModuleDict(encoders)
        projections = {}
        for name, encoder in encoders.items():
            example = partial(torch.zeros, (2, *shape[name]))
            projections[name] = nn.Linear(width_of(encoder, example), width)
        self.projections = nn.ModuleDict(projections)

    def forward(self, x: dict[str, Tensor] | Tensor) -> Tensor:
        x = with_masks(x)
        total: Tensor | float = 0.0
        count: Tensor | float = 0.0
        for name, rows in modalities(x).items():
            if name not in self.encoders:
                raise UserError(
                    f'its data have a modality "{name}" that its encoder was made without: '
                    f"it has {', '.join(self.encoders)}"
                )
            present = x[name + MARK][:, None]
            # plain sums: channels that are added are one channel, also for submodels
            total = total + present * self.projections[name](self.encoders[name](rows))
            count = count + present
        assert isinstance(total, Tensor) and isinstance(count, Tensor)
        return total / count.clamp(min=1)
