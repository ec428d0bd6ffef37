"""PACS: seven things in four styles. https://domaingeneralization.github.io"""

import numpy as np
import torch

from unalike.data.cifar10 import Pixels, scale_pixels
from unalike.data.files import find_file, open_npz
from unalike.data.jpeg import decode_images
from unalike.data.table import Table
from unalike.tasks import Classification

SOURCE = (
    "https://domaingeneralization.github.io: "
    "images at 64x64 as JPEG bytes in `jpeg` and `off`, `y`, `domain`, `classes`, `domains`"
)
SPLIT_SEED = 64  # PACS has no official split for clients
TRAIN_SHARE = 0.75


def pacs(folder: str | None = None, pixels: Pixels = "scaled") -> Table:
    """PACS at 64x64: 9991 paintings, cartoons, photographs and sketches of 7 things.

    75 % of each style and thing are to train. The style is a second target, "domain", so that rows
    can be partitioned by it. Needs pacs_64_jpeg.npz.
    """
    from sklearn.model_selection import train_test_split

    with open_npz(find_file("pacs", folder, ("pacs_64_jpeg.npz",), SOURCE)) as arrays:
        x, _ = decode_images(arrays["jpeg"], arrays["off"])
        y = arrays["y"].astype(np.int64)
        domain = arrays["domain"].astype(np.int64)
        classes = tuple(arrays["classes"].tolist())
        domains = tuple(arrays["domains"].tolist())
    split = train_test_split(
        range(len(y)),
        train_size=TRAIN_SHARE,
        stratify=y * len(domains) + domain,
        random_state=SPLIT_SEED,
    )
    train, test = (torch.tensor(sorted(part)) for part in split)
    return Table(
        x=scale_pixels(x, train) if pixels == "scaled" else x,
        targets={"thing": torch.from_numpy(y), "domain": torch.from_numpy(domain)},
        tasks={"thing": Classification(classes), "domain": Classification(domains)},
        train=train,
        test=test,
    )
