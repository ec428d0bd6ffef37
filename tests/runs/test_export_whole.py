"""An exported model is whole: transformers, peft and onnxruntime read the folder by themselves."""

import shutil
from functools import partial

import pytest
import torch
from pretrained import READERS, save_reader, small
from safetensors.torch import load_file
from torch import nn

import unalike
from unalike import Classification, Client, FedAvg, HeteroFL, Training
from unalike.data.text_codes import texts_to_codes
from unalike.models import build_encoder

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
IMAGES = ["vit", "dinov2", "swin", "convnext", "resnet", "segformer", "clip", "siglip"]
WORDS = ["a", "the", "dog", "cat", "runs"]
BUDGET = Training(rounds=1, batch_size=4, lr=0.05)


def build_client(family, folder, lora, capacity=1.0):
    """A client whose model of that family lies on disk."""
    y = torch.arange(8) % 2
    options = {"model": str(folder), "lora": lora}
    if family in READERS:
        save_reader(folder, family, WORDS)
        x = texts_to_codes(["a dog runs", "the cat", "cat", "a a the", "runs", "a", "the", "dog"])
        model = partial(build_encoder, "reader", tuple(x.shape[1:]), options | {"length": 6})
    else:
        torch.manual_seed(0)
        small(family).save_pretrained(folder)
        if family in ("convnext", "segformer"):
            options["size"] = 32
        x = torch.rand(8, 3, 32, 32)
        model = partial(build_encoder, "hub", (3, 32, 32), options)
    return Client("ada", model, Classification(["no", "yes"]), (x, y), (x, y), capacity=capacity)


def run_and_export(client, tmp_path, method=None, onnx=False):
    """The trained model, the folder with its export, and what was said."""
    run = tmp_path / "run"
    method = method or FedAvg()
    unalike.run(method, [client], training=BUDGET, out=run, alone=False)
    lines = unalike.export(run, "ada", clients=[client], algorithm=method, onnx=onnx)
    model = unalike.trained(run, [client], method)["ada"]
    return model, run / "exports" / "ada", lines


def last_hidden(model, inputs):
    with torch.no_grad():
        return model.eval()(**inputs).last_hidden_state


def inputs_of(family, encoder):
    torch.manual_seed(1)
    if family in READERS:
        return {"input_ids": torch.randint(4, 9, (3, 6))}
    return {"pixel_values": torch.rand(2, 3, encoder.size, encoder.size)}


@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize("family", [*IMAGES, *READERS])
def test_transformers_reads_the_folder_by_itself(family, lora, tmp_path):
    client = build_client(family, tmp_path / "source", lora)
    model, folder, _ = run_and_export(client, tmp_path)
    inputs = inputs_of(family, model.encoder)
    expected = last_hidden(model.encoder.model, inputs)
    source = transformers.AutoModel.from_pretrained(tmp_path / "source")
    source = getattr(source, "vision_model", source)
    assert (last_hidden(source, inputs) - expected).abs().max() > 1e-4, "it learnt"
    again = transformers.AutoModel.from_pretrained(folder)
    torch.testing.assert_close(last_hidden(again, inputs), expected, atol=1e-5, rtol=1e-5)
    if lora:
        assert (folder / "adapter_config.json").is_file()
        base = tmp_path / "base"
        base.mkdir()
        for name in ("config.json", "model.safetensors"):
            shutil.copy(folder / name, base / name)
        plain = transformers.AutoModel.from_pretrained(base)
        with_adapter = peft.PeftModel.from_pretrained(plain, folder)
        torch.testing.assert_close(
            last_hidden(with_adapter, inputs), expected, atol=1e-5, rtol=1e-5
        )
    rebuilt = unalike.rebuild(folder, [client])
    x = client.to_device(client.test.rows(torch.arange(8))[0])
    assert torch.equal(rebuilt(x), model(x))


def test_all_weights_of_a_frozen_model_are_written(tmp_path):
    """Of this encoder 5 of 6 million numbers are frozen; only what learnt was written."""
    encoder = partial(
        build_encoder, "efficientnet", (3, 32, 32), {"weights": "none", "adapters": 2}
    )
    x, y = torch.rand(8, 3, 32, 32), torch.arange(8) % 2
    client = Client("ada", encoder, Classification(2), (x, y), (x, y))
    model, folder, lines = run_and_export(client, tmp_path)
    written = load_file(folder / "model.safetensors")
    parameters = dict(model.named_parameters())
    assert parameters.keys() <= written.keys()
    assert f"{sum(p.numel() for p in parameters.values()):,} parameters" in lines[0]
    assert all(torch.equal(p, written[name]) for name, p in parameters.items())
    assert torch.equal(unalike.rebuild(folder, [client])(x), model(x))


def test_a_submodel_is_no_transformers_model_and_is_written_as_it_is(tmp_path):
    client = build_client("bert", tmp_path / "source", 0, capacity=0.5)
    model, folder, _ = run_and_export(client, tmp_path, HeteroFL())
    assert not (folder / "head.safetensors").exists()
    assert load_file(folder / "model.safetensors").keys() == model.state_dict().keys()


