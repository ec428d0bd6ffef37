"""Models that see and read: one interface, and prompts put together in the space of tokens."""

import pytest
import torch
from torch.nn.functional import normalize

from unalike.models import build_encoder


@pytest.fixture
def tiny():
    return build_encoder("vlm-tiny", (1, 16, 16), {})


def test_images_and_texts_meet_and_nothing_learns(tiny):
    x = torch.rand(3, 1, 16, 16)
    places, whole = tiny.train().patches(x)
    rows, columns = tiny.places
    assert places.shape == (3, rows * columns, tiny.width) and whole.shape == (3, tiny.width)
    torch.testing.assert_close(tiny(x), whole)
    torch.testing.assert_close(tiny.grid(x)[1, :, 2, 3], places[1, 2 * columns + 3])
    assert not tiny.training and not any(p.requires_grad for p in tiny.parameters())
    texts = tiny.texts(["a seven", "a scene with a one and a two"])
    torch.testing.assert_close(
        tiny.similarity(whole, texts),
        tiny.scale * normalize(whole, dim=1) @ normalize(texts, dim=1).T,
    )


def test_a_prompt_of_parts_reads_as_the_text_it_is(tiny):
    """Padding between parts leaves no gap: a text in two parts is the text in one."""
    first, second = tiny.tokens(["a scene", "the"]), tiny.tokens(["with two digits", "seven"])
    joined = tiny.read(*tiny.prompt(*((tiny.embed(ids), mask) for ids, mask in (first, second))))
    torch.testing.assert_close(joined, tiny.texts(["a scene with two digits", "the seven"]))
    embeddings, mask = tiny.prompt((tiny.embed(first[0]), first[1]))
    assert embeddings.shape == (2, 4, tiny.word) and mask.tolist() == [
        [True] * 4,
        [True] * 3 + [False],
    ]


def test_a_prompt_carries_gradients_to_learnt_tokens(tiny):
    learnt = torch.zeros(1, 4, tiny.word, requires_grad=True)
    ids, mask = tiny.tokens(["one", "digit two"])
    tiny.read(
        *tiny.prompt(
            (learnt.expand(2, -1, -1), torch.ones(2, 4, dtype=torch.bool)), (tiny.embed(ids), mask)
        )
    ).pow(2).sum().backward()
    assert learnt.grad.abs().sum() > 0


def test_texts_that_cannot_be_read_are_told(tiny):
    with pytest.raises(ValueError, match=r"'!\?' has no word this model can read"):
        tiny.tokens(["one", "!?"])
    with pytest.raises(ValueError, match="has 31 tokens, this model reads 30"):
        tiny.tokens(["one " * 31])
    ids, mask = tiny.tokens(["one " * 29])
    with pytest.raises(
        ValueError, match="a prompt has 60 tokens with its ends, this model reads 32"
    ):
        tiny.prompt((tiny.embed(ids), mask), (tiny.embed(ids), mask))
