"""Data of figures that a method logs for the report: arrays in pictures/NAME-ROUND.npz.

They are thinned to a bounded size. Knows nothing of drawing.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np

from unalike.base.errors import UserError, unknown_name

# The most entries kept along each axis of an array, by its name.
MAX_SIZES = {
    "points": (500,),
    "classes": (500,),
    "matrix": (64, 64),
    "rows": (64,),
    "columns": (64,),
}


def write_figure(folder: Path, name: str, round: int, **arrays: Any) -> Path:
    """Write the data of one figure whole, or not at all; equal data give equal bytes.

    Args:
        folder: the run's folder.
        name: letters, numbers and spaces.
        round: the round it is of.
        **arrays: tensors, arrays or lists under the names in MAX_SIZES.
    Returns: the file.
    """
    if not name.replace(" ", "").isalnum():
        raise UserError(f'a picture is named in letters, numbers and spaces, got "{name}"')
    for key in arrays:
        if key not in MAX_SIZES:
            raise UserError(unknown_name("part of a picture", key, MAX_SIZES))
    file = folder / "pictures" / f"{name.replace(' ', '_')}-{round:06d}.npz"
    file.parent.mkdir(exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}.partial")
    thinned: dict[str, Any] = {
        key: thin(to_array(value), MAX_SIZES[key]) for key, value in arrays.items()
    }
    with partial.open("wb") as out:
        np.savez_compressed(out, **thinned)
    return partial.replace(file)


def to_array(values: Any) -> np.ndarray:
    """Return a NumPy array of a tensor on any device, numbers or names; fractions as float32."""
    array = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    return array.astype(np.float32) if array.dtype.kind == "f" else array


def thin(array: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
    """Keep at most so many entries along each axis, spread evenly; always the same ones.

    >>> thin(np.arange(10), (4,))
    array([0, 3, 6, 9])
    """
    for axis, size in enumerate(sizes):
        length = array.shape[axis]
        if length > size:
            index = np.linspace(0, length - 1, size).round().astype(int)
            array = array.take(index, axis)
    return array
