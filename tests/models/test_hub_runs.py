"""Pretrained models inside methods, whole and with LoRA: only what learns or moves travels."""

import csv
import sys
from functools import partial

import pytest
import torch
import yaml
from pretrained import save_reader, small

import unalike
from unalike import (
    Classification,
    Client,
    FedAvg,
    FedMuscle,
    HeteroFL,
    SequenceLabelling,
    Training,
    cli,
)
from unalike.base.errors import UserError
from unalike.base.message import encoded_size
from unalike.data.text_codes import texts_to_codes
from unalike.models import build_encoder
from unalike.models.hub import check_folder
from unalike.models.model import find_trunk
from unalike.runs import RunPlan
from unalike.runs.audit import audit

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
    "mobilenet": "ViT",
    "clip": "ViT",
    "siglip": "ViT",
}
TEXTS = ["a dog runs", "a cat sleeps", "the dog sleeps", "cat", "a the a", "runs", "a", "the"]
FAMILIES = [*PROCESSORS, "bert", "distilbert", "roberta", "gpt2", "llama"]
QUICK = [family for family in FAMILIES if family != "mobilenet"]  # seventeen blocks
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
@pytest.mark.parametrize("family", QUICK)
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


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_learns_and_what_it_adapts_stays(family, folders, toys, tmp_path):
    """After two rounds every weight from disk is as it was, and no adapter is still zero."""
    clients = two_of(family, folders[family], 4)
    method = METHODS["fedmuscle"]
    fed = toys.federation(tmp_path, method, clients, rounds=2, batch_size=4)
    toys.serve(fed, method)
    fresh = dict(clients[0].encoder(0).named_parameters())
    learnt = dict(fed.engine.host.programs["ada"].model.encoder.named_parameters())
    assert learnt.keys() == fresh.keys()
    stays = [name for name, p in fresh.items() if not p.requires_grad]
    adapters = [name for name in fresh if "lora_B" in name]
    assert stays and all(torch.equal(learnt[name], fresh[name]) for name in stays)
    assert adapters and all(learnt[name].abs().max() > 0 for name in adapters)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pretrained_model_runs_at_half_its_width(family, folders, tmp_path):
    clients = two_of(family, folders[family], 0)
    clients[1].capacity = 0.5
    budget = Training(rounds=1, batch_size=4, lr=0.01)
    run = tmp_path / "run"
    results = unalike.run(HeteroFL(), clients, training=budget, out=run, alone=False)
    assert not results["failures"]
    sizes = {id: client["parameters"] for id, client in results["clients"].items()}
    assert sizes["ben"] < 0.7 * sizes["ada"]


@pytest.mark.parametrize("family", ["vit", "resnet", "gpt2"])
def test_a_submodel_of_frozen_weights_is_refused_before_the_run(family, folders, tmp_path):
    clients = two_of(family, folders[family], 4)
    with pytest.raises(UserError, match="submodels are made of weights that all learn"):
        unalike.run(HeteroFL(), clients, training=BUDGET, out=tmp_path / "run", alone=False)
    assert not (tmp_path / "run").exists()


class Wrapped(torch.nn.Module):
    """A user's own module around a model that peft wrapped."""

    def __init__(self, folder, wrap=True):
        super().__init__()
        import peft

        self.bert = transformers.AutoModel.from_pretrained(folder, add_pooling_layer=False)
        if wrap:
            config = peft.LoraConfig(r=2, target_modules=["query", "value"])
            self.bert = peft.get_peft_model(self.bert, config)

    def forward(self, x):
        return self.bert(input_ids=x).last_hidden_state.mean(1)


def own_clients(*folders, model=Wrapped):
    x, y = torch.arange(48).reshape(8, 6) % 9, torch.arange(8) % 2
    return [
        Client(f"client-{i}", partial(model, folder), Classification(2), (x, y), (x, y), x)
        for i, folder in enumerate(folders)
    ]


