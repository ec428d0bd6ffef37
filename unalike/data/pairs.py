"""Photographs and what people said of them: Flickr8k, all captions, official split. Knows nothing of who learns from them."""

import json
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unalike.data.files import find, opened
from unalike.data.pictures import Broken, decode, leave_out

FLICKR = (
    "https://github.com/jbrownlee/Datasets/releases (Flickr8k): images at 96x96 as JPEG bytes in `jpeg` and `off`, `names`, "
    "`captions_json`, five captions an image, `split` 0 train, 1 validation, 2 test"
)


@dataclass(frozen=True, eq=False)
class Pairs:
    """Images (n, 3, height, width) bytes, captions of each, and which part each belongs to: 0 train, 1 validation, 2 test."""

    images: Tensor
    captions: list[list[str]]
    split: Tensor

    def rows(self, part: int) -> Tensor:
        return (self.split == part).nonzero().flatten()


def flickr8k_pairs(folder: str | None = None, broken: Broken = "refuse") -> Pairs:
    """8091 photographs at 96x96 with captions: 6000 to train, 1000 to choose by, 1000 to test; needs flickr8k_96_jpeg.npz.

    `broken` as in voc2012; an image without a caption is broken as well.
    """
    with opened(find("flickr8k", folder, ("flickr8k_96_jpeg.npz",), FLICKR)) as held:
        names, told = held["names"].tolist(), json.loads(held["captions_json"].tobytes())
        images, good = decode(held["jpeg"], held["off"], broken, names)
        split = torch.from_numpy(held["split"][good].astype(np.int64))
    texts = [
        [
            text
            for text in (told[i] if isinstance(told, list) else told.get(names[i], []))
            if text.strip()
        ]
        for i in good
    ]
    leave_out(
        [f"{names[i]} has no caption" for i, its in zip(good, texts, strict=True) if not its],
        len(good),
        broken,
    )
    fine = torch.tensor([bool(its) for its in texts])
    return Pairs(images[fine], [its for its in texts if its], split[fine])
