"""Language: loss and perplexity by formula, and causal models in methods: only what learns moves."""

import csv
import math
from functools import partial

import pytest
import torch

import unalike
from unalike import Client, FedAvg, FedProx, HetLoRA, Language, Local, Training, UserError
from unalike.algorithms import ALGORITHMS
from unalike.base.message import encoded_size
from unalike.data import load_dataset
from unalike.models import build_encoder

VOCABULARY, LENGTH = 12, 8
BUDGET = Training(rounds=1, batch_size=8, lr=0.02)
SERVED = (
    *("local", "fedavg", "fedprox", "fedbn", "fedavgft", "ditto", "apfl", "pfedme", "perfedavg"),
    *("fedamp", "fedfomo", "fedala", "scaffold", "fednova", "feddyn", "fedavgm", "fedadam"),
    *("fedyogi", "fedadagrad", "fedawa", "hetlora"),
)


def config(family):
    """A config of a tiny model; GPT-2 has one parameter as embedding and output layer."""
    if family == "gpt2":
        own = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": LENGTH}
    else:
        own = {
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "intermediate_size": 8,
            "max_position_embeddings": LENGTH,
        }
    return {"model_type": family, "vocab_size": VOCABULARY, **own}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Tiny random models, as `save_pretrained` writes them."""
    t = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    saved = {}
    for family in ("gpt2", "llama"):
        torch.manual_seed(0)
        whole = t.AutoConfig.for_model(**config(family))
        saved[family] = str(tmp_path_factory.mktemp(family))
        t.AutoModelForCausalLM.from_config(whole).save_pretrained(saved[family])
    return saved


def texts(rows, seed):
    """Texts that count upwards from a random token, the second half of them padded."""
    start = torch.randint(VOCABULARY, (rows, 1), generator=torch.Generator().manual_seed(seed))
    ids = (start + torch.arange(LENGTH)) % VOCABULARY
    ids[rows // 2 :, 5:] = -1
    return ids


def clients_of(folder, ranks=(2, 2)):
    clients = []
    for number, rank in enumerate(ranks):
        options = {"model": folder, "lora": rank}
        model = partial(build_encoder, "causal", (LENGTH,), options)
        train, test = (texts(16, number), None), (texts(8, number + 50), None)
        clients.append(Client(f"c{number}", model, Language(VOCABULARY), train, test))
    return clients


def test_loss_and_perplexity_are_those_of_the_formula():
    """Mean over predicted tokens of -log softmax, token by token, in float64."""
    draws = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, 5, dtype=torch.float64, generator=draws)
    ids = torch.tensor([[3, 1, 4, 2], [0, 2, -1, -1]])
    task = Language(5)
    y = task.derive_labels(ids)
    assert y.tolist() == [[1, 4, 2, -100], [2, -100, -100, -100]]
    terms = []
    for row, step, token in [(0, 0, 1), (0, 1, 4), (0, 2, 2), (1, 0, 2)]:
        scores = [math.exp(value) for value in logits[row, step].tolist()]
        terms.append(-math.log(scores[token] / sum(scores)))
    expected = sum(terms) / 4
    assert task.loss(logits, y).item() == pytest.approx(expected, rel=1e-12)
    meter = task.meter()
    for row in range(2):  # perplexity is of all tokens, not a mean over batches
        meter.add(logits[row : row + 1], y[row : row + 1])
    metrics = meter.result()
    assert metrics["log_loss"] == pytest.approx(expected, rel=1e-12)
    assert metrics["perplexity"] == pytest.approx(math.exp(expected), rel=1e-12)


def test_a_uniform_guess_has_the_perplexity_of_the_vocabulary():
    meter = Language(7).meter()
    meter.add(torch.zeros(1, 3, 7), torch.tensor([[0, 6, -100]]))
    assert meter.result()["perplexity"] == pytest.approx(7)
    assert Language(7).loss(torch.zeros(1, 2, 7), torch.full((1, 2), -100)) == 0


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_loss_is_that_of_transformers_and_padding_changes_nothing(family, folders):
    from transformers import AutoModelForCausalLM

    ids = texts(6, 0)
    encoder = build_encoder("causal", (LENGTH,), {"model": folders[family], "lora": 2}).eval()
    task = Language(VOCABULARY)
    model = AutoModelForCausalLM.from_pretrained(folders[family]).eval()
    total, count = 0.0, 0
    for row in ids:
        row = row[row >= 0][None]
        tokens = row.shape[1] - 1
        total += model(input_ids=row, labels=row).loss.item() * tokens
        count += tokens
    loss = task.loss(encoder(ids), task.derive_labels(ids))
    assert loss.item() == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize("lora", [0, 2])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_fedavg_sends_each_parameter_that_learns_once(family, lora, folders, toys, tmp_path):
    clients = clients_of(folders[family], (lora, lora))
    run = tmp_path / "run"
    results = unalike.run(FedAvg(), clients, training=BUDGET, out=run, alone=False)
    assert not results["failures"]
    assert len(set(toys.hashes(results).values())) == 1
    model = FedAvg.Program(clients[0], FedAvg(), BUDGET, 0).model
    learns = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    body = {"parameters": learns, "samples": 16, "loss": 0.0}
    with (run / "ledger.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["operation"] == "update"]
    sizes = [int(row["bytes"]) for row in rows if row["direction"] == "up"]
    assert sizes == 2 * [encoded_size({"body": body, "work": 0.0, "number": 1})]
    assert all(("lora_" in name) == bool(lora) for name in learns)


@pytest.mark.parametrize("method", [Local(), FedAvg(), FedProx(), HetLoRA()])
def test_perplexity_falls_and_that_is_a_gain(method, folders, tmp_path):
    ranks = (2, 4) if isinstance(method, HetLoRA) else (0, 0)
    clients = clients_of(folders["llama"], ranks)
    training = Training(rounds=3, epochs=4, batch_size=8, lr=0.02)
    results = unalike.run(method, clients, training=training, out=tmp_path / "run")
    assert not results["failures"]
    for entry in results["clients"].values():
        assert entry["metric"] == "perplexity" and entry["higher_is_better"] is False
        assert 1 < entry["value"] < VOCABULARY, "better than a guess"
        if not isinstance(method, Local):
            assert entry["value"] != entry["alone"]
            assert (entry["gain"] > 0) == (entry["value"] < entry["alone"])


@pytest.mark.parametrize("name", SERVED)
def test_methods_of_whole_models_run(name, folders, tmp_path):
    clients = clients_of(folders["llama"])
    method = ALGORITHMS[name]()
    results = unalike.run(method, clients, training=BUDGET, out=tmp_path / "run", alone=False)
    assert not results["failures"]
    assert all(entry["value"] > 1 for entry in results["clients"].values())


def test_all_other_methods_refuse_it_before_the_run(folders, tmp_path):
    assert [name for name, method in ALGORITHMS.items() if method.serves(Language)] == [*SERVED]
    with pytest.raises(UserError, match="client c0 wants language"):
        unalike.run(ALGORITHMS["moon"](), clients_of(folders["gpt2"]), out=tmp_path / "run")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([[0, 12]]), "token id 12 does not fit a vocabulary of 12"),
        (torch.tensor([[-1, 3]]), "padding .* follows the tokens"),
        (torch.tensor([[0.5, 1.0]]), "whole numbers"),
        (torch.tensor([1, 2]), "2 axes"),
    ],
)
def test_texts_that_do_not_fit_are_refused(ids, message):
    with pytest.raises(UserError, match=message):
        Client("a", torch.nn.Identity(), Language(VOCABULARY), train=(ids, None))


def test_models_that_do_not_fit_are_refused(folders, tmp_path):
    with pytest.raises(UserError, match="reads 8 tokens, texts have 9"):
        build_encoder("causal", (9,), {"model": folders["llama"]})
    small = partial(build_encoder, "causal", (LENGTH,), {"model": folders["llama"]})
    for model, message in [(small, "vocabulary of 20 tokens"), (torch.nn.Identity(), "causal")]:
        client = Client("a", model, Language(20), train=(texts(4, 0), None))
        with pytest.raises(UserError, match=message):
            unalike.run(FedAvg(), [client], training=BUDGET, out=tmp_path / "run")


@pytest.mark.parametrize("lora", [0, 2])
def test_an_exported_model_is_read_by_transformers_and_here(lora, folders, tmp_path):
    from transformers import AutoModelForCausalLM

    clients = clients_of(folders["gpt2"], (lora, lora))
    run = tmp_path / "run"
    unalike.run(FedAvg(), clients, training=BUDGET, out=run, alone=False)
    folder = tmp_path / "model"
    unalike.export(run, "c0", folder, clients=clients, onnx=False)
    ids = texts(4, 9).clamp(min=0)
    rebuilt = unalike.rebuild(folder, clients)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    original = AutoModelForCausalLM.from_pretrained(folders["gpt2"]).eval()
    expected = model(input_ids=ids).logits
    assert torch.allclose(rebuilt(ids), expected, atol=1e-5)
    assert not torch.allclose(original(input_ids=ids).logits, expected, atol=1e-5)


def test_news_are_a_text_dataset(tmp_path):
    for part in ("train", "test"):
        (tmp_path / f"agnews_{part}.csv").write_text("1,Hi,you\n")
    table = load_dataset("agnews", str(tmp_path), texts="bytes")
    assert table.x[0, :7].tolist() == [*b"Hi you", -1]
    assert table.targets["text"][0, :6].tolist() == [*b"i you", -100]
    assert table.tasks["text"] == Language(256)
