"""Pretrained models inside methods, whole and with LoRA: only what learns or moves travels."""

import csv
import sys
from functools import partial

import pytest
import torch
import yaml
from pretrained import save_reader, small

import unalike
from unalike import Classification, Client, FedAvg, FedMuscle, Training, cli
from unalike.base.message import encoded_size
from unalike.data.text_codes import texts_to_codes
from unalike.models import build_encoder
from unalike.models.hub import check_folder
from unalike.models.model import find_trunk

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

PROCESSORS = {
    "vit": "ViT",
    "dinov2": "Bit",
    "registers": "Bit",
    "swin": "ViT",
    "convnext": "ConvNext",
    "resnet": "ConvNext",
    "segformer": "Segformer",
}
TEXTS = ["a dog runs", "a cat sleeps", "the dog sleeps", "cat", "a the a", "runs", "a", "the"]
FAMILIES = [*PROCESSORS, "bert", "distilbert"]
METHODS = {"fedavg": FedAvg(), "fedmuscle": FedMuscle(peers=1, width=4, batch=4)}
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
BUDGET = Training(rounds=2, batch_size=4, lr=0.01)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each family, as `save_pretrained` writes it, with its preprocessor file."""
    saved = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        if family in PROCESSORS:
            torch.manual_seed(0)
            small(family).save_pretrained(folder)
            processor = getattr(transformers, f"{PROCESSORS[family]}ImageProcessorPil")
            processor(size={"height": 32, "width": 32}).save_pretrained(folder)
        else:
            save_reader(folder, family, ["a", "the", "dog", "cat", "runs"])
        saved[family] = str(folder)
    return saved


def encoder_of(family, folder, lora):
    """A function that builds the family's encoder: `hub` for images, `reader` for texts."""
    options = {"model": folder, "lora": lora}
    if family not in PROCESSORS:
        return partial(build_encoder, "reader", (20,), options | {"length": 6})
    if family in ("convnext", "segformer"):
        options["size"] = 32  # their configs have a size that they do not need
    return partial(build_encoder, "hub", (3, 32, 32), options)


def client_of(id, family, folder, lora):
    y = torch.arange(8) % 2
    x = torch.randint(256, (8, 3, 32, 32), generator=torch.Generator().manual_seed(0)).byte()
    x = x if family in PROCESSORS else texts_to_codes(TEXTS, 20)
    model = encoder_of(family, folder, lora)
    return Client(id, model, Classification(2), train=(x, y), test=(x, y), public=x)


def two_of(family, folder, lora):
    return [client_of(id, family, folder, lora) for id in ("ada", "ben")]


def update_bytes(run):
    """Bytes of each client's update in each round, from the run's ledger."""
    with (run / "ledger.csv").open() as file:
        rows = list(csv.DictReader(file))
    updates = [row for row in rows if row["operation"] == "update" and row["direction"] == "up"]
    return [int(row["bytes"]) for row in updates]


def learning_and_moving(model, x):
    """Parameters that learn, and buffers that a pass in training changes: found by looking."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.train()(x)
    moving = {name: b for name, b in model.named_buffers() if not torch.equal(b, before[name])}
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad} | moving


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pretrained_model_runs_in_a_method(family, lora, method, folders, toys, tmp_path):
    """Two rounds as a user would run them. FedAvg's ledger counts what learns and what moves."""
    clients = two_of(family, folders[family], lora)
    run = tmp_path / "run"
    results = unalike.run(METHODS[method], clients, training=BUDGET, out=run, alone=False)
    assert not results["failures"]
    assert all(client["value"] is not None for client in results["clients"].values())
    if method == "fedmuscle":
        return
    assert len(set(toys.hashes(results).values())) == 1, "both average, and leave with one model"
    program = METHODS[method].Program(clients[0], METHODS[method], BUDGET, 0)
    rows = program.client.to_device(clients[0].train.rows(torch.arange(4))[0])
    expected = learning_and_moving(program.model, rows)
    body = {"parameters": expected, "samples": 8, "loss": 0.0}
    assert update_bytes(run) == 4 * [encoded_size({"body": body, "work": 0.0, "number": 1})]
    if lora:
        in_encoder = [name for name in expected if name.startswith("encoder.")]
        assert any("lora_" in name for name in in_encoder)
        assert all("lora_" in name or name.endswith(STATISTICS) for name in in_encoder)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_lora_learns_and_what_it_adapts_stays(family, method, folders, toys, tmp_path):
    """After two rounds every weight from disk is as it was, and no adapter is still zero."""
    clients = two_of(family, folders[family], 4)
    fed = toys.federation(tmp_path, METHODS[method], clients, rounds=2, batch_size=4)
    toys.serve(fed, METHODS[method])
    fresh = dict(clients[0].encoder(0).named_parameters())
    learnt = dict(fed.engine.host.programs["ada"].model.encoder.named_parameters())
    assert learnt.keys() == fresh.keys()
    stays = [name for name, p in fresh.items() if not p.requires_grad]
    adapters = [name for name in fresh if "lora_B" in name]
    assert stays and all(torch.equal(learnt[name], fresh[name]) for name in stays)
    assert adapters and all(learnt[name].abs().max() > 0 for name in adapters)