@pytest.mark.parametrize(("family", "lora"), [("vit", 4), ("resnet", 4), ("bert", 4)])
def test_onnxruntime_gives_the_same_outputs(family, lora, tmp_path):
    """With what is frozen; texts come as token ids, for ONNX has no tokenizer."""
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    client = build_client(family, tmp_path / "source", lora)
    model, folder, lines = run_and_export(client, tmp_path, onnx=True)
    assert (folder / "model.onnx").is_file(), lines
    x = client.test.rows(torch.arange(8))[0]
    x = model.encoder.trunk(x) if family in READERS else x
    session = runtime.InferenceSession(str(folder / "model.onnx"))
    (output,) = session.run(None, {"x": x.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(output), model(x), atol=1e-5, rtol=1e-5)


def test_onnx_takes_modalities_by_name_and_which_samples_have_them(tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    has_left = torch.tensor([True, False] * 4)
    x = {"left": torch.rand(8, 3), "right": torch.rand(8, 5), "left?": has_left}
    options = {"encoder": {"name": "mlp"}, "width": 4}
    fusion = partial(build_encoder, "late_fusion", {"left": (3,), "right": (5,)}, options)
    data = (x, torch.arange(8) % 2)
    client = Client("ada", fusion, Classification(["no", "yes"]), data, data)
    model, folder, lines = run_and_export(client, tmp_path, onnx=True)
    said = "left: float32 (rows, 3); right: float32 (rows, 5); left?: bool (rows)"
    assert any(line.endswith(said) for line in lines), lines
    assert "left float32 (rows, 3)" in (folder / "README.md").read_text()
    session = runtime.InferenceSession(str(folder / "model.onnx"))
    (output,) = session.run(None, {name: rows.numpy() for name, rows in x.items()})
    with torch.no_grad():
        expected = model(x)
    torch.testing.assert_close(torch.from_numpy(output), expected, atol=1e-5, rtol=1e-5)
    (changed,) = session.run(
        None, {name: (rows + 1 if name == "left" else rows).numpy() for name, rows in x.items()}
    )
    is_equal = (torch.from_numpy(changed) == torch.from_numpy(output)).all(1)
    assert is_equal.tolist() == (~has_left).tolist(), "what a sample lacks is not looked at"


def test_the_model_card_says_what_onnx_takes(tmp_path):
    """Images that came as bytes are divided by 255 before the model: who runs it must know."""
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    x = torch.randint(256, (8, 1, 4, 4), generator=torch.Generator().manual_seed(0)).byte()
    y = torch.arange(8) % 2
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3), nn.ReLU())
    client = Client("ada", net, Classification(["no", "yes"]), (x, y), (x, y))
    model, folder, lines = run_and_export(client, tmp_path, onnx=True)
    said = "float32 (rows, 1, 4, 4), bytes divided by 255"
    assert f"x is {said}" in (folder / "README.md").read_text()
    assert any(line.endswith(said) for line in lines)
    session = runtime.InferenceSession(str(folder / "model.onnx"))
    (output,) = session.run(None, {"x": (x / 255).numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(output), model(x / 255), atol=1e-5, rtol=1e-5)


def test_the_model_card_says_what_the_model_is(tmp_path, toys):
    clients = [toys.client(name) for name in "ab"]
    run = tmp_path / "run"
    results = unalike.run(FedAvg(), clients, training=toys.training(rounds=2), out=run)
    unalike.export(run, "a", clients=clients, onnx=False)
    card = (run / "exports" / "a" / "README.md").read_text()
    entry = results["clients"]["a"]
    for text in (
        "library_name: unalike",
        f"| task | {entry['task']}, metric {entry['metric']} |",
        f"| labels | {', '.join(clients[0].task.labels)} |",
        "| method | fedavg |",
        "| rounds | 2 |",
        f"trained alone | {entry['alone']:.1f} |",
        f"trained together | {entry['value']:.1f} |",
        f"| commit | {results['commit']} |",
        "there is no epsilon",
    ):
        assert text in card
    assert sum(line.startswith(f"| {name} |") for line in card.splitlines() for name in "ab") == 2
    # the clients were made by this program, so no file describes them
    assert 'unalike.rebuild("FOLDER", clients)' in card


def test_the_card_of_a_private_run_has_its_epsilon(tmp_path, toys):
    pytest.importorskip("dp_accounting")
    clients = [toys.client(name) for name in "ab"]
    privacy = unalike.Privacy(noise=1.0, bound=1.0)
    run = tmp_path / "run"
    results = unalike.run(
        FedAvg(), clients, training=toys.training(rounds=1), privacy=privacy, out=run, alone=False
    )
    unalike.export(run, "a", clients=clients, onnx=False)
    epsilon = results["clients"]["a"]["privacy"]["epsilon"]
    assert f"epsilon {epsilon:.3g}" in (run / "exports" / "a" / "README.md").read_text()


def test_names_cannot_break_the_card(tmp_path, toys):
    client = toys.client("a|b\n<script>")
    run = tmp_path / "run"
    unalike.run(FedAvg(), [client], training=toys.training(rounds=1), out=run, alone=False)
    unalike.export(run, client.id, tmp_path / "home", clients=[client], onnx=False)
    card = (tmp_path / "home" / "README.md").read_text()
    assert "<script>" not in card and "a|b" not in card


def test_a_users_own_peft_model_is_exported_for_peft(tmp_path):
    save_reader(tmp_path / "source", "bert", WORDS)

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            bert = transformers.AutoModel.from_pretrained(tmp_path / "source")
            config = peft.LoraConfig(r=2, target_modules=["query", "value"])
            self.bert = peft.get_peft_model(bert, config)

        def forward(self, x):
            return self.bert(input_ids=x).last_hidden_state.mean(1)

    x, y = torch.arange(48).reshape(8, 6) % 9, torch.arange(8) % 2
    client = Client("ada", Wrapped, Classification(2), (x, y), (x, y))
    model, folder, _ = run_and_export(client, tmp_path)
    again = transformers.AutoModel.from_pretrained(folder)
    expected = last_hidden(model.encoder.bert, {"input_ids": x})
    torch.testing.assert_close(last_hidden(again, {"input_ids": x}), expected)
