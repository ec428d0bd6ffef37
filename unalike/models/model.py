"""What a client trains: encoder, projection, head. Knows nothing of clients or methods."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Model(nn.Module):
    """Encoder -> projection -> head. `features` are what the head takes, `represent` one vector a sample for comparing models.

    A dense task (segmentation) keeps the map: its features are (n, width, h, w), and the representation is their mean.
    """

    def __init__(
        self, encoder: nn.Module, projection: nn.Module, head: nn.Module, dense: bool = False
    ):
        super().__init__()
        self.encoder, self.projection, self.head, self.dense = encoder, projection, head, dense

    def encode(self, x: Tensor | dict) -> Tensor:
        """What the projection takes: the encoder's vector of each sample, or its map (n, width, h, w)."""
        if not self.dense:
            return self.encoder(x)
        grid = getattr(self.encoder, "grid", None)
        if not callable(grid):
            from unalike.models.encoders import ENCODERS

            have = [name for name, made in ENCODERS.items() if hasattr(made, "grid")]
            raise ValueError(
                "a dense task needs an encoder with grid(x), its feature map (n, width, h, w); "
                f"{type(self.encoder).__name__} has none, {', '.join(have)} have"
            )
        return grid(x)

    def features(self, x: Tensor | dict) -> Tensor:
        taken = self.encode(x)
        return (
            self.projection(taken.movedim(1, -1)).movedim(-1, 1)
            if self.dense
            else self.projection(taken)
        )

    def represent(self, x: Tensor | dict) -> Tensor:
        """(n, width), unit length."""
        z = self.features(x)
        return nn.functional.normalize(z.mean((-2, -1)) if self.dense else z, dim=-1)

    def forward(self, x: Tensor | dict) -> Tensor:
        return self.head(self.features(x))


def width_of(encoder: nn.Module, rows: Callable[[], Tensor | dict]) -> int:
    """Width of an encoder's output: its attribute `width`, or found by a trial on rows, which are not asked for before."""
    if isinstance(width := getattr(encoder, "width", None), int):
        return width
    was = encoder.training
    with torch.no_grad():
        out = encoder.eval()(rows())
    encoder.train(was)
    if not isinstance(out, Tensor) or out.dim() != 2:
        raise ValueError(
            f"an encoder gives (n, width), {type(encoder).__name__} gave "
            f"{tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__}"
        )
    return out.shape[1]


def find_trunk(encoder: nn.Module) -> Callable[[Any], Any] | None:
    """The `trunk` of an encoder whose output can be kept instead of the input, or None.

    Any encoder may have one, frozen or not: `trunk(x)` is what lies before the first weight that
    learns, `has_fixed_trunk` says that its output never changes, and `forward` takes that as well as the input.
    An encoder with only one of the two has none.

    >>> find_trunk(nn.Linear(2, 2)) is None
    True
    """
    trunk = getattr(encoder, "trunk", None)
    return trunk if callable(trunk) and getattr(encoder, "has_fixed_trunk", False) is True else None
