"""Texts as rows of code points, which any tokenizer can split."""

from collections.abc import Sequence

import torch
from torch import Tensor


def texts_to_codes(texts: Sequence[str], length: int = 256) -> Tensor:
    """Texts as code points (n, length) int32, cut at that length and padded with 0.

    >>> codes_to_texts(texts_to_codes(["a dog", "zwei Bäume"], 6))
    ['a dog', 'zwei B']
    """
    rows = torch.zeros(len(texts), length, dtype=torch.int32)
    for row, text in zip(rows, texts, strict=True):
        points = [ord(letter) for letter in text[:length]]
        row[: len(points)] = torch.tensor(points, dtype=torch.int32)
    return rows


def codes_to_texts(rows: Tensor) -> list[str]:
    """The texts of code points (n, length)."""
    return ["".join(map(chr, filter(None, row))) for row in rows.tolist()]
