"""HAM10000: skin lesions of seven kinds. https://doi.org/10.7910/DVN/DBW86T"""

import numpy as np
import torch

from unalike.data.files import find_file, open_npz
from unalike.data.jpeg import Broken, decode_images, hold_out_fifth
from unalike.data.table import Table
from unalike.tasks import Classification

SOURCE = (
    "https://doi.org/10.7910/DVN/DBW86T: one image a lesion at 64x64 as JPEG bytes in `jpeg` and "
    "`off`, `y` (n,), `classes`"
)
SPLIT_SEED = 10000  # HAM10000 has no official split
TRAIN_SHARE = 0.75


def ham10000(folder: str | None = None, broken: Broken = "refuse", choosing: bool = False) -> Table:
    """HAM10000 at 64x64: 5984 skin lesions, one image each, of 7 unbalanced kinds.

    75 % of each kind are to train. Needs ham10000_5984_64_jpeg.npz. `broken` and `choosing` as in
    voc2012.
    """
    from sklearn.model_selection import train_test_split

    path = find_file("ham10000", folder, ("ham10000_5984_64_jpeg.npz",), SOURCE)
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
        targets={"lesion": torch.from_numpy(y)},
        tasks={"lesion": Classification(classes)},
        train=train,
        test=test,
    )
