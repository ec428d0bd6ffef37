"""Flickr8k: photographs with five captions each, in the official split."""

import json
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from unalike.data.files import find_file, open_npz
from unalike.data.jpeg import Broken, decode_images, report_broken, rows_where
from unalike.data.table import Table
from unalike.data.text_codes import texts_to_codes
from unalike.tasks import Retrieval

SOURCE = (
    "https://github.com/jbrownlee/Datasets/releases (Flickr8k): "
    "images at 96x96 as JPEG bytes in `jpeg` and `off`, `names`, "
    "`captions_json`, five captions an image, `split` 0 train, 1 validation, 2 test"
)
CAPTION_LENGTH = 200  # characters


@dataclass(frozen=True, eq=False)
class ImageCaptions:
    """Images (n, 3, height, width) bytes, the captions of each, and which part each belongs to.

    `split` (n,) is 0 for training, 1 for validation, 2 for test.
    """

    images: Tensor
    captions: list[list[str]]
    split: Tensor

    def rows(self, part: int) -> Tensor:
        """Row numbers of a part."""
        return rows_where(self.split == part)


def flickr8k(
    folder: str | None = None,
    broken: Broken = "refuse",
    caption: Literal["first", "all", "each"] = "first",
) -> Table:
    """Flickr8k: 8091 photographs at 96x96 ("image") and captions ("caption", as code points).

    The target is "pair" (retrieval). Needs flickr8k_96_jpeg.npz.

    Args:
        broken: as in voc2012; an image without a caption is broken, too.
        caption: "first" of five; "all" in one text; "each": the first to train with, and every one
            to test with, in a row of its own.
    """
    data = load_flickr8k(folder, broken)
    count, test = len(data.captions), data.rows(2)
    length = CAPTION_LENGTH
    texts = [captions[0] for captions in data.captions]
    if caption == "all":
        texts = [" ".join(captions) for captions in data.captions]
        length *= max(map(len, data.captions))
    image = list(range(count))  # of each row
    if caption == "each":
        for i in test.tolist():
            more = data.captions[i][1:]
            texts += more
            image += [i] * len(more)
    images = data.images[torch.tensor(image)] if len(image) > count else data.images
    return Table(
        x={"image": images, "caption": texts_to_codes(texts, length)},
        targets={"pair": torch.tensor(image)},
        tasks={"pair": Retrieval()},
        train=data.rows(0),
        test=torch.cat([test, torch.arange(count, len(image))]),
    )


def load_flickr8k(folder: str | None = None, broken: Broken = "refuse") -> ImageCaptions:
    """All images with all captions: 6000 to train, 1000 to choose by, 1000 to test."""
    path = find_file("flickr8k", folder, ("flickr8k_96_jpeg.npz",), SOURCE)
    with open_npz(path) as arrays:
        names = arrays["names"].tolist()
        stored = json.loads(arrays["captions_json"].tobytes())
        images, good = decode_images(arrays["jpeg"], arrays["off"], broken, names)
        split = torch.from_numpy(arrays["split"][good].astype(np.int64))
    captions: list[list[str]] = []
    problems = []
    for i in good:
        texts = stored[i] if isinstance(stored, list) else stored.get(names[i], [])
        captions.append([text for text in texts if text.strip()])
        if not captions[-1]:
            problems.append(f"{names[i]} has no caption")
    report_broken(problems, len(good), broken)
    usable = torch.tensor([bool(texts) for texts in captions])
    return ImageCaptions(images[usable], [texts for texts in captions if texts], split[usable])
