"""Caltech-101: photographs of one of 101 things. https://data.caltech.edu/records/mzrjq-6wc02"""

import numpy as np
import torch

from unalike.data.files import find_file, open_npz
from unalike.data.jpeg import Broken, decode_images, hold_out_fifth
from unalike.data.table import Table
from unalike.tasks import Classification

SOURCE = (
    "https://data.caltech.edu/records/mzrjq-6wc02: "
    "images at 96x96 as JPEG bytes in `jpeg` and `off`, `y` (n,), `classes`"
)
SPLIT_SEED = 101  # Caltech-101 has no official split
TRAIN_SHARE = 0.7


def caltech101(
    folder: str | None = None, broken: Broken = "refuse", choosing: bool = False
) -> Table:
    """Caltech-101 at 96x96: 8677 photographs of one of 101 things, 70 % of each to train.

    Needs caltech101_96_jpeg.npz. `broken` and `choosing` as in voc2012.
    """
    from sklearn.model_selection import train_test_split

    path = find_file("caltech101", folder, ("caltech101_96_jpeg.npz",), SOURCE)
    with open_npz(path) as arrays:
        x, good = decode_images(arrays["jpeg"], arrays["off"], broken)
        y = arrays["y"][good].astype(np.int64)
        classes = tuple(arrays["classes"].tolist())
    split = train_test_split(
        range(len(x)), train_size=TRAIN_SHARE, stratify=y, random_state=SPLIT_SEED
    )
    train, test = (torch.tensor(sorted(part)) for part in split)
    if choosing:
        train, test = hold_out_fifth(train)
    return Table(
        x=x,
        targets={"thing": torch.from_numpy(y)},
        tasks={"thing": Classification(classes)},
        train=train,
        test=test,
    )
