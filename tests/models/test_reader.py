"""Readers of texts: models of Hugging Face on disk, each with a tokenizer of its own; those of different ones learn from the same texts."""

from functools import partial

import pytest
import torch
from pretrained import save_reader

import unalike
from unalike import Classification, Client, FedMuscle, Training
from unalike.data.text_codes import texts_to_codes
from unalike.models import build_encoder

t = pytest.importorskip("transformers")
TEXTS = ["a dog runs", "a cat sleeps", "the dog sleeps", "cat", "a the a the", "runs runs"]


@pytest.fixture
def two(tmp_path):
    words = ["a", "the", "dog", "cat", "runs"], ["sleeps", "runs", "dog", "a"]
    return [
        save_reader(tmp_path / kind, kind, its)
        for kind, its in zip(("bert", "distilbert"), words, strict=True)
    ]


def test_a_reader_splits_by_its_own_tokenizer_and_means_over_what_is_there(two):
    x = texts_to_codes(TEXTS[:2], 20)
    one, other = (
        build_encoder("reader", (20,), {"model": folder, "length": 6}).eval() for folder in two
    )
    assert one.trunk(x).tolist() == [[2, 4, 6, 8, 3, -1], [2, 4, 7, 1, 3, -1]]
    assert other.trunk(x).tolist() == [[2, 7, 6, 5, 3, -1], [2, 7, 1, 4, 3, -1]]
    with torch.no_grad():
        states = (
            t.AutoModel.from_pretrained(two[0])
            .eval()(input_ids=torch.tensor([[2, 4, 6, 8, 3]]))
            .last_hidden_state
        )
        torch.testing.assert_close(one(x)[:1], states.mean(1))
        torch.testing.assert_close(one(one.trunk(x)), one(x))
    assert (one.width, other.width) == (16, 8) and one.trunk(texts_to_codes(["a " * 9], 20))[
        0, -1
    ] == 3, "cut, and its end is there"


def test_lora_learns_alone_in_either(two):
    for folder in two:
        reader = build_encoder("reader", (20,), {"model": folder, "length": 6, "lora": 2}).train()
        learning = {name for name, p in reader.named_parameters() if p.requires_grad}
        assert (
            learning
            and all("lora_" in name for name in learning)
            and reader.state_dict().keys() == learning
        )
        x = texts_to_codes(TEXTS, 20)
        assert torch.equal(reader(x), reader(x)), "nothing is dropped"


def test_readers_with_different_tokenizers_align_on_the_same_texts(two, tmp_path):
    x, y = texts_to_codes(TEXTS, 20), torch.arange(6) % 2
    clients = [
        Client(
            f"c{i}",
            partial(build_encoder, "reader", (20,), {"model": folder, "length": 6, "lora": 2}),
            Classification(2),
            (x, y),
            (x, y),
            x,
        )
        for i, folder in enumerate(two)
    ]
    told = unalike.run(
        FedMuscle(peers=1, width=4, batch=3),
        clients,
        training=Training(rounds=1),
        out=tmp_path / "run",
        alone=False,
    )
    assert not told["failures"] and all(
        client["value"] is not None for client in told["clients"].values()
    )


@pytest.mark.parametrize(
    ("shape", "options", "said"),
    [
        ((20,), {"model": ""}, "reader needs the model's name or folder"),
        ((20,), {"model": "./nowhere"}, "reader cannot load './nowhere'"),
        ((3, 8, 8), {}, "rows of letters"),
        ((20,), {"length": 13}, "reads 3 to 12 tokens, got lora 0, length 13"),
    ],
)
def test_what_is_wrong_is_told(two, shape, options, said):
    options = {"model": two[0]} | options
    with pytest.raises(ValueError, match=said):
        build_encoder("reader", shape, options)