def test_of_a_users_own_peft_model_only_what_learns_is_sent(folders, toys, tmp_path):
    """By every method, and the audit shows it."""
    clients = own_clients(folders["bert"], folders["bert"])
    run = tmp_path / "run"
    results = unalike.run(FedAvg(), clients, training=BUDGET, out=run, alone=False)
    program = FedAvg.Program(clients[0], FedAvg(), BUDGET, 0)
    learning = {n: p.detach() for n, p in program.model.named_parameters() if p.requires_grad}
    body = {"parameters": learning, "samples": 8, "loss": 0.0}
    assert update_bytes(run) == 4 * [encoded_size({"body": body, "work": 0.0, "number": 1})]
    assert len(set(toys.hashes(results).values())) == 1
    for method in METHODS.values():
        found = audit(RunPlan(method, clients, BUDGET, local_baseline=False))
        holds = [
            held["name"]
            for message in found["clients"]["client-0"]["messages"]
            for held in message["holds"]
        ]
        frozen = [n for n, p in program.model.named_parameters() if not p.requires_grad]
        assert frozen and not [h for h in holds if h.endswith(tuple(frozen))]


def test_adapters_of_different_frozen_weights_are_not_averaged(folders, toys, tmp_path):
    torch.manual_seed(1)
    other = tmp_path / "other"
    small("bert").save_pretrained(other)
    clients = own_clients(folders["bert"], str(other), folders["bert"])
    results = unalike.run(FedAvg(), clients, training=BUDGET, out=tmp_path / "run", alone=False)
    hashes = toys.hashes(results)
    assert hashes["client-0"] == hashes["client-2"] != hashes["client-1"]


@pytest.mark.parametrize(
    ("encoder", "shape", "config"),
    [
        ("hub", (3, 32, 32), {"model_type": "vit", "image_size": 32, "patch_size": 8}),
        ("reader", (20,), {"model_type": "bert", "vocab_size": 256}),
    ],
)
def test_a_model_is_built_from_a_config(encoder, shape, config, toys, tmp_path):
    """With LoRA all clients have the same random weights below; without, each its own."""
    plain = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    shared = {}
    for lora in (0, 2):
        build = partial(build_encoder, encoder, shape, {"config": config | plain, "lora": lora})
        clients = [client_of(id, "vit" if encoder == "hub" else "bert", "", 0) for id in "ab"]
        for client in clients:
            client.model = build
        first, second = (dict(client.encoder(0).named_parameters()) for client in clients)
        shared[lora] = [n for n in first if torch.equal(first[n], second[n]) and first[n].any()]
        name = next(n for n in first if "q_proj" in n or "query" in n)
        assert (name in shared[lora]) == (lora > 0)
    results = unalike.run(FedAvg(), clients, training=BUDGET, out=tmp_path / "run", alone=False)
    assert len(set(toys.hashes(results).values())) == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "hub needs the model's name or folder .* or else a config"),
        ({"config": {"model_type": "vti"}}, "cannot build a model from the config"),
        (
            {"model": "vit", "lora": 2, "targets": ["q_prj"]},
            'no layer .q_prj.* Did you mean "q_proj"\\? It has: .*k_proj, .*q_proj',
        ),
    ],
)
def test_a_wrong_option_is_told(options, sentence, folders):
    if "model" in options:
        options = options | {"model": folders[options["model"]]}
    with pytest.raises(UserError, match=sentence):
        build_encoder("hub", (3, 32, 32), options)


GREY_VIT = {
    **{"model_type": "vit", "image_size": 8, "patch_size": 4, "num_channels": 1},
    **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    "intermediate_size": 16,
}


def test_a_model_of_grey_images_takes_them_as_they_are(tmp_path):
    """Its preprocessor file may still hold three means; here it has one for its one channel."""
    transformers.AutoModel.from_config(transformers.ViTConfig(**GREY_VIT)).save_pretrained(tmp_path)
    x = torch.rand(2, 1, 8, 8)
    encoder = build_encoder("hub", (1, 8, 8), {"model": str(tmp_path), "lora": 2}).eval()
    pixels = (x - 0.5) / 0.5
    tokens = encoder.model(pixel_values=pixels).last_hidden_state[:, 1:]
    torch.testing.assert_close(encoder(x), tokens.mean(1))


