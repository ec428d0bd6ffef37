"""Photographs kept as JPEG bytes in .npz files: VOC 2012 with several labels each, Caltech-101 with one. Knows no clients.

Such a file holds all bytes end to end in `jpeg`, and where each begins and the last ends in `off`.
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
from unalike.data.files import find, opened
from unalike.data.table import Table
from unalike.tasks import Classification, MultiLabel

log = logging.getLogger(__name__)

Broken = Literal["refuse", "skip"]

VOC = (
    "http://host.robots.ox.ac.uk/pascal/VOC/voc2012 (VOCtrainval_11-May-2012.tar): images at 96x96 as JPEG bytes in `jpeg` and `off`, "
    "`y` (n, 20) 1 present, 0 difficult, -1 absent, `split` 0 train, 1 val, `classes`"
)
CALTECH = "https://data.caltech.edu/records/mzrjq-6wc02: images at 96x96 as JPEG bytes in `jpeg` and `off`, `y` (n,), `classes`"
SPLIT_SEED, TRAIN_SHARE = 101, 0.7  # Caltech-101 has no official split


def voc2012(folder: str | None = None, broken: Broken = "refuse", choosing: bool = False) -> Table:
    """VOC 2012 at 96x96: 5717 photographs to train, 5823 to test, 20 labels, "difficult" ones unknown; needs voc2012_cls_96_jpeg.npz.

    `broken` says what becomes of bytes that are no image, or one of another size: "refuse" them by name or "skip" them. `choosing` tests on
    every fifth of the photographs to train, which are then not trained on: settings are chosen without a look at the others.
    """
    with opened(find("voc2012", folder, ("voc2012_cls_96_jpeg.npz",), VOC)) as held:
        x, good = decode(held["jpeg"], held["off"], broken, held["names"].tolist())
        marks, split = (
            torch.from_numpy(held["y"][good].astype(np.float32)),
            torch.from_numpy(held["split"][good]),
        )
        classes = tuple(held["classes"].tolist())
    y = torch.where(marks == 0, -1.0, (marks == 1).float())
    train, test = (split == 0).nonzero().flatten(), (split != 0).nonzero().flatten()
    if choosing:
        train, test = fifth(train)
    return Table(
        x=x, targets={"objects": y}, tasks={"objects": MultiLabel(classes)}, train=train, test=test
    )


def caltech101(
    folder: str | None = None, broken: Broken = "refuse", choosing: bool = False
) -> Table:
    """Caltech-101 at 96x96: 8677 photographs of one of 101 things, 70 % of each to train; needs caltech101_96_jpeg.npz.

    `broken` and `choosing` as in voc2012.
    """
    from sklearn.model_selection import train_test_split

    with opened(find("caltech101", folder, ("caltech101_96_jpeg.npz",), CALTECH)) as held:
        x, good = decode(held["jpeg"], held["off"], broken)
        y, classes = held["y"][good].astype(np.int64), tuple(held["classes"].tolist())
    train, test = (
        torch.tensor(sorted(part))
        for part in train_test_split(
            range(len(x)), train_size=TRAIN_SHARE, stratify=y, random_state=SPLIT_SEED
        )
    )
    if choosing:
        train, test = fifth(train)
    return Table(
        x=x,
        targets={"thing": torch.from_numpy(y)},
        tasks={"thing": Classification(classes)},
        train=train,
        test=test,
    )


def fifth(train: Tensor) -> tuple[Tensor, Tensor]:
    """Rows to train on without every fifth, and these, to choose settings by."""
    out = torch.arange(len(train)) % 5 == 0
    return train[~out], train[out]


def decode(
    jpeg: np.ndarray, off: np.ndarray, broken: Broken = "refuse", names: Sequence[str] | None = None
) -> tuple[Tensor, np.ndarray]:
    """Every image once, as bytes (n, 3, height, width), and which items these are (n,): all, unless broken ones are skipped.

    Most of them say the size. Called `names`, or by number.
    """
    if broken not in ("refuse", "skip"):
        raise UserError(f'broken images are to "refuse" or to "skip", got {broken!r}')
    found: dict[int, np.ndarray] = {}
    wrong: dict[int, str] = {}
    for i, (start, end) in enumerate(pairwise(off)):
        try:
            found[i] = read(jpeg[start:end].tobytes())
        except ValueError as problem:
            wrong[i] = str(problem)
    if found:
        (height, width, _), _ = Counter(image.shape for image in found.values()).most_common(1)[0]
        for i in [i for i, image in found.items() if image.shape[:2] != (height, width)]:
            wrong[i] = f"is {found[i].shape[1]}x{found.pop(i).shape[0]}, most are {width}x{height}"
    leave_out(
        [f"{names[i] if names else f'image {i}'} {why}" for i, why in sorted(wrong.items())],
        len(off) - 1,
        broken,
    )
    return torch.from_numpy(np.stack([*found.values()])).permute(0, 3, 1, 2).contiguous(), np.array(
        [*found]
    )


def leave_out(wrong: Sequence[str], of: int, broken: Broken) -> None:
    """Refuse a set for its broken images, or say which are left out of it; at most ten are named."""
    if not wrong:
        return
    more = f" and {len(wrong) - 10} more" if len(wrong) > 10 else ""
    told = f"{len(wrong)} of {of} images cannot be used: {'; '.join(wrong[:10])}{more}."
    if broken == "refuse" or len(wrong) == of:
        raise UserError(f"{told} Mend them, or leave them out with broken: skip")
    log.warning("%s They are left out.", told)


def read(data: bytes | Path) -> np.ndarray:
    """One image as bytes (height, width, 3)."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data) if isinstance(data, bytes) else data) as image:
            return np.asarray(image.convert("RGB"))
    except Exception as problem:  # what PIL raises on broken bytes is open: OSError, SyntaxError, struct.error and others
        raise UserError(f"is no image ({type(problem).__name__})") from None
