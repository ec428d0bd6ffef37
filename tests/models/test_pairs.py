"""Texts read word by word, and an image with its text."""

import pytest
import torch

from unalike.models import build_encoder
from unalike.models.gru import hash_words


def texts_to_codes(*texts):
    rows = torch.zeros(len(texts), max(map(len, texts)) + 2, dtype=torch.int32)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = torch.tensor([ord(letter) for letter in text], dtype=torch.int32)
    return rows


def test_words_have_numbers_whatever_stands_between_them():
    a, b, c = hash_words(texts_to_codes("A dog runs.", "a  DOG, runs", "dog a"), 5000)
    assert (
        torch.equal(a, b) and (a > 0).sum() == 3 and c.tolist() == [a[1], a[0], *[0] * (len(c) - 2)]
    )
    assert len(set(a.tolist())) == 4 and a.max() < 5000  # three words, and no word
    assert not hash_words(texts_to_codes("", " ,"), 100).any()


@pytest.mark.parametrize("length", [None, 6])
def test_what_comes_after_a_text_is_not_read(length):
    """A text says the same alone, beside a longer one, and as letters or numbers of words; the order of its words matters both ways."""
    torch.manual_seed(0)
    gru = build_encoder(
        "gru", (9,), {"words": 50, "embedding": 4, "width": 6, "length": length}
    ).double()
    words = torch.tensor([[3, 7, 0, 0], [3, 7, 9, 2]])
    alone, longer = gru(words[:1, :2]), gru(words)
    assert alone.shape == (1, 6) and longer.shape == (2, 6)
    torch.testing.assert_close(alone[0], longer[0])
    assert (gru(words.flip(1)[1:])[0] - longer[1]).abs().max() > 1e-3
    both = texts_to_codes("a dog", "a dog that runs")
    torch.testing.assert_close(gru(both)[:1], gru(both[:1]))
    torch.testing.assert_close(gru(gru.trunk(both)), gru(both))
    assert gru(texts_to_codes("", "a dog")).isfinite().all()


def test_ahead_and_from_the_end_by_hand():
    torch.manual_seed(0)
    gru = build_encoder("gru", (3,), {"words": 9, "embedding": 4, "width": 5}).double()
    words = torch.tensor([[3, 7, 2]])
    seen = gru.vectors(words)
    by_hand = (gru.ahead(seen)[0] + gru.back(seen.flip(1))[0].flip(1)).mean(1) / 2
    torch.testing.assert_close(gru(words), by_hand)


def test_texts_are_cut_to_a_length():
    long, short = texts_to_codes("one two three four", "one two")
    assert hash_words(long[None], 5000, 2).tolist() == hash_words(short[None], 5000, 2).tolist()
    gru = build_encoder("gru", (20,), {"words": 50, "embedding": 4, "width": 6, "length": 2})
    assert (
        gru.trunk(long[None]).shape
        == gru.trunk(torch.ones(1, 1, dtype=torch.int64)).shape
        == (1, 2)
    )
    torch.testing.assert_close(gru(long[None]), gru(short[None]))
    with pytest.raises(ValueError, match="sizes of 1 or more"):
        build_encoder("gru", (20,), {"length": 0})


def test_a_pair_is_two_vectors_of_one_width():
    torch.manual_seed(0)
    options = {
        "image": {"name": "cnn", "channels": [4], "width": 8},
        "text": {"name": "gru", "words": 9, "width": 6},
        "width": 5,
    }
    pair = build_encoder("pair", {"text": (4,), "image": (1, 8, 8)}, options)
    x = {"image": torch.rand(3, 1, 8, 8), "text": torch.ones(3, 4, dtype=torch.int64)}
    both = pair(x)
    assert both.shape == (3, 2, 5) and torch.allclose(
        both[:, 0], pair.joint[0](pair.parts[0](x["image"]))
    )
    kept = pair.trunk({"image": x["image"], "text": texts_to_codes("a dog", "a", "the cat")})
    assert kept["image"] is x["image"] and kept["text"].dtype == torch.int64
    torch.testing.assert_close(
        pair(kept), pair({"image": x["image"], "text": texts_to_codes("a dog", "a", "the cat")})
    )
    with pytest.raises(ValueError, match=r"an image .* and a text"):
        build_encoder("pair", {"a": (3,), "b": (4,)}, options)
