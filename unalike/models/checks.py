"""Checks of the sizes and shapes that encoders are built with."""

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field

from unalike.base.errors import UserError

Size = Annotated[int, Field(ge=1)]


def check_image(name: str, shape: Sequence[int]) -> None:
    """Raise UserError unless the shape is (channels, height, width)."""
    if len(shape) != 3:
        raise UserError(
            f"{name} takes images of shape (channels, height, width), got {tuple(shape)}"
        )


def check_rgb_or_grey(name: str, shape: Sequence[int]) -> None:
    """Raise UserError unless the shape is (1 or 3, height, width)."""
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise UserError(
            f"{name} takes images of shape (1 or 3 channels, height, width), got {tuple(shape)}"
        )


def check_positive(encoder: str, **sizes: int | Sequence[int]) -> None:
    """Raise UserError unless every size is an integer of 1 or more, or a sequence of them."""
    for name, size in sizes.items():
        for number in size if isinstance(size, (list, tuple, torch.Size)) else [size]:
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise UserError(
                    f"{encoder} needs {name} of whole numbers of 1 or more, got {size!r}"
                )
