"""What a client trains: encoder, projection, head. Knows nothing of clients or methods."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from unalike.base.copying import copy_all
from unalike.base.errors import UserError
from unalike.base.module_tree import tensors_of


class Model(nn.Module):
    """Encoder -> projection -> head.

    `features` are the head's input; `represent` is one vector per sample, to compare models by. A
    dense task keeps the feature map: its features are (n, width, h, w), or (n, width, steps) of a
    sequence, and the representation is their mean.

    Args:
        encoder: from inputs to (n, width); for a dense task it also has `grid(x)`.
        projection: between encoder and head; `nn.Identity()` where there is none.
        head: from features to the task's output.
        dense: whether the task answers for every pixel or step.
        unit: whether features are unit vectors, at each position of a map.
    """

    unit: bool = False  # of a model that is built otherwise

    def __init__(
        self,
        encoder: nn.Module,
        projection: nn.Module,
        head: nn.Module,
        dense: bool = False,
        unit: bool = False,
    ):
        super().__init__()
        self.encoder = encoder
        self.projection = projection
        self.head = head
        self.dense = dense
        self.unit = unit

    def extra_repr(self) -> str:
        """Printed models tell local baselines apart."""
        return "unit=True" if self.unit else ""

    def encode(self, x: Tensor | dict) -> Tensor:
        """The projection's input: a vector per sample (n, width), or a map (n, width, ...)."""
        if not self.dense:
            return self.encoder(x)
        grid = getattr(self.encoder, "grid", None)
        if not callable(grid):
            raise UserError(
                "a dense task needs an encoder with grid(x), its feature map (n, width, h, w) or "
                f"(n, width, steps); {type(self.encoder).__name__} has none, image encoders such "
                "as cnn, transformer, vgg11, resnet18, efficientnet and hub have, and those of "
                "sequences (cnn1d, gru1d, transformer1d, reader)"
            )
        return grid(x)

    def features(self, x: Tensor | dict) -> Tensor:
        """The head's input: (n, width), or (n, width, ...) for a dense task."""
        encoded = self.encode(x)
        if self.dense:  # the projection works on the last axis
            features = self.projection(encoded.movedim(1, -1)).movedim(-1, 1)
        else:
            features = self.projection(encoded)
        return nn.functional.normalize(features, dim=1) if self.unit else features

    def represent(self, x: Tensor | dict) -> Tensor:
        """Unit vectors (n, width)."""
        z = self.features(x)
        return nn.functional.normalize(mean_over_positions(z) if self.dense else z, dim=-1)

    def forward(self, x: Tensor | dict) -> Tensor:
        return self.head(self.features(x))


def mean_over_positions(features: Tensor) -> Tensor:
    """The mean (n, width) of a feature map (n, width, h, w) or (n, width, steps)."""
    return features.mean(tuple(range(2, features.dim())))


def width_of(encoder: nn.Module, rows: Callable[[], Tensor | dict]) -> int:
    """Width of an encoder's output: its attribute `width`, else that of a trial pass.

    Args:
        rows: returns a few inputs for the trial pass; called only if it is needed.
    """
    width = getattr(encoder, "width", None)
    if isinstance(width, int):
        return width
    was_training = encoder.training
    with torch.no_grad():
        out = encoder.eval()(rows())
    encoder.train(was_training)
    if not isinstance(out, Tensor) or out.dim() != 2:
        output = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise UserError(f"an encoder gives (n, width), {type(encoder).__name__} gave {output}")
    return out.shape[1]


def find_trunk(encoder: nn.Module) -> Callable[[Any], Any] | None:
    """The `trunk` of an encoder whose output can be cached in place of the inputs, or None.

    Any encoder may have one: `trunk(x)` computes all that lies before the first weight that learns,
    `has_fixed_trunk` says that its output never changes, and `forward` takes that output as well as
    the input. An encoder with only one of the two has none.

    >>> find_trunk(nn.Linear(2, 2)) is None
    True
    """
    trunk = getattr(encoder, "trunk", None)
    fixed = getattr(encoder, "has_fixed_trunk", False) is True
    return trunk if callable(trunk) and fixed else None


@torch.no_grad()
def load_tensors(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy tensors into the parameters and buffers of their names; other names are ignored.

    Does what `load_state_dict(tensors, strict=False)` does, without its walk through all modules.

    Raises: ValueError where a shape differs.
    """
    own = tensors_of(model)
    names = [name for name in tensors if name in own]
    for name in names:
        if tensors[name].shape != own[name].shape:
            raise ValueError(
                f"expected {name} with shape {tuple(own[name].shape)}, "
                f"got {tuple(tensors[name].shape)}"
            )
    copy_all([own[name] for name in names], [tensors[name] for name in names])
