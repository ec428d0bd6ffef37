"""CIFAR-10. https://www.cs.toronto.edu/~kriz/cifar.html"""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from unalike.data.files import find_file, open_npz
from unalike.data.jpeg import hold_out_fifth
from unalike.data.table import Table
from unalike.tasks import Classification

SOURCE = (
    "https://www.cs.toronto.edu/~kriz/cifar.html, "
    "as x_train (n, 32, 32, 3) bytes, y_train, x_test, y_test"
)
CLASSES = tuple("airplane automobile bird cat deer dog frog horse ship truck".split())
# mean 0 and deviation 1 per channel, or bytes as they are, for pretrained models
Pixels = Literal["scaled", "bytes"]


def cifar10(folder: str | None = None, pixels: Pixels = "scaled", choosing: bool = False) -> Table:
    """CIFAR-10: images (n, 3, 32, 32), scaled, or as bytes for pretrained models.

    Needs cifar10.npz. `choosing` as in voc2012.
    """
    (train_x, train_y), (test_x, test_y) = read_cifar10("cifar10", folder)
    x, y = torch.cat([train_x, test_x]), torch.cat([train_y, test_y])
    rows = len(train_y)
    train, test = torch.arange(rows), torch.arange(rows, len(x))
    if choosing:
        train, test = hold_out_fifth(train)
    if pixels == "scaled":
        x = scale_pixels(x, train if choosing else slice(rows))
    return Table(
        x=x,
        targets={"thing": y},
        tasks={"thing": Classification(CLASSES)},
        train=train,
        test=test,
    )


def read_cifar10(dataset: str, folder: str | None) -> list[tuple[Tensor, Tensor]]:
    """Images (n, 3, 32, 32) bytes and classes (n,), of the training and of the test part."""
    parts = []
    with open_npz(find_file(dataset, folder, ("cifar10.npz",), SOURCE)) as arrays:
        for part in ("train", "test"):
            x = torch.from_numpy(arrays[f"x_{part}"]).permute(0, 3, 1, 2)
            parts.append((x, torch.from_numpy(arrays[f"y_{part}"].astype(np.int64).ravel())))
    return parts


def scale_pixels(x: Tensor, rows: slice | Tensor) -> Tensor:
    """Bytes (n, channels, height, width) as float32, standardised per channel.

    Mean and deviation are those of `rows`, the training rows.
    """
    x = x.float().div_(255)
    mean, std = x[rows].mean((0, 2, 3), keepdim=True), x[rows].std((0, 2, 3), keepdim=True)
    return x.sub_(mean).div_(std)
