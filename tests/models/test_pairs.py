"""Texts read word by word, and an image with its text."""

import pytest
import torch

from unalike.models import build_encoder
from unalike.models.pairs import numbered


def written(*texts):
    rows = torch.zeros(len(texts), max(map(len, texts)) + 2, dtype=torch.int32)
    for row, text in zip(rows, texts, strict=True):
        row[:len(text)] = torch.tensor([ord(letter) for letter in text], dtype=torch.int32)
    return rows


def test_words_have_numbers_whatever_stands_between_them():
    a, b, c = numbered(written("A dog runs.", "a  DOG, runs", "dog a"), 5000)
    assert torch.equal(a, b) and (a > 0).sum() == 3 and c.tolist() == [a[1], a[0], 0]
    assert len(set(a.tolist())) == 3 and a.max() < 5000
    assert not numbered(written("", " ,"), 100).any()


def test_what_comes_after_a_text_is_not_read():
    torch.manual_seed(0)
    gru = build_encoder("gru", (9,), {"words": 50, "embedding": 4, "width": 6})
    words = torch.tensor([[3, 7, 0, 0], [3, 7, 9, 2]])
    alone, longer = gru(words[:1, :2]), gru(words)
    assert alone.shape == (1, 6) and longer.shape == (2, 6)
    assert torch.allclose(gru(written("", "a dog")).isfinite().double(), torch.ones(2, 6).double())


def test_a_pair_is_two_vectors_of_one_width():
    torch.manual_seed(0)
    options = {"image": {"name": "cnn", "channels": [4], "width": 8}, "text": {"name": "gru", "words": 9, "width": 6}, "width": 5}
    pair = build_encoder("pair", {"text": (4,), "image": (1, 8, 8)}, options)
    x = {"image": torch.rand(3, 1, 8, 8), "text": torch.ones(3, 4, dtype=torch.int64)}
    both = pair(x)
    assert both.shape == (3, 2, 5) and torch.allclose(both[:, 0], pair.joint[0](pair.parts[0](x["image"])))
    with pytest.raises(ValueError, match=r"an image .* and a text"):
        build_encoder("pair", {"a": (3,), "b": (4,)}, options)
