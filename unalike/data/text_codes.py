"""Texts as rows of numbers: code points, which any tokenizer can split, or token ids."""

from collections.abc import Callable, Iterable, Sequence

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


def texts_to_tokens(
    texts: Sequence[str], length: int, encode: Callable[[str], Iterable[int]] = str.encode
) -> Tensor:
    """Texts as token ids (n, length) int64, cut at that length and padded with -1.

    Args:
        encode: from a text to its token ids, such as a tokenizer's `encode`; default: the bytes of
            UTF-8, a vocabulary of 256.

    >>> texts_to_tokens(["abc", "a"], 2).tolist()
    [[97, 98], [97, -1]]
    """
    rows = torch.full((len(texts), length), -1)
    for row, text in zip(rows, texts, strict=True):
        ids = list(encode(text))[:length]
        row[: len(ids)] = torch.tensor(ids, dtype=torch.int64)
    return rows


def codes_to_texts(rows: Tensor) -> list[str]:
    """The texts of code points (n, length)."""
    return ["".join(map(chr, filter(None, row))) for row in rows.tolist()]
