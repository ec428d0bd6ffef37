"""PASCAL VOC 2012: photographs with several labels, or with segmentation masks.

http://host.robots.ox.ac.uk/pascal/VOC/voc2012
"""

from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from unalike.base.randomness import stream
from unalike.data.files import find_file, open_npz
from unalike.data.jpeg import Broken, decode_images, hold_out_fifth, rows_where
from unalike.data.table import Table
from unalike.tasks import MultiLabel, Segmentation

ARCHIVE = "http://host.robots.ox.ac.uk/pascal/VOC/voc2012 (VOCtrainval_11-May-2012.tar)"
LABELS_SOURCE = (
    f"{ARCHIVE}: images at 96x96 as JPEG bytes in `jpeg` and `off`, "
    "`y` (n, 20) 1 present, 0 difficult, -1 absent, `split` 0 train, 1 val, `classes`"
)
MASKS_SOURCE = (
    f"{ARCHIVE}: images at 128x128 as JPEG bytes in `jpeg` and `off`, "
    "`mask` (n, 128, 128), 255 where unknown, `names`, `split` 0 train, 1 val"
)
MASK_CLASSES = tuple(
    "background aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse "
    "motorbike person pottedplant sheep sofa train tvmonitor".split()
)


Count = Annotated[int, Field(ge=1)]


def voc2012(
    folder: str | None = None,
    broken: Broken = "refuse",
    choosing: bool = False,
    train: Count | None = None,
    test: Count | None = None,
) -> Table:
    """VOC 2012 at 96x96: 5717 photographs to train, 5823 to test, 20 labels each; a .npz file.

    Labels marked "difficult" are unknown. Needs voc2012_cls_96_jpeg.npz.

    Args:
        broken: "refuse" raises an error that names images that cannot be read; "skip" leaves them
            out.
        choosing: test on every fifth training photograph, which is then not trained on, to choose
            settings without looking at the test set.
        train, test: only so many of the photographs, drawn once and for all, whatever the seed.
    """
    path = find_file("voc2012", folder, ("voc2012_cls_96_jpeg.npz",), LABELS_SOURCE)
    with open_npz(path) as arrays:
        names = arrays["names"].tolist()
        x, good = decode_images(arrays["jpeg"], arrays["off"], broken, names)
        marks = torch.from_numpy(arrays["y"][good].astype(np.float32))
        split = torch.from_numpy(arrays["split"][good])
        classes = tuple(arrays["classes"].tolist())
    y = torch.where(marks == 0, -1.0, (marks == 1).float())
    train_rows = draw_some(rows_where(split == 0), train)
    test_rows = draw_some(rows_where(split != 0), test)
    if choosing:
        train_rows, test_rows = hold_out_fifth(train_rows)
    return Table(
        x=x,
        targets={"objects": y},
        tasks={"objects": MultiLabel(classes)},
        train=train_rows,
        test=test_rows,
    )


def draw_some(rows: Tensor, count: int | None) -> Tensor:
    """At most `count` of the rows, in order; the same ones in every run."""
    drawn = torch.randperm(len(rows), generator=stream(0, "some of VOC 2012"))[:count]
    return rows[drawn.sort().values]


def voc2012_masks(folder: str | None = None, broken: Broken = "refuse") -> Table:
    """VOC 2012 with masks at 128x128: 1464 photographs to train, 1449 to test, 21 classes.

    Needs voc2012_seg_128.npz. `broken` as in voc2012.
    """
    path = find_file("voc2012_masks", folder, ("voc2012_seg_128.npz",), MASKS_SOURCE)
    with open_npz(path) as arrays:
        names = arrays["names"].tolist()
        x, good = decode_images(arrays["jpeg"], arrays["off"], broken, names)
        mask = torch.from_numpy(arrays["mask"][good])
        split = torch.from_numpy(arrays["split"][good])
    return Table(
        x=x,
        targets={"mask": mask},
        tasks={"mask": Segmentation(MASK_CLASSES)},
        train=rows_where(split == 0),
        test=rows_where(split != 0),
    )
