"""Texts with gaps for learnt tokens, and a model of which only the head is the model's to keep."""

import pytest
import torch
from torch import nn

from unalike.models import build_encoder
from unalike.models.prompts import PromptedModel, Prompts, ScoresToLogits, initial_tokens


@pytest.fixture
def tiny():
    return build_encoder("vlm-tiny", (1, 16, 16), {"weights": "none"})


def test_gaps_filled_with_words_read_as_the_text(tiny):
    words = lambda text: tiny.embed(tiny.tokens([text])[0])[0]
    made = Prompts(tiny, [[2, "scene", 1, "digit two"], [2, "a scene with", 1, "one"]])
    learnt = torch.stack(
        [torch.cat([words("the left"), words("of")]), torch.cat([words("a top"), words("and")])]
    )
    torch.testing.assert_close(
        tiny.read(*made(learnt)),
        tiny.texts(["the left scene of digit two", "a top a scene with and one"]),
    )
    torch.testing.assert_close(
        made(learnt[0])[0][1, :1], made(learnt)[0][1, :1]
    )  # one set of tokens serves all rows
    assert not made.state_dict()


def test_learnt_tokens_begin_as_words_and_carry_gradients(tiny):
    learnt = initial_tokens(tiny, 3, 6)
    words = tiny.embed(tiny.tokens(["a photo of a"])[0])[0]
    assert learnt.shape == (3, 6, tiny.word)
    assert (learnt - words[[0, 1, 2, 3, 0, 1]]).abs().max() < 0.2 * words.std()
    tiny.read(*Prompts(tiny, [[6, "one"]] * 3)(learnt)).sum().backward()
    assert learnt.grad.abs().sum() > 0


def test_a_name_without_words_or_too_long_is_told(tiny):
    with pytest.raises(ValueError, match=r"'\?!' has no word this model can read"):
        Prompts(tiny, [[4, "?!"]])
    with pytest.raises(
        ValueError, match="a prompt has 36 tokens with its ends, this model reads 32"
    ):
        Prompts(tiny, [[4, "one " * 30]])


def test_the_frozen_half_is_not_kept_but_moves_along(tiny):
    class Head(nn.Linear):
        def forward(self, model, patches, whole):
            return super().forward(whole)

    model = PromptedModel(tiny, Head(tiny.width, 3))
    assert (
        set(model.state_dict()) == {"head.weight", "head.bias"}
        and len(list(model.parameters())) == 2
    )
    model.load_state_dict(model.state_dict())
    x = torch.rand(2, 1, 16, 16)
    torch.testing.assert_close(model(x), model(model.look(x)))
    assert (
        model.double().encoder.device.type == "cpu"
        and next(tiny.parameters()).dtype == torch.float64
    )


def test_the_verdict_compares_an_images_labels():
    verdict, scores = ScoresToLogits(), torch.tensor([[1.0, 2.0, 6.0]])
    torch.testing.assert_close(verdict(scores), verdict(100 + 7 * scores), atol=1e-4, rtol=0)
    assert verdict(scores)[0, 2] > 0 > verdict(scores)[0, 1]
    assert verdict(torch.tensor([[5.0]])).item() == pytest.approx(4.0)
