"""`unalike check`: every problem at once, each where it is, and nothing that only follows from another."""

import sys

import pytest
import torch
import yaml

from unalike import cli

HEAD = "name: x\nalgorithm: {name: fedavg}\ndata: {name: digits}\n"
ADA = "clients: [{id: ada, model: {name: mlp}, target: digit, train: 9, test: 9}]\n"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNALIKE_CACHE", str(tmp_path / "cache"))
    for name in ("UNALIKE_DATA", "UNALIKE_DEBUG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def said(monkeypatch, capsys, tmp_path):
    """What a command says of a file with this text: exit code, and the words."""

    def run(text, *words, verb="check"):
        (tmp_path / "x.yaml").write_text(text)
        monkeypatch.setattr(sys, "argv", ["unalike", verb, "x.yaml", *words])
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code or 0
        out, err = capsys.readouterr()
        return code, (err or out).removeprefix("unalike: ").strip()

    return run


@pytest.fixture
def places(said):
    def run(text, *words, verb="check"):
        code, told = said(text, *words, verb=verb)
        assert code == 2 and "Traceback" not in told
        return {line.split()[0]: line.split(maxsplit=1)[1] for line in told.split("\n")[1:]}

    return run


@pytest.mark.parametrize("verb", ["check", "run"])
def test_problems_of_every_kind_are_told_in_one_pass(places, verb):
    told = places(
        """
name: all
algorithm: {name: fedmuscle, peer: 1, width: 8, batch: 1}
training: {rounds: 2, lr: fast, epoch: 3}
data: {name: digits, partition: {name: dirichlet, alpha: -1}}
public: {size: 5000}
clients:
  - {id: ada, model: {name: mlp, widht: 8}, target: digits}
  - {id: ben, model: {name: cnnn}, target: ink}
  - {id: cleo, model: {name: mlp}, target: ink}
  - {id: cleo, model: mlp, traget: digit}
  - {model: {name: mlp, width: 0}, target: digit, data: {name: digist}}
""",
        verb=verb,
    )
    assert set(told) == {
        "algorithm.peer",
        "algorithm.batch",
        "training.lr",
        "training.epoch",
        "data.partition.alpha",
        "public.size",
        "clients.0.model.widht",
        "clients.0.target",
        "clients.1.model.name",
        "clients.cleo",
        "clients.3.model",
        "clients.3.id",
        "clients.3.traget",
        "clients.4.id",
        "clients.4.model.width",
        "clients.4.data.name",
    }
    assert told["data.partition.alpha"] == "must be above 0, got -1."
    for where, meant in [
        ("algorithm.peer", "peers"),
        ("training.epoch", "epochs"),
        ("clients.0.model.widht", "width"),
        ("clients.1.model.name", "cnn"),
        ("clients.3.traget", "target"),
        ("clients.4.data.name", "digits"),
    ]:
        assert f'Did you mean "{meant}"?' in told[where]


def test_what_follows_from_a_broken_part_is_not_told(places):
    """Public set, count, algorithm field and target are each broken: nothing is said of sizes, peers or a target that is missing."""
    for broken, where in [
        ("pubilc: {size: 40}\n" + ADA, {"pubilc"}),
        ("public: {size: many}\n" + ADA, {"public.size"}),
        (
            "public: {size: 40}\n" + ADA.replace("id: ada", "id: ada, count: some"),
            {"clients.0.count"},
        ),
        ("public: {size: 40}\n" + ADA.replace("target:", "targt:"), {"clients.0.targt"}),
    ]:
        head = (
            HEAD.replace("fedavg", "fedmuscle, peers: 1")
            if "count" in broken
            else HEAD.replace("fedavg", "fedmuscle, peer: 1")
        )
        assert set(places(head + broken)) == where | (
            {"algorithm.peer"} if "peer:" in head else set()
        )


def test_a_dense_task_needs_a_model_with_a_map(places):
    told = places(
        HEAD
        + "clients:\n  - {id: a, count: 3, model: {name: mlp}, target: ink}\n  - {id: b, model: {name: cnn}, target: ink}"
    )
    assert set(told) == {"clients.a-0"} and "MLP has none, cnn, transformer" in told["clients.a-0"]


def test_one_sentence_for_a_group_whose_clients_own_different_modalities(places):
    told = places(
        "name: x\nalgorithm: {name: fedavgg}\ndata: {name: digits_views}\n"
        "clients: [{id: a, count: 6, mix: {single: 1}, model: {name: mlp}}]\n"
    )
    assert (
        set(told) == {"algorithm.name", "clients.a-0"} and "use autoencoder" in told["clients.a-0"]
    )


def test_a_public_set_the_models_cannot_take_is_told_where_the_method_needs_it(said, places):
    text = (
        HEAD.replace("fedavg", "fedmuscle, peers: 1, batch: 8")
        + "public: {size: 20, data: digits_views}\n"
        + ADA.replace("ada,", "a, count: 2,")
    )
    assert "cannot take those of the public set" in places(text)["clients.a-0"]
    assert said(text, "--set", "algorithm={name: fedavg}")[0] == 0


def test_one_dataset_is_not_dealt_out_twice(places, said):
    two = (
        "clients:\n  - {id: a, model: {name: mlp}, target: digit}\n"
        "  - {id: b, model: {name: mlp}, target: digit, data: {name: digits%s}}\n"
    )
    told = places(HEAD + two % ", partition: {name: shards, shards: 2}")
    assert (
        set(told) == {"clients.1.data"} and "data divides digits already" in told["clients.1.data"]
    )
    assert said(HEAD + two % "")[0] == 0


@pytest.mark.parametrize(
    "text, says",
    [
        (
            "name: x\nalgorithm: {name: fedavg\ndata: 3\n",
            "x.yaml, line 3, column 5: expected ',' or '}', but got ':'",
        ),
        (HEAD + "seed: 1\nseed: 2\n", 'x.yaml, line 5, column 1: the key "seed" occurs twice'),
        ("\x00", "x.yaml is not YAML: it has characters that are not allowed in text"),
        ("a: " + "[" * 3000, "x.yaml is not a scenario: it is nested too deep"),
        ("", "x.yaml is not a scenario: expected a mapping of names to values, it is empty"),
        (
            "python: true",
            "x.yaml belongs to a run started from Python, whose clients only that program can create; "
            "run it there",
        ),
    ],
)
def test_what_is_no_scenario_is_one_sentence(said, text, says):
    assert said(text) == (2, says)


def test_words_are_ours(places):
    told = places(
        "name: 3\nalgorithm: fedavg\ndata: digits\ntraining: {rounds: 1.5, optimizer: adamm}\npublic: 20\nalone: 7\n"
        "on: 1\ndevice:\nclients: [3, {id: c, model: {name: mlp, hidden: 3}, modalities: [1]}, "
        "{id: d, model: {name: mlp, hidden: [2, a]}}]\n"
    )
    assert (
        told["clients.2.model.hidden.1"] == "must be a whole number, got 'a'."
        and told["device"] == "must be text, got nothing."
    )
    assert (
        told["data"] == "must be a mapping of names to values: write {name: digits}, got 'digits'."
    )
    assert (
        told["training.optimizer"]
        == "must be 'adamw', 'adam' or 'sgd', got 'adamm'. Did you mean \"adam\"?"
    )
    assert (
        told["training.rounds"] == "must be a whole number, got 1.5."
        and told["clients.1.model.hidden"] == "must be a list, got 3."
    )
    assert told["alone"] == "must be true or false, got 7." and told["on"].startswith(
        'There is no field "on".'
    )
    assert not any(
        word in "".join(told.values()) for word in ("Input", "valid", "instance", "dictionary")
    )


def test_true_and_false_are_no_numbers(places):
    told = places(
        HEAD.replace("fedavg", "fedprox, mu: yes").replace(
            "digits", "digits, partition: {name: dirichlet, alpha: no}"
        )
        + "training: {lr: true}\nprivacy: {noise: on}\n"
        + ADA.replace("mlp", "mlp, hidden: [8, true]"),
        "--set",
        "rounds=true",
        "--set",
        "federation.dropout=off",
    )
    assert (
        told["training.rounds"] == "must be a whole number, got True."
        and told["data.partition.alpha"] == "must be a number, got False."
    )
    assert set(told) == {
        "training.rounds",
        "training.lr",
        "data.partition.alpha",
        "algorithm.mu",
        "privacy.noise",
        "federation.dropout",
        "clients.0.model.hidden",
    }


@pytest.mark.parametrize("verb", ["check", "run"])
def test_what_privacy_cannot_protect_is_told_with_the_rest(places, verb):
    for method, why in [
        ("local", "Local does not say how"),
        ("fmcsc", "FMCSC's clients tell how much their views have in common"),
        (
            "afmcc",
            "weights made from private data would leave the clients; set algorithm.weights to uniform",
        ),
    ]:
        kind = (
            ADA
            if method == "local"
            else "clients: [{id: a, count: 2, train: 12, model: {name: autoencoder}}]\n"
        )
        head = HEAD.replace("fedavg", method).replace(
            "digits", "digits" if method == "local" else "digits_views"
        )
        assert places(head + "privacy: {noise: 1}\n" + kind, verb=verb)["privacy"].startswith(why)
        both = places(head + "privacy: {noise: 1}\n" + kind, "--set", "rounds=0", verb=verb)
        assert set(both) == {"privacy", "training.rounds"} and both["privacy"].startswith(why)


@pytest.mark.parametrize("verb", ["check", "run"])
def test_peers_need_as_many_clients_in_each_round(said, places, verb):
    text = (
        HEAD.replace("fedavg", "fedmuscle, peers: 2, width: 8, batch: 8")
        + "public: {size: 20}\n"
        + ADA.replace("ada,", "a, count: 6,")
    )
    told = places(text, "--set", "participation=0.2", verb=verb)
    assert told == {
        "algorithm.peers": "2 peers need 3 clients a round, 1 is drawn. Lower algorithm.peers or raise federation.participation."
    }
    if verb == "check":
        assert said(text, "--set", "participation=0.5")[0] == 0


def test_clients_without_rows_have_no_other_problem(places):
    """They want more than there is, or a partition that is not there: nothing is said of too few samples to cluster."""
    text = "name: x\nalgorithm: {name: local}\ndata: {name: digits_views%s}\nclients: [{id: a, count: 2, model: {name: autoencoder}%s}]\n"
    assert set(places(text % (", partition: {name: dirichlett}", ""))) == {"data.partition.name"}
    assert set(places(text % ("", ", train: 9000"))) == {"clients"}


def test_a_value_is_never_shown_at_length(places):
    told = places(
        HEAD.replace("name: x", "name: [" + "[1, 2, 3, 4, 5, 6, 7, 8], " * 90 + "]") + ADA
    )
    assert len(told["name"]) < 300


def test_a_client_is_set_by_its_id(said, places):
    assert places(HEAD + ADA, "--set", "clients.ada.train=0") == {
        "clients.0.train": "must be at least 1, got 0."
    }
    assert said(HEAD + ADA, "--set", "clients.adda.train=3") == (
        2,
        '--set clients.adda.train: There is no client "adda". Did you mean "ada"? There are: ada.',
    )


def test_a_setting_of_one_client_leaves_its_twin_in_yaml_alone(places):
    twins = "clients:\n  - {id: a, model: &m {name: mlp}, target: digit}\n  - {id: b, model: *m, target: digit}\n"
    assert set(places(HEAD + twins, "--set", "clients.b.model.width=0")) == {
        "clients.1.model.width"
    }


def test_a_path_without_words_is_refused(said):
    assert said(HEAD + ADA, "--set", "clients..train=3") == (
        2,
        '--set takes key=value, got "clients..train=3"',
    )


def test_fields_to_set_are_listed_once(said):
    _, told = said(HEAD.replace("fedavg", "fedmuscle") + ADA, "--set", "bach=3")
    listed = told.split("There are: ")[1].rstrip(".").split(", ")
    assert (
        'Did you mean "batch"?' in told
        and len(listed) == len(set(listed))
        and {"batch", "seed"} <= set(listed)
    )


def test_the_system_is_quoted_without_its_numbers():
    from unalike.base.errors import UserError
    from unalike.scenarios import load_mapping

    with pytest.raises(
        UserError,
        match=r"^the scenario file nowhere.yaml cannot be read: No such file or directory$",
    ):
        load_mapping("nowhere.yaml")


def test_a_run_can_be_repeated_from_its_config(said, tmp_path):
    import json

    words = ("--set", "rounds=1", "--json", "--no-alone", "--data-dir", "here")
    code, _ = said(HEAD + ADA, *words, "--out", "one", verb="run")
    kept = (tmp_path / "one" / "config.yaml").read_text()
    assert code == 0 and yaml.safe_load(kept)["data_dir"] == "here"
    assert said(kept)[0] == 0
    assert said(kept, "--json", "--out", "two", verb="run")[0] == 0
    first, again = (
        json.loads((tmp_path / name / "results.json").read_text())["clients"]
        for name in ("one", "two")
    )
    assert first == again and (tmp_path / "two" / "config.yaml").read_text() == kept


def test_trying_the_clients_leaves_no_trace():
    """Neither the random numbers that come next nor a client's own module change."""
    from torch import nn

    from unalike.algorithms.fedavg import FedAvg
    from unalike.core.client import Client
    from unalike.runs.compatibility import check_clients
    from unalike.tasks import Classification
    from unalike.training.loop import Training

    encoder = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    client = Client(
        "ada", encoder, Classification(2), (torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1]))
    )
    before, state = (
        torch.get_rng_state(),
        {name: t.clone() for name, t in encoder.state_dict().items()},
    )
    assert check_clients(FedAvg(), [client], Training(), 0).problems == []
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(t, state[name]) for name, t in encoder.state_dict().items())


