"""`unalike check` reports all problems at once, with their paths and without consequences."""

import sys

import pytest
import torch
import yaml

from unalike import cli

HEAD = "name: x\nalgorithm: {name: fedavg}\ndata: {name: digits}\n"
ADA = "clients: [{id: ada, model: {name: mlp}, target: digit, train: 9, test: 9}]\n"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNALIKE_CACHE", str(tmp_path / "cache"))
    for name in ("UNALIKE_DATA", "UNALIKE_DEBUG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def output_of(monkeypatch, capsys, tmp_path):
    """Runs a command on a file with this text; returns the exit code and what it printed."""

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
def problems_in(output_of):
    def run(text, *words, verb="check"):
        code, output = output_of(text, *words, verb=verb)
        assert code == 2 and "Traceback" not in output
        return {line.split()[0]: line.split(maxsplit=1)[1] for line in output.split("\n")[1:]}

    return run


@pytest.mark.parametrize("verb", ["check", "run"])
def test_problems_of_every_kind_are_reported_in_one_pass(problems_in, verb):
    problems = problems_in(
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
    assert set(problems) == {
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
    assert problems["data.partition.alpha"] == "must be above 0, got -1."
    for where, meant in [
        ("algorithm.peer", "peers"),
        ("training.epoch", "epochs"),
        ("clients.0.model.widht", "width"),
        ("clients.1.model.name", "cnn"),
        ("clients.3.traget", "target"),
        ("clients.4.data.name", "digits"),
    ]:
        assert f'Did you mean "{meant}"?' in problems[where]


def test_consequences_of_an_invalid_part_are_not_reported(problems_in):
    """Where the public set, a count or a target is invalid, what depends on it is not judged."""
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
        assert set(problems_in(head + broken)) == where | (
            {"algorithm.peer"} if "peer:" in head else set()
        )


def test_a_dense_task_needs_a_model_with_a_feature_map(problems_in):
    problems = problems_in(
        HEAD
        + "clients:\n  - {id: a, count: 3, model: {name: mlp}, target: ink}\n  - {id: b, model: "
        "{name: cnn}, target: ink}"
    )
    assert (
        set(problems) == {"clients.a-0"}
        and "MLP has none, image encoders such as cnn, transformer" in problems["clients.a-0"]
    )


def test_a_problem_of_all_clients_of_a_group_is_reported_once(problems_in):
    problems = problems_in(
        "name: x\nalgorithm: {name: fedavgg}\ndata: {name: digits_views}\n"
        "clients: [{id: a, count: 6, mix: {single: 1}, model: {name: mlp}}]\n"
    )
    assert (
        set(problems) == {"algorithm.name", "clients.a-0"}
        and "use autoencoder" in problems["clients.a-0"]
    )


def test_a_public_set_that_models_cannot_take_is_reported_if_the_method_needs_it(
    output_of, problems_in
):
    text = (
        HEAD.replace("fedavg", "fedmuscle, peers: 1, batch: 8")
        + "public: {size: 20, data: digits_views}\n"
        + ADA.replace("ada,", "a, count: 2,")
    )
    assert "cannot take those of the public set" in problems_in(text)["clients.a-0"]
    assert output_of(text, "--set", "algorithm={name: fedavg}")[0] == 0


def test_two_partitions_of_one_dataset_are_rejected(problems_in, output_of):
    two = (
        "clients:\n  - {id: a, model: {name: mlp}, target: digit}\n"
        "  - {id: b, model: {name: mlp}, target: digit, data: {name: digits%s}}\n"
    )
    problems = problems_in(HEAD + two % ", partition: {name: shards, shards: 2}")
    assert (
        set(problems) == {"clients.1.data"}
        and "data divides digits already" in problems["clients.1.data"]
    )
    assert output_of(HEAD + two % "")[0] == 0


@pytest.mark.parametrize(
    "text, expected",
    [
        (
            "name: x\nalgorithm: {name: fedavg\ndata: 3\n",
            "x.yaml, line 3, column 5: expected ',' or '}', but got ':'",
        ),
        (HEAD + "seed: 1\nseed: 2\n", 'x.yaml, line 5, column 1: the key "seed" occurs twice'),
        ("\x00", "x.yaml is not YAML: it has characters that are not allowed in text"),
        ("a: " + "[" * 3000, "x.yaml, line 1, column 103: it is nested more than 100 deep"),
        ("", "x.yaml is not a scenario: expected a mapping of names to values, it is empty"),
        (
            "python: true",
            "x.yaml belongs to a run started from Python, whose clients only that program can "
            "create; "
            "run it there",
        ),
    ],
)
def test_a_file_that_is_no_scenario_gives_one_sentence(output_of, text, expected):
    assert output_of(text) == (2, expected)


def test_messages_do_not_use_the_words_of_pydantic(problems_in):
    problems = problems_in(
        "name: 3\nalgorithm: fedavg\ndata: digits\ntraining: {rounds: 1.5, optimizer: "
        "adamm}\npublic: 20\nalone: 7\n"
        "on: 1\ndevice:\nclients: [3, {id: c, model: {name: mlp, hidden: 3}, modalities: [1]}, "
        "{id: d, model: {name: mlp, hidden: [2, a]}}]\n"
    )
    assert (
        problems["clients.2.model.hidden.1"] == "must be a whole number, got 'a'."
        and problems["device"] == "must be text, got nothing."
    )
    assert (
        problems["data"]
        == "must be a mapping of names to values: write {name: digits}, got 'digits'."
    )
    assert (
        problems["training.optimizer"]
        == "must be 'adamw', 'adam', 'sgd' or module:name, got 'adamm'. Did you mean \"adam\"?"
    )
    assert (
        problems["training.rounds"] == "must be a whole number, got 1.5."
        and problems["clients.1.model.hidden"] == "must be a list, got 3."
    )
    assert problems["alone"] == "must be true or false, got 7." and problems["on"].startswith(
        'There is no field "on".'
    )
    assert not any(
        word in "".join(problems.values()) for word in ("Input", "valid", "instance", "dictionary")
    )


def test_true_and_false_are_rejected_as_numbers(problems_in):
    problems = problems_in(
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
        problems["training.rounds"] == "must be a whole number, got True."
        and problems["data.partition.alpha"] == "must be a number, got False."
    )
    assert set(problems) == {
        "training.rounds",
        "training.lr",
        "data.partition.alpha",
        "algorithm.mu",
        "privacy.noise",
        "federation.dropout",
        "clients.0.model.hidden",
    }


@pytest.mark.parametrize("verb", ["check", "run"])
def test_methods_without_privacy_are_reported_with_all_other_problems(problems_in, verb):
    for method, why in [
        ("local", "Local does not say how"),
        ("fmcsc", "FMCSC's clients send how much their views have in common"),
        (
            "afmcc",
            "weights made from private data would leave the clients; set algorithm.weights to "
            "uniform",
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
        assert problems_in(head + "privacy: {noise: 1}\n" + kind, verb=verb)["privacy"].startswith(
            why
        )
        both = problems_in(head + "privacy: {noise: 1}\n" + kind, "--set", "rounds=0", verb=verb)
        assert set(both) == {"privacy", "training.rounds"} and both["privacy"].startswith(why)


@pytest.mark.parametrize("verb", ["check", "run"])
def test_peers_need_enough_clients_in_each_round(output_of, problems_in, verb):
    text = (
        HEAD.replace("fedavg", "fedmuscle, peers: 2, width: 8, batch: 8")
        + "public: {size: 20}\n"
        + ADA.replace("ada,", "a, count: 6,")
    )
    problems = problems_in(text, "--set", "participation=0.2", verb=verb)
    assert problems == {
        "algorithm.peers": "2 peers need 3 clients a round, 1 is sampled. "
        "Lower algorithm.peers or raise federation.participation."
    }
    if verb == "check":
        assert output_of(text, "--set", "participation=0.5")[0] == 0


def test_clients_without_rows_are_reported_once(problems_in):
    """Too few rows or an unknown partition: too few samples to cluster is only a consequence."""
    text = (
        "name: x\nalgorithm: {name: local}\ndata: {name: digits_views%s}\n"
        "clients: [{id: a, count: 2, model: {name: autoencoder}%s}]\n"
    )
    assert set(problems_in(text % (", partition: {name: dirichlett}", ""))) == {
        "data.partition.name"
    }
    assert set(problems_in(text % ("", ", train: 9000"))) == {"clients"}


def test_long_values_are_shortened_in_messages(problems_in):
    problems = problems_in(
        HEAD.replace("name: x", "name: [" + "[1, 2, 3, 4, 5, 6, 7, 8], " * 90 + "]") + ADA
    )
    assert len(problems["name"]) < 300


def test_a_client_can_be_set_by_its_id(output_of, problems_in):
    assert problems_in(HEAD + ADA, "--set", "clients.ada.train=0") == {
        "clients.0.train": "must be at least 1, got 0."
    }
    assert output_of(HEAD + ADA, "--set", "clients.adda.train=3") == (
        2,
        '--set clients.adda.train: There is no client "adda". Did you mean "ada"? There are: ada.',
    )


def test_a_setting_does_not_change_another_client_that_shares_a_yaml_anchor(problems_in):
    twins = (
        "clients:\n  - {id: a, model: &m {name: mlp}, target: digit}\n"
        "  - {id: b, model: *m, target: digit}\n"
    )
    assert set(problems_in(HEAD + twins, "--set", "clients.b.model.width=0")) == {
        "clients.1.model.width"
    }


def test_a_path_with_an_empty_part_is_rejected(output_of):
    assert output_of(HEAD + ADA, "--set", "clients..train=3") == (
        2,
        '--set takes key=value, got "clients..train=3"',
    )


def test_known_fields_are_listed_once(output_of):
    _, message = output_of(HEAD.replace("fedavg", "fedmuscle") + ADA, "--set", "bach=3")
    listed = message.split("There are: ")[1].rstrip(".").split(", ")
    assert (
        'Did you mean "batch"?' in message
        and len(listed) == len(set(listed))
        and {"batch", "seed"} <= set(listed)
    )


def test_system_errors_are_quoted_without_their_number():
    from unalike.base.errors import UserError
    from unalike.scenarios import load_mapping

    with pytest.raises(
        UserError,
        match=r"^the scenario file nowhere.yaml cannot be read: No such file or directory$",
    ):
        load_mapping("nowhere.yaml")


def test_a_run_can_be_repeated_from_its_config(output_of, tmp_path):
    import json

    words = ("--set", "rounds=1", "--json", "--no-alone", "--data-dir", "here")
    code, _ = output_of(HEAD + ADA, *words, "--out", "one", verb="run")
    config = (tmp_path / "one" / "config.yaml").read_text()
    assert code == 0 and yaml.safe_load(config)["data_dir"] == "here"
    assert output_of(config)[0] == 0
    assert output_of(config, "--json", "--out", "two", verb="run")[0] == 0
    first, again = (
        json.loads((tmp_path / name / "results.json").read_text())["clients"]
        for name in ("one", "two")
    )
    assert first == again and (tmp_path / "two" / "config.yaml").read_text() == config


def test_the_dry_run_changes_neither_random_state_nor_models():
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


def test_wrong_labels_and_models_are_reported_in_python_too():
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
    with pytest.raises(Problems) as caught:
        run(
            FedAvg(),
            [Client("ben", wide, Classification(2), (rows, torch.zeros(4, dtype=torch.int64)))],
        )
    assert [where for where, _ in caught.value.problems] == ["clients.ben"]


def test_problems_of_the_engine_are_reported_with_all_others(problems_in):
    problems = problems_in(
        HEAD
        + ADA
        + "engine: {name: ray, gpu: 0.25, cpus: 0}\nworkers: 2\ndevice: cuda:99\nseed: x\n"
    )
    assert list(problems) == [
        "seed",
        "engine.gpu",
        "engine.cpus",
        "workers",
    ]  # the cluster may have such a GPU
    problems = problems_in(HEAD + ADA + "engine: {cpus: 1}\nworkers: 2\ndevice: cuda:99\n")
    assert list(problems) == ["engine.name", "device"]
    assert list(problems_in(HEAD + ADA + "engine: ray\ndevice: gpu\n")) == ["device"]
