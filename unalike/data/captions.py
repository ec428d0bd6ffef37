"""Photographs with something besides them: Flickr8k with captions, VOC 2012 with a mask that says what each pixel is. Knows no clients."""

from typing import Literal

import torch

from unalike.data.files import find, opened
from unalike.data.pairs import flickr8k_pairs
from unalike.data.pictures import Broken, decode
from unalike.data.table import Table
from unalike.data.text_codes import texts_to_codes
from unalike.tasks import Retrieval, Segmentation

MASKS = (
    "http://host.robots.ox.ac.uk/pascal/VOC/voc2012 (VOCtrainval_11-May-2012.tar): images at 128x128 as JPEG bytes in `jpeg` and "
    "`off`, `mask` (n, 128, 128), 255 where unknown, `names`, `split` 0 train, 1 val"
)
VOC_THINGS = (
    "background",
    "aeroplane",
    "bicycle",
    "bird",
    "boat",
    "bottle",
    "bus",
    "car",
    "cat",
    "chair",
    "cow",
    "diningtable",
    "dog",
    "horse",
    "motorbike",
    "person",
    "pottedplant",
    "sheep",
    "sofa",
    "train",
    "tvmonitor",
)
LONGEST = 200  # characters of a caption


def flickr8k(
    folder: str | None = None,
    broken: Broken = "refuse",
    caption: Literal["first", "all", "each"] = "first",
) -> Table:
    """Flickr8k: 8091 photographs at 96x96 ("image") and what people said of them ("caption", as `written`); target "pair" (retrieval).

    An image without a caption is broken as well. `caption` takes the first of five, or all in one text, or the first to train with and each
    to test with, in a row of its own. Needs flickr8k_96_jpeg.npz.
    """
    pairs = flickr8k_pairs(folder, broken)
    count, asked = len(pairs.captions), pairs.rows(2)
    chosen = [" ".join(its) if caption == "all" else its[0] for its in pairs.captions]
    more = (
        [(i, text) for i in asked.tolist() for text in pairs.captions[i][1:]]
        if caption == "each"
        else []
    )
    photo = torch.tensor([*range(count), *(i for i, _ in more)])
    longest = LONGEST * max(map(len, pairs.captions)) if caption == "all" else LONGEST
    x = {
        "image": pairs.images[photo] if more else pairs.images,
        "caption": texts_to_codes([*chosen, *(text for _, text in more)], longest),
    }
    test = torch.cat([asked, torch.arange(count, len(photo))])
    return Table(
        x=x, targets={"pair": photo}, tasks={"pair": Retrieval()}, train=pairs.rows(0), test=test
    )


def voc2012_masks(folder: str | None = None, broken: Broken = "refuse") -> Table:
    """VOC 2012 with masks at 128x128: 1464 photographs to train, 1449 to test, 20 things and what is none; needs voc2012_seg_128.npz."""
    with opened(find("voc2012_masks", folder, ("voc2012_seg_128.npz",), MASKS)) as held:
        x, good = decode(held["jpeg"], held["off"], broken, held["names"].tolist())
        mask, split = torch.from_numpy(held["mask"][good]), torch.from_numpy(held["split"][good])
    return Table(
        x=x,
        targets={"mask": mask},
        tasks={"mask": Segmentation(VOC_THINGS)},
        train=(split == 0).nonzero().flatten(),
        test=(split != 0).nonzero().flatten(),
    )