def test_labels_that_do_not_fit_and_a_model_that_cannot_take_its_rows_are_told_in_python_too():
    from torch import nn

    from unalike import run
    from unalike.algorithms.fedavg import FedAvg
    from unalike.base.errors import Problems
    from unalike.core.client import Client
    from unalike.tasks import Classification

    wide = nn.Linear(4, 4)
    wide.width = 4
    rows = torch.zeros(4, 3)
    with pytest.raises(ValueError, match="client ada, train: label 7 does not fit 2 classes"):
        Client("ada", nn.Linear(3, 4), Classification(2), (rows, torch.tensor([0, 7, 0, 1])))
    with pytest.raises(Problems) as told:
        run(
            FedAvg(),
            [Client("ben", wide, Classification(2), (rows, torch.zeros(4, dtype=torch.int64)))],
        )
    assert [where for where, _ in told.value.problems] == ["clients.ben"]


def test_the_engine_is_read_with_the_rest(places):
    told = places(
        HEAD
        + ADA
        + "engine: {name: ray, gpu: 0.25, cpus: 0}\nworkers: 2\ndevice: cuda:99\nseed: x\n"
    )
    assert list(told) == [
        "seed",
        "engine.gpu",
        "engine.cpus",
        "workers",
    ]  # and the cluster may well have such a GPU
    told = places(HEAD + ADA + "engine: {cpus: 1}\nworkers: 2\ndevice: cuda:99\n")
    assert list(told) == ["engine.name", "device"]
    assert list(places(HEAD + ADA + "engine: ray\ndevice: gpu\n")) == ["device"]
