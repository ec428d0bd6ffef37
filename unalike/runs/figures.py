"""What a method leaves for the report to draw: arrays in pictures/NAME-ROUND.npz, thinned to a bounded size. Knows nothing of drawing."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from unalike.base.errors import UserError, unknown_name

MOST = {
    "points": (500,),
    "classes": (500,),
    "matrix": (64, 64),
    "rows": (64,),
    "columns": (64,),
}  # of each axis


def leave(folder: Path, name: str, round: int, **material: Any) -> Path:
    """Write it whole or not at all; the same again writes the same bytes."""
    if not name.replace(" ", "").isalnum():
        raise UserError(f'a picture is named in letters, numbers and spaces, got "{name}"')
    for key in material:
        if key not in MOST:
            raise UserError(unknown_name("part of a picture", key, MOST))
    file = folder / "pictures" / f"{name.replace(' ', '_')}-{round:06d}.npz"
    file.parent.mkdir(exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}.partial")
    arrays: dict[str, Any] = {
        key: thinned(plain(value), MOST[key]) for key, value in material.items()
    }
    with partial.open("wb") as out:
        np.savez_compressed(out, **arrays)
    return partial.replace(file)


def plain(values: Any) -> np.ndarray:
    """A tensor from wherever it is, numbers or names; with fractions in single precision."""
    array = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    return array.astype(np.float32) if array.dtype.kind == "f" else array


def thinned(array: np.ndarray, most: tuple[int, ...]) -> np.ndarray:
    """At most so many along each axis, spread evenly; always the same ones.

    >>> thinned(np.arange(10), (4,))
    array([0, 3, 6, 9])
    """
    for axis, limit in enumerate(most):
        if array.shape[axis] > limit:
            array = array.take(
                np.linspace(0, array.shape[axis] - 1, limit).round().astype(int), axis
            )
    return array
