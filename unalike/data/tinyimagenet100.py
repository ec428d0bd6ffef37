"""The first 100 classes of Tiny-ImageNet. http://cs231n.stanford.edu/tiny-imagenet-200.zip"""

import numpy as np
import torch

from unalike.data.files import find_file, open_npz
from unalike.data.jpeg import Broken, decode_images, hold_out_fifth, rows_where
from unalike.data.table import Table
from unalike.tasks import Classification

SOURCE = (
    "http://cs231n.stanford.edu/tiny-imagenet-200.zip: images at 32x32 as JPEG bytes in `jpeg` "
    "and `off`, `y` (n,), `split` (0 train, 1 validation), `names`"
)


def tinyimagenet100(
    folder: str | None = None, broken: Broken = "refuse", choosing: bool = False
) -> Table:
    """The first 100 classes of Tiny-ImageNet at 32x32: 130 photographs each to train, 50 to test.

    Test rows are those of the official validation set. Needs tinyimagenet100_32_jpeg.npz. `broken`
    and `choosing` as in voc2012.
    """
    path = find_file("tinyimagenet100", folder, ("tinyimagenet100_32_jpeg.npz",), SOURCE)
    with open_npz(path) as arrays:
        x, good = decode_images(arrays["jpeg"], arrays["off"], broken)
        y = torch.from_numpy(arrays["y"][good].astype(np.int64))
        split = torch.from_numpy(arrays["split"][good])
        names = tuple(arrays["names"].tolist())
    train, test = rows_where(split == 0), rows_where(split == 1)
    if choosing:
        train, test = hold_out_fifth(train)
    return Table(
        x=x,
        targets={"thing": y},
        tasks={"thing": Classification(names)},
        train=train,
        test=test,
    )