def test_unlike_families_align_with_each_other_and_with_one_from_scratch(folders, tmp_path):
    families = ("vit", "swin", "convnext", "resnet", "segformer")
    clients = [client_of(family, family, folders[family], 4) for family in families]
    scratch = client_of("cnn", "vit", folders["vit"], 4)
    scratch.model = partial(build_encoder, "cnn", (3, 32, 32), {"channels": [4, 4], "width": 8})
    method = FedMuscle(peers=2, width=4, batch=4)
    out = tmp_path / "run"
    results = unalike.run(method, [*clients, scratch], training=BUDGET, out=out, alone=False)
    assert not results["failures"] and set(results["clients"]) == {*families, "cnn"}


def test_a_trunk_is_one_that_is_there_and_fixed(folders):
    class HasTrunk(torch.nn.Identity):
        has_fixed_trunk = True

        def trunk(self, x):
            return x

    learns = HasTrunk()
    learns.has_fixed_trunk = False
    only_fixed = torch.nn.Identity()
    only_fixed.has_fixed_trunk = True
    assert find_trunk(HasTrunk()) is not None
    assert find_trunk(learns) is None and find_trunk(only_fixed) is None
    assert find_trunk(encoder_of("vit", folders["vit"], 4)()) is None
    assert find_trunk(encoder_of("bert", folders["bert"], 4)()) is not None


def test_a_pair_takes_a_hub_model_that_has_no_trunk_beside_a_reader_that_has_one(folders):
    image = {"name": "hub", "model": folders["vit"], "lora": 4}
    text = {"name": "reader", "model": folders["bert"], "lora": 4, "length": 6}
    shape = {"image": (3, 32, 32), "text": (20,)}
    pair = build_encoder("pair", shape, {"image": image, "text": text, "width": 4}).eval()
    x = {"image": torch.rand(2, 3, 32, 32), "text": texts_to_codes(TEXTS[:2], 20)}
    kept = find_trunk(pair)(x)
    assert kept["image"] is x["image"] and kept["text"].shape == (2, 6)
    torch.testing.assert_close(pair(kept), pair(x))


@pytest.mark.parametrize("name", ["/no/where", "./vit", "~/vit", "models/of/mine"])
def test_a_folder_that_is_not_there_is_told_before_anything_is_fetched(name):
    with pytest.raises(ValueError, match=f"'{name}': there is no such folder; give a folder"):
        check_folder("reader", name)


def test_a_folder_or_a_name_on_the_hub_is_left_to_transformers(folders):
    for name in (folders["vit"], "owner/model", "model"):
        check_folder("hub", name)


@pytest.fixture
def run_scenario(tmp_path, monkeypatch, capsys):
    """Runs `unalike run` with a client for each folder; returns exit code and what it said."""
    monkeypatch.chdir(tmp_path)

    def run(*models):
        clients = [
            {
                "id": f"client-{i}",
                "model": {"name": "hub", "model": model, "lora": 4},
                "target": "digit",
                "train": 12,
                "test": 12,
            }
            for i, model in enumerate(models)
        ]
        scenario = {
            "name": "pretrained",
            "algorithm": {"name": "fedavg"},
            "training": {"rounds": 1},
            "data": {"name": "digits"},
            "clients": clients,
        }
        (tmp_path / "pretrained.yaml").write_text(yaml.safe_dump(scenario))
        monkeypatch.setattr(sys, "argv", ["unalike", "run", "pretrained.yaml", "--out", "run"])
        code = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code or 0
        out, err = capsys.readouterr()
        return code, out + err

    return run


def test_a_scenario_names_a_folder(run_scenario, folders, tmp_path):
    code, said = run_scenario(folders["vit"], folders["resnet"])
    assert code == 0 and "Traceback" not in said
    assert len(update_bytes(tmp_path / "run")) == 2


def test_a_scenario_with_a_wrong_folder_ends_with_one_sentence(run_scenario, tmp_path):
    code, said = run_scenario("./nowhere")
    sentence = "hub cannot load './nowhere': there is no such folder; give a folder that"
    assert code == 2 and "Traceback" not in said
    assert said.count("nowhere") == 1 and sentence in " ".join(said.split())
    assert not (tmp_path / "run").exists()
