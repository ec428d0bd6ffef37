"""Images stored as JPEG bytes in .npz files, and what to do with broken ones.

Such a file has all bytes end to end in the array `jpeg`; `off` (n + 1,) says where each image
begins and where the last one ends.
"""

import io
import logging
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from unalike.base.errors import UserError

log = logging.getLogger(__name__)

Broken = Literal["refuse", "skip"]  # images that cannot be read: an error, or left out
MAX_PIXELS = 50_000_000  # of one image: a small file can unfold to gigabytes
NAMED = 10  # broken images named in a message


def decode_images(
    jpeg: np.ndarray, off: np.ndarray, broken: Broken = "refuse", names: Sequence[str] | None = None
) -> tuple[Tensor, np.ndarray]:
    """Decode all images of a file.

    An image of another size than most is broken, too.

    Args:
        names: of the images, for messages; by default their numbers.
    Returns: bytes (n, 3, height, width), and the numbers (n,) of the images that could be read.
    """
    if broken not in ("refuse", "skip"):
        raise UserError(f'broken images are to "refuse" or to "skip", got {broken!r}')
    images: dict[int, np.ndarray] = {}
    problems: dict[int, str] = {}
    for i, (start, end) in enumerate(pairwise(off)):
        try:
            images[i] = read_image(jpeg[start:end].tobytes())
        except ValueError as problem:
            problems[i] = str(problem)
    if images:
        sizes = Counter(image.shape[:2] for image in images.values())
        height, width = sizes.most_common(1)[0][0]
        for i in [i for i, image in images.items() if image.shape[:2] != (height, width)]:
            own_height, own_width = images.pop(i).shape[:2]
            problems[i] = f"is {own_width}x{own_height}, most are {width}x{height}"
    messages = []
    for i, text in sorted(problems.items()):
        messages.append(f"{names[i] if names else f'image {i}'} {text}")
    report_broken(messages, len(off) - 1, broken)
    stacked = torch.from_numpy(np.stack([*images.values()])).permute(0, 3, 1, 2).contiguous()
    return stacked, np.array([*images])


def report_broken(messages: Sequence[str], total: int, broken: Broken) -> None:
    """Raise UserError for broken images, or log which are left out; names at most ten."""
    if not messages:
        return
    count = len(messages)
    more = f" and {count - NAMED} more" if count > NAMED else ""
    summary = f"{count} of {total} images cannot be used: {'; '.join(messages[:NAMED])}{more}."
    if broken == "refuse" or count == total:
        raise UserError(f"{summary} Mend them, or leave them out with broken: skip")
    log.warning("%s They are left out.", summary)


class ImageTooLarge(Exception):
    """An image of more than MAX_PIXELS pixels."""


def read_image(source: bytes | Path) -> np.ndarray:
    """One image, from bytes or a file, as bytes (height, width, 3)."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ImageTooLarge(f"{image.width}x{image.height}")
            return np.asarray(image.convert("RGB"))
    except ImageTooLarge as size:
        raise UserError(f"is {size}, more than {MAX_PIXELS:,} pixels") from None
    except Exception as problem:  # PIL raises OSError, SyntaxError, struct.error and others
        raise UserError(f"is no image ({type(problem).__name__})") from None


def hold_out_fifth(train: Tensor) -> tuple[Tensor, Tensor]:
    """Split training rows: all but every fifth to train, every fifth to choose settings by."""
    held_out = torch.arange(len(train)) % 5 == 0
    return train[~held_out], train[held_out]


def rows_where(condition: Tensor) -> Tensor:
    """The row numbers where a condition (n,) holds."""
    return condition.nonzero().flatten()
