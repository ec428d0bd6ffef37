"""Photographs and what people said of them: Flickr8k, all captions, official split. Knows nothing of who learns from them."""

import json
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unalike.data.multiview import find
from unalike.data.pictures import decode

FLICKR = ("https://github.com/jbrownlee/Datasets/releases (Flickr8k): images at 96x96 as JPEG bytes in `jpeg` and `off`, `names`, "
          "`captions_json`, five captions an image, `split` 0 train, 1 validation, 2 test")


@dataclass(frozen=True, eq=False)
class Pairs:
    """Images (n, 3, height, width) bytes, as many captions for each, and which part each belongs to: 0 train, 1 validation, 2 test."""

    images: Tensor
    captions: list[list[str]]
    split: Tensor

    def rows(self, part: int) -> Tensor:
        return (self.split == part).nonzero().flatten()


def flickr8k_pairs(folder: str | None = None) -> Pairs:
    """8091 photographs at 96x96 with five captions each: 6000 to train, 1000 to choose by, 1000 to test; needs flickr8k_96_jpeg.npz."""
    with np.load(find("flickr8k", folder, ("flickr8k_96_jpeg.npz",), FLICKR)) as held:
        images, _ = decode(held["jpeg"], held["off"], names=held["names"].tolist())
        captions, split = json.loads(held["captions_json"].tobytes()), torch.from_numpy(held["split"].astype(np.int64))
    if len(captions) != len(images) or len({len(its) for its in captions}) != 1 or not captions[0]:
        raise ValueError("flickr8k_96_jpeg.npz needs as many captions for each image, one or more")
    return Pairs(images, captions, split)