@pytest.mark.parametrize(("channels", "taken"), [(1, 3), (6, 6), (6, 1)])
def test_images_have_the_models_channels_or_one(channels, taken):
    config = GREY_VIT | {"num_channels": taken}
    if channels == taken or channels == 1:
        encoder = build_encoder("hub", (channels, 8, 8), {"config": config}).eval()
        assert encoder(torch.rand(2, channels, 8, 8)).shape == (2, 16)
        return
    with pytest.raises(UserError, match=r"takes images of 1 channels.*num_channels: 6"):
        build_encoder("hub", (channels, 8, 8), {"config": config})


def test_lora_goes_into_the_layers_that_are_named(folders):
    options = {"model": folders["vit"], "lora": 2, "targets": ["k_proj", "mlp.fc1"]}
    encoder = build_encoder("hub", (3, 32, 32), options)
    learns = {name.split(".lora_")[0] for name in encoder.state_dict()}
    assert {name.rsplit(".", 1)[-1] for name in learns} == {"k_proj", "fc1"}


def test_a_tokenizer_without_padding_token_is_read(folders, tmp_path):
    """Padding is masked: the vector of a text does not depend on what it is padded with."""
    save_reader(tmp_path, "gpt2", ["a", "the", "dog", "cat", "runs"], padding=None)
    reader = build_encoder("reader", (20,), {"model": str(tmp_path), "length": 6}).eval()
    x = texts_to_codes(["a dog", "the cat runs"], 20)
    with torch.no_grad():
        padded = reader(x)
        short = build_encoder("reader", (20,), {"model": str(tmp_path), "length": 4}).eval()
        torch.testing.assert_close(short(x[:1]), padded[:1])


@pytest.mark.parametrize("lora", [0, 2])
def test_a_model_of_texts_labels_tokens(lora, folders, tmp_path):
    """Whether the token before was "dog" (6); what is padded counts for nothing."""
    ids = torch.randint(4, 9, (40, 6), generator=torch.Generator().manual_seed(0))
    ids[:, 4] = 6
    y = (ids.roll(1, 1) == 6).long()
    y[:, 0] = -100
    ids[20:, 5:], y[20:, 5:] = -1, -100
    options = {"model": folders["bert"], "lora": lora, "length": 6}
    clients = [
        Client(
            id,
            partial(build_encoder, "reader", (6,), options),
            SequenceLabelling(["no", "yes"]),
            train=(ids[:30], y[:30]),
            test=(ids[30:], y[30:]),
        )
        for id in "ab"
    ]
    training = Training(rounds=1 + 4 * (lora == 0), epochs=4, batch_size=8, lr=0.02)
    results = unalike.run(FedAvg(), clients, training=training, out=tmp_path / "run", alone=False)
    assert not results["failures"]
    always_no = 100 * float((y[30:] == 0).sum() / (y[30:] >= 0).sum())
    if lora == 0:
        assert results["clients"]["a"]["value"] > always_no + 5


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_a_folder_without_a_tokenizer_is_told(family, tmp_path):
    """transformers makes one that knows no word: all texts would read alike."""
    small(family).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"reader finds no tokenizer in .*: save the model's there"):
        build_encoder("reader", (20,), {"model": str(tmp_path), "length": 6})


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


def test_frozen_weights_that_the_files_lack_are_the_same_for_all_clients(tmp_path):
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        image_size=8, patch_size=4,
    )  # fmt: skip
    ViTModel(config, add_pooling_layer=False).save_pretrained(tmp_path)
    first, second = (
        build_encoder("hub", (1, 8, 8), {"model": str(tmp_path), "lora": 2}) for _ in range(2)
    )
    poolers = [
        dict(encoder.model.named_parameters())["pooler.dense.weight"] for encoder in (first, second)
    ]
    assert torch.equal(*poolers)
