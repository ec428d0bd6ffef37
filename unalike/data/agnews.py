"""AG News: short news texts of four topics. https://huggingface.co/datasets/fancyzhx/ag_news"""

import csv
import re
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from unalike.base.errors import UserError
from unalike.data.files import find_file
from unalike.data.table import Table
from unalike.data.text_codes import texts_to_codes, texts_to_tokens
from unalike.tasks import Classification, Language, Task
from unalike.tasks.language import next_tokens

SOURCE = (
    "https://huggingface.co/datasets/fancyzhx/ag_news, as rows class,title,text with classes from 1"
)
TOPICS = ("world", "sports", "business", "science")
BUCKETS = 20000  # numbers for words and word pairs
LENGTH = 64  # numbers per text
BYTES = 128  # of a text, as tokens
FILES = (("agnews_train.csv", "agnews_train_subset.csv"), ("agnews_test.csv",))


def agnews(
    folder: str | None = None, texts: Literal["words", "letters", "bytes"] = "words"
) -> Table:
    """AG News: titles and texts of 4 topics as word numbers (n, 64), or as code points.

    Numbers are hashes of words and word pairs, 1 to 20000, 0 for padding; code points
    ("letters") are for encoders with a tokenizer. "bytes" are 128 token ids of a text for language
    models, and the target `text` is their next-token prediction. Needs agnews_train.csv, or
    agnews_train_subset.csv, and agnews_test.csv.
    """
    train, test = (read_texts(find_file("agnews", folder, files, SOURCE), texts) for files in FILES)
    rows, total = len(train[1]), len(train[1]) + len(test[1])
    x = torch.cat([train[0], test[0]])
    targets = {"topic": torch.cat([train[1], test[1]])}
    tasks: dict[str, Task] = {"topic": Classification(TOPICS)}
    if texts == "bytes":
        tasks["text"] = Language(256)
        targets["text"] = next_tokens(x)
    return Table(
        x=x,
        targets=targets,
        tasks=tasks,
        train=torch.arange(rows),
        test=torch.arange(rows, total),
    )


def read_texts(path: Path, texts: str = "words") -> tuple[Tensor, Tensor]:
    """Word numbers (n, 64) or code points, and classes (n,) from 0, of a file class,title,text."""
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        rows = [row for row in csv.reader(file) if len(row) >= 2 and row[0].strip().isdigit()]
    if not rows:
        raise UserError(f"{path} has no rows of class,title,text")
    strings = [" ".join(row[1:]) for row in rows]
    if texts == "words":
        x = torch.tensor([hash_text(string) for string in strings])
    elif texts == "bytes":
        x = texts_to_tokens(strings, BYTES)
    else:
        x = texts_to_codes(strings)
    return x, torch.tensor([int(row[0]) - 1 for row in rows])


def hash_text(text: str) -> list[int]:
    """A text's words and word pairs as numbers by hash, as fastText has them; 0 for padding.

    >>> hash_text("Hello, hello world")[:6]
    [871, 871, 1732, 8897, 17958, 0]
    """
    words = re.findall(r"[a-z0-9]+", text.lower())
    half = LENGTH // 2
    pairs = [f"{a} {b}" for a, b in pairwise(words[: half + 1])]
    grams = [*words[:half], *pairs]
    numbers = [zlib.crc32(gram.encode()) % BUCKETS + 1 for gram in grams][:LENGTH]
    return numbers + [0] * (LENGTH - len(numbers))
