"""Texts as rows of numbers that every reader can split by a tokenizer of its own. Knows no tokenizers."""

from collections.abc import Sequence

import torch
from torch import Tensor


def texts_to_codes(texts: Sequence[str], longest: int = 256) -> Tensor:
    """Texts as code points (n, longest) int32, cut where they are longer, 0 where they are shorter.

    >>> codes_to_texts(texts_to_codes(["a dog", "zwei Bäume"], 6))
    ['a dog', 'zwei B']
    """
    rows = torch.zeros(len(texts), longest, dtype=torch.int32)
    for row, text in zip(rows, texts, strict=True):
        points = [ord(letter) for letter in text[:longest]]
        row[: len(points)] = torch.tensor(points, dtype=torch.int32)
    return rows


def codes_to_texts(rows: Tensor) -> list[str]:
    """The texts that were written."""
    return ["".join(map(chr, filter(None, row))) for row in rows.tolist()]
