"""Sets that papers on unlike clients measure on: CIFAR-10, PACS with its four styles, AG News as rows of word numbers. Knows no clients."""

import csv
import re
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from unalike.base.errors import UserError
from unalike.data.files import find, opened
from unalike.data.pictures import decode, fifth
from unalike.data.table import Table
from unalike.data.text_codes import texts_to_codes
from unalike.tasks import Classification

CIFAR = "https://www.cs.toronto.edu/~kriz/cifar.html, as x_train (n, 32, 32, 3) bytes, y_train, x_test, y_test"
CIFAR_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
PACS = "https://domaingeneralization.github.io: images at 64x64 as JPEG bytes in `jpeg` and `off`, `y`, `domain`, `classes`, `domains`"
AGNEWS = (
    "https://huggingface.co/datasets/fancyzhx/ag_news, as rows class,title,text with classes from 1"
)
SPLIT_SEED, TRAIN_SHARE = 64, 0.75  # PACS has no split of its own for clients
BUCKETS, LENGTH = 20000, 64  # of words and pairs of words; of a text


Pixels = Literal[
    "scaled", "bytes"
]  # of mean 0 and deviation 1 by channel, or as they are, for pretrained models


def cifar10(folder: str | None = None, pixels: Pixels = "scaled", choosing: bool = False) -> Table:
    """CIFAR-10, images (n, 3, 32, 32) scaled, or as bytes, for pretrained models; needs cifar10.npz. `choosing` as in voc2012."""
    with opened(find("cifar10", folder, ("cifar10.npz",), CIFAR)) as held:
        x, y = (np.concatenate([held[f"{name}_train"], held[f"{name}_test"]]) for name in "xy")
        rows = len(held["y_train"])
    images, things = (
        torch.from_numpy(x).permute(0, 3, 1, 2),
        torch.from_numpy(y.astype(np.int64).ravel()),
    )
    train, test = (
        fifth(torch.arange(rows)) if choosing else (torch.arange(rows), torch.arange(rows, len(x)))
    )
    return Table(
        x=scaled(images, train if choosing else slice(rows)) if pixels == "scaled" else images,
        targets={"thing": things},
        tasks={"thing": Classification(CIFAR_CLASSES)},
        train=train,
        test=test,
    )


def pacs(folder: str | None = None, pixels: Pixels = "scaled") -> Table:
    """PACS at 64x64: 9991 paintings, cartoons, photographs and sketches of 7 things, 75 % of each style and thing to train; needs
    pacs_64_jpeg.npz. The style is a target too, "domain", so that rows can be dealt out by it."""
    from sklearn.model_selection import train_test_split

    with opened(find("pacs", folder, ("pacs_64_jpeg.npz",), PACS)) as held:
        x, y, domain = (
            decode(held["jpeg"], held["off"])[0],
            held["y"].astype(np.int64),
            held["domain"].astype(np.int64),
        )
        classes, domains = tuple(held["classes"].tolist()), tuple(held["domains"].tolist())
    train, test = (
        torch.tensor(sorted(part))
        for part in train_test_split(
            range(len(y)),
            train_size=TRAIN_SHARE,
            stratify=y * len(domains) + domain,
            random_state=SPLIT_SEED,
        )
    )
    x = scaled(x, train) if pixels == "scaled" else x
    return Table(
        x=x,
        targets={"thing": torch.from_numpy(y), "domain": torch.from_numpy(domain)},
        tasks={"thing": Classification(classes), "domain": Classification(domains)},
        train=train,
        test=test,
    )


def agnews(folder: str | None = None, texts: Literal["words", "letters"] = "words") -> Table:
    """AG News: titles and texts of 4 kinds as numbers (n, 64) of words and pairs of words, 1 to 20000, 0 where there are no more.

    Or as letters, for readers with a tokenizer of their own. Needs agnews_train.csv, or agnews_train_subset.csv, and agnews_test.csv.
    """
    parts = [
        read_texts(find("agnews", folder, files, AGNEWS), texts)
        for files in (("agnews_train.csv", "agnews_train_subset.csv"), ("agnews_test.csv",))
    ]
    x, y = (torch.cat(both) for both in zip(*parts, strict=True))
    return Table(
        x=x,
        targets={"topic": y},
        tasks={"topic": Classification(("world", "sports", "business", "science"))},
        train=torch.arange(len(parts[0][1])),
        test=torch.arange(len(parts[0][1]), len(y)),
    )


def scaled(x: Tensor, rows: slice | Tensor) -> Tensor:
    """Bytes (n, channels, height, width) as float32 of mean 0 and deviation 1 in each channel of these rows, those to train on."""
    x = x.float().div_(255)
    about = x[rows].mean((0, 2, 3), keepdim=True), x[rows].std((0, 2, 3), keepdim=True)
    return x.sub_(about[0]).div_(about[1])


def read_texts(path: Path, texts: str = "words") -> tuple[Tensor, Tensor]:
    """Word numbers (n, 64), or texts as written, and classes (n,) from 0 of a file of class,title,text."""
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        rows = [row for row in csv.reader(file) if len(row) >= 2 and row[0].strip().isdigit()]
    if not rows:
        raise UserError(f"{path} has no rows of class,title,text")
    said = [" ".join(row[1:]) for row in rows]
    x = (
        torch.tensor([numbered(text) for text in said])
        if texts == "words"
        else texts_to_codes(said)
    )
    return x, torch.tensor([int(row[0]) - 1 for row in rows])


def numbered(text: str) -> list[int]:
    """A text's words and pairs of words, each a number by its hash, as fastText does.

    >>> numbered("Hello, hello world")[:6]
    [871, 871, 1732, 8897, 17958, 0]
    """
    words = re.findall(r"[a-z0-9]+", text.lower())
    both = [*words[: LENGTH // 2], *(f"{a} {b}" for a, b in pairwise(words[: LENGTH // 2 + 1]))]
    numbers = [zlib.crc32(word.encode()) % BUCKETS + 1 for word in both][:LENGTH]
    return numbers + [0] * (LENGTH - len(numbers))
