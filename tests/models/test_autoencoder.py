"""The autoencoder of several modalities: what is missing leaves no trace."""

import pytest
import torch

from unalike.models import build_encoder
from unalike.models.autoencoder import Autoencoder, fuse, with_masks

SHAPES = {"image": (1, 4, 4), "text": (7,)}


@pytest.fixture
def model():
    return Autoencoder(SHAPES, hidden=(16, 8), width=5).double()


def test_fused_feature_is_the_mean_of_the_codes_there_are(model):
    x = {"image": torch.randn(3, 1, 4, 4).double(), "text": torch.randn(3, 7).double()}
    codes = model.codes(x)
    assert set(codes) == {"image", "text"} and all(z.shape == (3, 5) for z in codes.values())
    assert torch.allclose(model(x), (codes["image"] + codes["text"]) / 2)
    assert torch.equal(model({"text": x["text"]}), codes["text"])
    assert torch.equal(fuse({"text": codes["text"]}, with_masks(x)), codes["text"])


def test_a_sample_is_fused_and_rebuilt_from_what_it_has(model):
    x = {
        "image": torch.randn(3, 1, 4, 4).double(),
        "text": torch.randn(3, 7).double(),
        "text?": torch.tensor([True, False, True]),
    }
    codes = model.codes(x)
    h = model(x)
    assert set(codes) == {"image", "text"} and torch.allclose(h[1], codes["image"][1])
    assert torch.allclose(h[0], (codes["image"][0] + codes["text"][0]) / 2)
    some = [0, 2]
    image = (model.decoders["image"](h) - x["image"].flatten(1)).square().mean()
    assert torch.allclose(
        model.error(x), image + (model.decoders["text"](h[some]) - x["text"][some]).square().mean()
    )


def test_decoders_mirror_encoders(model):
    for part, widths in (
        (model.encoders["text"], [16, 8, 5]),
        (model.decoders["text"], [8, 16, 7]),
    ):
        assert [layer.out_features for layer in part if hasattr(layer, "out_features")] == widths
    assert model.decoders["image"](torch.zeros(2, 5).double()).shape == (2, 16)


def test_a_missing_modality_gets_no_gradient(model):
    model({"text": torch.randn(3, 7).double()}).sum().backward()
    assert all(p.grad is None for p in model.encoders["image"].parameters())


def test_a_plain_input_is_one_modality():
    assert Autoencoder((7,), hidden=(8,), width=5)(torch.randn(2, 7)).shape == (2, 5)


@pytest.mark.parametrize("name", ["a.b", "a,b", "", "values", 1])
def test_names_that_a_model_cannot_hold_are_refused(name):
    with pytest.raises(
        ValueError, match=f"a modality cannot be called {name!r}: take letters, digits"
    ):
        Autoencoder({name: (7,)})


def test_other_encoders_refuse_modalities():
    assert isinstance(build_encoder("autoencoder", SHAPES, {"hidden": (8,)}), Autoencoder)
    with pytest.raises(ValueError, match="use autoencoder"):
        build_encoder("mlp", SHAPES, {})
