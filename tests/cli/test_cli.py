"""The command: the user's mistakes give exit code 2 and one sentence, runs print their results."""

import copy
import json
import logging
import os
import subprocess
import sys

import pytest
import yaml

from unalike import Privacy, cli
from unalike.base.logs import configure_logging
from unalike.cli import commands
from unalike.cli.audit_page import (
    Block,
    describe_privacy,
    explain_epsilon,
    render_html,
    render_markdown,
)

TINY = {
    "name": "tiny",
    "algorithm": {"name": "fedmuscle", "peers": 1, "width": 8, "batch": 8},
    "training": {"rounds": 2, "batch_size": 16},
    "data": {"name": "digits"},
    "public": {"size": 20},
    "clients": [
        {
            "id": "ada",
            "model": {"name": "mlp", "hidden": [8], "width": 8},
            "target": "digit",
            "train": 12,
            "test": 30,
        },
        {
            "id": "ben",
            "model": {"name": "mlp", "hidden": [8], "width": 12},
            "target": "attributes",
            "train": 13,
            "test": 30,
        },
        {
            "id": "cleo",
            "model": {"name": "cnn", "channels": [4], "width": 8},
            "target": "digit",
            "train": 17,
            "test": 30,
        },
    ],
}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """Commands run in an empty folder, with a cache of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNALIKE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("UNALIKE_DATA", "UNALIKE_DEBUG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs the command as the shell would; returns exit code, stdout and stderr."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["unalike", *map(str, words)])
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code or 0
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def rejected(command, tmp_path):
    """Runs a command that must fail by a user's mistake and leave no run; returns its message."""

    def run(*words):
        code, out, err = command(*words)
        assert code == 2, f"exit code {code}\n{out}\n{err}"
        assert "Traceback" not in err and out == "" and err.startswith("unalike: "), err
        assert not list(tmp_path.rglob("results.json")) and not (tmp_path / "runs").exists()
        return err.removeprefix("unalike: ").strip()

    return run


@pytest.fixture
def scenario(tmp_path):
    """Writes the tiny scenario with changes, `{"training.rounds": 3}`; None removes a key."""

    def write(changes=None, name="tiny.yaml"):
        mapping = copy.deepcopy(TINY)
        for path, value in (changes or {}).items():
            *way, last = path.split(".")
            at = mapping
            for part in way:
                at = at[int(part)] if isinstance(at, list) else at.setdefault(part, {})
            if value is None:
                del at[last]
            else:
                at[int(last) if isinstance(at, list) else last] = value
        (tmp_path / name).write_text(yaml.safe_dump(mapping))
        return name

    return write


# Mistakes


@pytest.mark.parametrize(
    "words, expected",
    [
        (["run", "digts"], 'There is no scenario "digts". Did you mean "digits"? There are: '),
        (["run", "nowhere.yaml"], "the scenario file nowhere.yaml cannot be read: "),
        (["check", "digts"], 'There is no scenario "digts". Did you mean "digits"?'),
        (["resume", "nowhere"], "nowhere is no run folder: it has no config.yaml"),
        (["export", "nowhere", "--client", "ada"], "nowhere is no run folder"),
        (["run", "digits", "--replay", "nowhere"], "the run to replay, nowhere, cannot be read"),
        (["bench", "musle"], 'There is no bench "musle". Did you mean "muscle"?'),
        (
            ["bench", "muscle", "--device", "cuda"],
            "bench muscle makes no runs of a scenario, so it takes no device",
        ),
        (["run", "digits", "--set", "rounds"], '--set takes key=value, got "rounds"'),
        (["run", "digits", "--set", "=3"], '--set takes key=value, got "=3"'),
        (
            ["run", "afmcc-digits", "--set", "missing=0.2"],
            "--set missing: a client has it; write clients.0.missing or clients.c.missing",
        ),
        (["run", "digits", "--set", "noise=2"], "--set noise: privacy has it; write privacy.noise"),
        (
            ["run", "digits", "--set", "ronds=3"],
            '--set ronds: There is no field "ronds". Did you mean "rounds"?',
        ),
        (
            ["run", "digits", "--set", "batch=8"],
            "--set batch: training.batch is called batch_size now; write batch_size, or "
            "algorithm.batch",
        ),
        (
            ["run", "digits", "--set", "training.rounds.x=8"],
            '--set training.rounds.x: there is nothing at "x"',
        ),
        (
            ["run", "digits", "--set", "clients.99.train=8"],
            '--set clients.99.train: there is nothing at "99"',
        ),
        (["run", "digits", "--set", "training.rounds=[1"], "--set training.rounds: [1 is not YAML"),
    ],
)
def test_a_mistake_gives_one_sentence(rejected, words, expected):
    message = rejected(*words)
    assert message.startswith(expected) and "\n" not in message


def problems(message):
    """(where, sentence) of each problem, and the first line."""
    first, *lines = message.split("\n")
    return first, [tuple(line.strip().split("   ", 1)) for line in lines]


@pytest.mark.parametrize(
    "change, where, expected",
    [
        (
            {"algorithm.name": "fedmusle"},
            "algorithm.name",
            'There is no algorithm "fedmusle". Did you mean "fedmuscle"? There are: ',
        ),
        ({"privacy": {"noise": -1}}, "privacy.noise", "must be at least 0, got -1."),
        ({"privacy": {"noise": 1, "delta": 1}}, "privacy.delta", "must be below 1, got 1."),
        (
            {"algorithm.peer": 2},
            "algorithm.peer",
            'FedMuscle has no field "peer". Did you mean "peers"? It has: peers',
        ),
        ({"algorithm.peers": "two"}, "algorithm.peers", "must be a whole number, got 'two'."),
        (
            {"algorithm.exchange": "post"},
            "algorithm.exchange",
            "must be 'gradient', 'peers' or 'paper', got 'post'.",
        ),
        (
            {"algorithm.temperature": -0.1},
            "algorithm.temperature",
            "must be at least 0.006, got -0.1.",
        ),
        (
            {"algorithm.temperature": [[0.2]]},
            "algorithm.temperature",
            "a matrix needs 3 rows of 3",
        ),
        (
            {"algorithm.temperature": "hot"},
            "algorithm.temperature",
            "must be a number or a list, got 'hot'.",
        ),
        ({"algorithm.peers": 0}, "algorithm.peers", "must be at least 1, got 0."),
        (
            {"algorithm.batch": 0},
            "algorithm.batch",
            "must be at least 2, got 0: batch statistics",
        ),
        ({"algorithm.width": 0}, "algorithm.width", "must be at least 1, got 0."),
        ({"algorithm.passes": -1}, "algorithm.passes", "must be at least 1, got -1."),
        (
            {"algorithm.align_lr": 0.001},
            "algorithm.align_lr",
            '"align_lr" is called "align_lr of fedmuscleplus" now.',
        ),
        (
            {"algorithm.peers": 3},
            "algorithm.peers",
            "3 peers need 4 clients, the federation has 3. Lower algorithm.peers or add clients.",
        ),
        (
            {"algorithm.batch": 21},
            "algorithm.batch",
            "the public set has 20 rows, fewer than a batch of 21. Lower algorithm.batch or raise",
        ),
        ({"public": None}, "algorithm.batch", "the public set has 0 rows"),
        (
            {"algorithm": "fedavg"},
            "algorithm",
            "must be a mapping of names to values: write {name: fedavg}, got 'fedavg'.",
        ),
        ({"algorithm": None}, "algorithm", "is missing."),
        (
            {"training.round": 3},
            "training.round",
            'There is no field "round". Did you mean "rounds"? There are: ',
        ),
        ({"training.rounds": "many"}, "training.rounds", "must be a whole number"),
        ({"training.lr": 0}, "training.lr", "must be above 0, got 0."),
        ({"training.lr": float("nan")}, "training.lr", "must be a finite number"),
        (
            {"training.optimizer": "lion"},
            "training.optimizer",
            "must be 'adamw', 'adam', 'sgd' or module:name, got 'lion'.",
        ),
        ({"federation.quorum": 2}, "federation.quorum", "must be at most 1, got 2."),
        (
            {"federation.dropuot": 0.1},
            "federation.dropuot",
            'There is no field "dropuot". Did you mean "dropout"?',
        ),
        (
            {"data.name": "digit"},
            "data.name",
            'There is no dataset "digit". Did you mean "digits"?',
        ),
        (
            {"data.partition": {"name": "dirichlt"}},
            "data.partition.name",
            'There is no partition "dirichlt". Did you mean "dirichlet"?',
        ),
        (
            {"clients.0.model.name": "mpl"},
            "clients.0.model.name",
            'There is no model "mpl". Did you mean "mlp"?',
        ),
        (
            {"clients.0.modle": 3},
            "clients.0.modle",
            'There is no field "modle". Did you mean "model"?',
        ),
        ({"clients.1.id": "ada"}, "clients.1.id", 'two clients are called "ada".'),
        ({"clients.2.train": -5}, "clients.2.train", "must be at least 1, got -5."),
        ({"clients": []}, "clients", "a federation needs at least one client."),
        (
            {"clients.0.modalities": []},
            "clients.0.modalities",
            "must be a list of 1 or more, got [].",
        ),
        ({"clients.0.missing": 1.0}, "clients.0.missing", "must be below 1, got 1.0."),
        ({"seed": "x"}, "seed", "must be a whole number"),
        ({"dtype": "float16"}, "dtype", "must be 'float32' or 'float64', got 'float16'."),
        ({"device": "warp"}, "device", 'there is no device "warp"; devices are cpu, cuda'),
        ({"device": "cuda:99"}, "device", "cuda:99 does not exist here: torch sees"),
        (
            {"data.partition": {"name": "dirichlet", "alpha": 1.0, "alhpa": 1.0}},
            "data.partition.alhpa",
            'dirichlet has no field "alhpa". Did you mean "alpha"?',
        ),
        (
            {"data.partition": {"name": "dirichlet", "alpha": "x"}},
            "data.partition.alpha",
            "must be a number",
        ),
        (
            {"data.partition": {"name": "iid", "alpha": 1.0}},
            "data.partition.alpha",
            'iid has no field "alpha".',
        ),
        ({"data.partition": {"name": "dirichlet"}}, "data.partition.alpha", "is missing."),
        (
            {"engine": "rey"},
            "engine.name",
            'There is no engine "rey". Did you mean "ray"? There are: flare, flower, local, ray.',
        ),
        (
            {"engine": {"name": "local", "actors": 2}},
            "engine.actors",
            'local has no field "actors". It has: workers, stack.',
        ),
        (
            {"engine": {"name": "local", "workers": -1}},
            "engine.workers",
            "must be at least 0, got -1.",
        ),
        (
            {"engine": "ray", "workers": 2},
            "workers",
            "the engine ray has none; leave them out.",
        ),
        (
            {"engine": {"name": "ray", "adress": "auto"}},
            "engine.adress",
            'ray has no field "adress". Did you mean "address"?',
        ),
        ({"engine": {"name": "ray", "gpus": -1}}, "engine.gpus", "must be at least 0, got -1."),
        ({"secnario": 1}, "secnario", "There is no field"),
    ],
)
@pytest.mark.parametrize("verb", ["run", "check"])
def test_a_problem_of_a_scenario_is_reported_with_its_path(
    rejected, scenario, verb, change, where, expected
):
    first, listed = problems(rejected(verb, scenario(change)))
    assert first == "1 problem in tiny.yaml" and len(listed) == 1, listed
    assert listed[0][0] == where and listed[0][1].strip().startswith(expected), listed
    assert listed[0][1].strip().endswith((".", ")", "?")), listed


def test_the_engine_and_its_options_can_be_set_on_the_command_line(rejected):
    """The options belong to the engine that was chosen, also if it was chosen by --set."""
    for words in (
        ["--engine", "ray", "--set", "engine.gpus=-1"],
        ["--set", "engine=ray", "--set", "engine.gpus=-1"],
    ):
        assert "engine.gpus   must be at least 0, got -1." in rejected("run", "digits", *words)


@pytest.mark.parametrize(
    "change, expected",
    [
        (
            {"public.size": 1200},
            "public.size   must be below 1200, the training rows of digits: some stay labelled, "
            "got 1200.",
        ),
        (
            {"clients.0.train": 1175},
            "clients   they want 1205 training rows of digits, there are 1180 beside the public "
            "set.",
        ),
        (
            {"clients.0.target": "digits"},
            'clients.0.target   There is no target "digits". Did you mean "digit"?',
        ),
        (
            {"clients.0.target": None},
            "clients.0.target   is missing: the dataset has several, name one of digit, "
            "attributes, ink.",
        ),
        (
            {"clients.0.model.widht": 3},
            'clients.0.model.widht   mlp has no field "widht". Did you mean "width"? It has: '
            "hidden, width.",
        ),
        (
            {"clients.0.model.width": "wide"},
            "clients.0.model.width   must be a whole number, got 'wide'.",
        ),
        (
            {"data.partition": {"name": "dirichlet", "alpha": -1.0}},
            "data.partition.alpha   must be above 0, got -1.0.",
        ),
        (
            {"data.partition": {"name": "dirichlet", "alpha": 1.0, "by": "digits"}},
            'data.partition.by   There is no target "digits". Did you mean "digit"?',
        ),
    ],
)
@pytest.mark.parametrize("verb", ["run", "check"])
def test_problems_of_data_and_models_are_reported_in_one_sentence(
    rejected, scenario, verb, change, expected
):
    message = rejected(verb, scenario(change))
    assert expected in message and len(message.splitlines()) <= 2, message


def test_several_problems_are_reported_together(rejected, scenario):
    changes = {
        "algorithm.peer": 2,
        "training.rounds": 0,
        "training.lr": "fast",
        "clients.1.modle": 1,
        "seeds": 1,
    }
    first, listed = problems(rejected("check", scenario(changes)))
    assert first == "5 problems in tiny.yaml" and {where for where, _ in listed} == set(changes)


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2",
        "- a\n- b",
        "",
        "just words",
        "a: !!python/object/apply:os.system ['ls']",
        "\x00",
        "1: 2\n",
    ],
)
def test_a_file_that_is_no_scenario_is_rejected(rejected, tmp_path, text):
    (tmp_path / "odd.yaml").write_text(text)
    assert "odd.yaml" in rejected("check", "odd.yaml")


def test_settings_reach_their_fields(rejected, scenario):
    """Dotted paths, lists and bare names: an invalid value is reported at the field's path."""
    for setting, where in [
        ("training.rounds=0", "training.rounds"),
        ("rounds=0", "training.rounds"),
        ("peers=7", "algorithm.peers"),
        ("clients.1.train=0", "clients.1.train"),
        ("quorum=7", "federation.quorum"),
        ("public.size=1", "algorithm.batch"),
    ]:
        _, listed = problems(rejected("check", scenario(), "--set", setting))
        assert [place for place, _ in listed] == [where]


def test_settings_of_a_scenario_with_an_invalid_algorithm(rejected, scenario):
    for broken in ("fedavg", {"name": ["x"]}, {}):
        message = rejected("check", scenario({"algorithm": broken}), "--set", "rounds=3")
        assert "algorithm" in message


def test_a_safeguard_that_cannot_judge_is_rejected_before_the_run(rejected, scenario):
    message = rejected("run", scenario(), "--algorithm", "fedproto", "--safeguard")
    assert (
        "safeguard is for methods whose clients get nothing made from their own labels" in message
    )


@pytest.mark.parametrize(
    "words",
    [
        ["run"],
        ["run", "digits", "--workers", "-1"],
        ["run", "digits", "--seed", "x"],
        ["dance"],
        ["run", "digits", "--fast"],
    ],
)
def test_unknown_commands_and_options_are_rejected(command, words):
    code, _, err = command(*words)
    assert code == 2 and "Traceback" not in err and "Usage" in err


# Folders


def test_an_unwritable_folder_gives_one_sentence(rejected, scenario, tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert (
        rejected("run", scenario(), "--out", "file/run")
        == "the run folder file/run cannot be written: Not a directory"
    )
    assert rejected("run", scenario(), "--out", "file").startswith(
        "the run folder file cannot be written: "
    )
    assert (tmp_path / "file").read_text() == "in the way"


def test_an_existing_run_is_never_overwritten(rejected, command, scenario, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "config.yaml").write_text("old")
    assert rejected("run", scenario(), "--out", "there").startswith(
        "there already holds a run; resume it with `unalike resume there`"
    )
    assert (tmp_path / "there" / "config.yaml").read_text() == "old"


# What works


def test_list_shows_all_names(command):
    code, out, err = command("list")
    assert code == 0 and not err
    for name in (
        "digits",
        "fedmuscle",
        "fedavg",
        "fedprox",
        "local",
        "mlp",
        "cnn",
        "transformer",
        "muscle",
    ):
        assert name in out
    for title in ("scenarios", "algorithms", "datasets", "models", "benches"):
        assert title in out


def test_list_of_one_kind_shows_fields_targets_and_options(command):
    code, out, _ = command("list", "algorithms")
    rows = [line.split() for line in out.splitlines()]
    assert (
        code == 0
        and ["mu", "0.01"] in rows
        and ["lower_temperature", "0.15", "or", "consistent"] in rows
    )
    assert ["loss", "muscle", "muscle,", "pairwise,", "gramian"] in rows and [
        "align_lr",
        "null",
    ] in rows
    out = command("list", "datasets")[1]
    assert (
        "attributes    multilabel, 4 labels" in out
        and "left, right, spectrum" in out
        and "bdgp needs BDGP.npz" in out
    )
    rows = [line.split() for line in out.splitlines()]
    assert ["options.most", "3"] in rows and ["options.broken", "refuse", "refuse,", "skip"] in rows
    rows = [line.split() for line in command("list", "models")[1].splitlines()]
    assert ["channels", "[16,", "32]"] in rows and [
        "norm",
        "none",
        "none,",
        "batch,",
        "group",
    ] in rows
    assert command("list", "scenarios")[1].split()[0] == "scenarios"
    assert command("list", "modles")[2].startswith(
        'unalike: There is no kind of thing "modles". Did you mean "models"?'
    )


def test_the_version_is_shown_by_python_dash_m_too():
    import unalike

    for module in ("unalike", "unalike.cli"):
        shown = subprocess.run(
            [sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True
        )
        assert shown.stdout == f"unalike {unalike.__version__}\n"


def test_a_process_that_ends_collects_no_garbage():
    program = (
        "import atexit, gc, sys\n"
        "atexit.register(lambda: print('frozen', gc.get_freeze_count() > 0))\n"
        "sys.argv = ['unalike', '--version']\n"
        "from unalike.cli import main\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0 and ended.stdout.split()[-2:] == ["frozen", "True"]


def test_check_of_a_valid_scenario(command, scenario):
    code, out, _ = command("check", "digits")
    assert code == 0 and out.startswith("digits is fine: 6 clients, FedMusclePlus, ")
    assert command("check", scenario()) == (
        0,
        "tiny.yaml is fine: 3 clients, FedMuscle, 2 rounds.\n",
        "",
    )


def test_audit_shows_messages_and_writes_no_files(command, scenario, rejected, tmp_path):
    path = scenario()
    before = sorted(tmp_path.iterdir())
    code, out, _ = command("audit", path, "--client", "ada", "--client", "cleo")
    assert (
        code == 0
        and "ada, cleo, each: fedmuscle, 2 rounds" in out
        and "ben" not in out
        and "float32[8, 8]" in out
        and "In all" in out
    )
    assert "samples 12, modalities" in command("audit", path, "--client", "ada")[1]
    code, out, _ = command("audit", path, "--algorithm", "fedavg", "--json")
    audit = json.loads(out)
    assert (
        code == 0
        and audit["algorithm"] == "fedavg"
        and list(audit["clients"]) == ["ada", "ben", "cleo"]
    )
    assert sorted(tmp_path.iterdir()) == before
    assert 'There is no client "bob"' in rejected("audit", path, "--client", "bob")


def test_audit_of_a_client_file_shows_that_client_only(command, scenario, rejected, tmp_path):
    (tmp_path / "client.yaml").write_text(f"scenario: {scenario()}\nclient: ada\n")
    (tmp_path / "server.yaml").write_text(
        "name: served\nalgorithm: {name: fedmuscle, width: 4, batch: 8}\ntraining: {rounds: 3}\n"
    )
    code, out, err = command(
        "audit",
        "client.yaml",
        "--algorithm",
        "fedmuscle",
        "--set",
        "rounds=5",
        "--set",
        "width=6",
        "--set",
        "algorithm.batch=8",
        "--json",
    )
    assert code == 0, err
    audit = json.loads(out)
    assert list(audit["clients"]) == ["ada"] and audit["rounds"] == 5
    assert {
        part["shape"][-1]
        for message in audit["clients"]["ada"]["messages"]
        for part in message["holds"]
        if part["shape"]
    } == {6}
    code, out, _ = command("audit", "client.yaml", "--run", "server.yaml")
    assert (
        code == 0
        and "ada: fedmuscle, 3 rounds" in out
        and "train (alone)" in out
        and "evaluate (measuring)" in out
    )
    assert "say what it would take part in" in rejected("audit", "client.yaml")
    assert "leave --client out" in rejected(
        "audit", "client.yaml", "--algorithm", "fedavg", "--client", "ada"
    )
    assert "--run goes with a client.yaml" in rejected("audit", "digits", "--run", "digits")
    assert 'Did you mean "fedavg"' in rejected("audit", "client.yaml", "--algorithm", "fedagv")


def test_audit_writes_a_page_to_sign_that_says_what_leaves_without_noise(
    command, scenario, rejected, tmp_path
):
    audit = json.loads(command("audit", scenario(), "--json")[1])
    code, out, err = command("audit", "tiny.yaml", "--page", "page.md")
    assert (code, out) == (0, "page.md: a page to read, print and sign.\n"), err
    page = (tmp_path / "page.md").read_text()
    for details in audit["clients"].values():
        assert f"In all {details['bytes']['up']:,} bytes leave" in page
    assert "No noise is added" in page and "epsilon is unbounded" in page
    assert "## What never leaves" in page and "## Signature" in page
    assert ".md or .html, got page.pdf" in rejected("audit", "tiny.yaml", "--page", "page.pdf")
    assert "there is no folder" in rejected("audit", "tiny.yaml", "--page", "none/page.md")


def test_the_page_has_the_epsilon_of_the_run(command, scenario, tmp_path):
    """The epsilon before a run is that in its results; 20 public rows in 2 rounds: 40 releases."""
    path = scenario({"privacy": {"noise": 4.0, "entropy": "secret"}, "alone": False})
    assert command("audit", path, "--client", "ada", "--page", "page.html")[0] == 0
    page = (tmp_path / "page.html").read_text()
    code, out, err = command("run", path, "--json", "--out", "run")
    assert code == 0, err
    spent = json.loads(out.rstrip().split("\n")[-1])["clients"]["ada"]["privacy"]
    assert spent["releases"] == 40 and "used for 40 such releases" in page
    assert f"that is epsilon {spent['epsilon']:.3g} at delta 1e-05: hardly a promise" in page
    assert "the noise would have to be" in page and "by secret noise" in page
    assert "each row clipped, with noise" in page and "evaluate" not in page
    assert "it can take the noise off" not in page
    command("audit", path, "--set", "privacy.entropy=seed", "--page", "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "it can take the noise off" in page and "not protected: it knows the seed" in page


@pytest.mark.parametrize("entropy", ["secret", "seed"])
def test_the_page_tells_of_noise_in_training_and_at_the_server(
    command, scenario, tmp_path, entropy
):
    """Before, it said that no noise is added, and that epsilon is unbounded."""
    noise = {"clip": 1.0, "noise": 2.0, "entropy": entropy}
    averaging = {"name": "fedavg", "sample": noise}
    alike = [{"id": c, "model": {"name": "mlp", "hidden": [4], "width": 4}} for c in "ab"]
    config = {"algorithm": averaging, "alone": False}
    for client in alike:
        client |= {"target": "digit", "train": 20, "test": 10}
    path = scenario({**config, "clients": alike})
    assert command("audit", path, "--page", "page.md")[0] == 0
    page = (tmp_path / "page.md").read_text()
    spent = json.loads(command("run", path, "--json", "--out", "run")[1].rstrip().split("\n")[-1])
    spent = spent["clients"]["a"]["sample_privacy"]
    assert f"in each of {spent['releases']} steps" in page
    assert f"epsilon {spent['epsilon']:.3g} at delta 1e-05" in page
    assert "No noise is added" not in page
    assert ("take the noise off again" in page) == (entropy == "seed")
    assert ("not against whoever knows the seed" in page) == (entropy == "seed")
    config["algorithm"] = {"name": "fedavg", "mean": "uniform", "central": noise}
    assert command("audit", scenario({**config, "clients": alike}), "--page", "page.md")[0] == 0
    page = (tmp_path / "page.md").read_text()
    assert "sees each client's update without noise, and must be trusted" in page
    assert "not protected: it sees every update" in page and "in 2 rounds" in page
    assert "No noise is added" not in page


def test_what_an_epsilon_means_is_said_in_numbers():
    """Even odds become e^epsilon : 1; e^2 : 1 is 88.1 %. 800 releases with noise 4 cost 159."""
    privacy = {"noise": 4.0, "bound": 1.0, "delta": 1e-5, "entropy": "secret"}
    spent = Privacy(noise=4.0).spent(800)
    text = " ".join(describe_privacy(privacy, spent))
    assert "epsilon 159 at delta 1e-05: no protection worth the name" in text
    assert "at most 88.1 % sure" in explain_epsilon(2.0)


def test_names_cannot_break_out_of_the_page():
    blocks = [Block("title", "a"), Block("table", [("x", "y"), ("<b>|", "[l](u)")])]
    assert "| \\<b>\\| | \\[l](u) |" in render_markdown(blocks)
    assert "<td>&lt;b&gt;|</td>" in render_html(blocks)


@pytest.fixture
def logs(monkeypatch):
    """Logging is as it was after a test that sets it up."""
    yield
    for name in ("UNALIKE_LOG", "UNALIKE_LOG_FORMAT"):
        monkeypatch.delenv(name, raising=False)
    configure_logging()


def test_logs_of_a_run_are_json_lines_and_nothing_else_is_on_stderr(
    command, scenario, monkeypatch, logs
):
    monkeypatch.setenv("UNALIKE_LOG_FORMAT", "json")
    code, _, err = command("run", scenario(), "--no-alone", "--out", "run")
    lines = [json.loads(line) for line in err.splitlines()]
    assert code == 0 and {line["level"] for line in lines} == {"info"}
    rounds = [line for line in lines if line["message"] == "round"]
    assert [line["round"] for line in rounds] == [1, 2] and rounds[0]["bytes_up"] > 0
    code, _, err = command("run", "none.yaml")
    (line,) = map(json.loads, err.splitlines())
    assert code == line["code"] == 2 and line["level"] == "error" and "none.yaml" in line["message"]


def test_the_log_level_is_set_and_taken_back(command, scenario, monkeypatch, logs):
    monkeypatch.setenv("UNALIKE_LOG", "debug")
    _, _, err = command("run", scenario(), "--no-alone", "--out", "run")
    assert " DEBUG unalike.run: call operation=" in err and " INFO unalike.run: start " in err
    monkeypatch.setenv("UNALIKE_LOG", "error")
    assert "unalike.run" not in command("run", "tiny.yaml", "--no-alone", "--out", "other")[2]
    monkeypatch.delenv("UNALIKE_LOG")
    command("list", "scenarios")
    log = logging.getLogger("unalike")
    assert log.level == logging.NOTSET and log.propagate
    monkeypatch.setenv("UNALIKE_LOG", "loud")
    code, _, err = command("list")
    assert code == 2 and 'unalike: There is no log level (UNALIKE_LOG) "loud"' in err


def test_json_output_equals_results_json(command, scenario, tmp_path):
    code, out, err = command(
        "run", scenario(), "--json", "--out", "one", "--seed", "3", "--dtype", "float64"
    )
    assert code == 0 and not err, err
    last = out.rstrip("\n").split("\n")[-1]
    results = json.loads(last)
    assert results == json.loads((tmp_path / "one" / "results.json").read_text())
    assert {
        "scenario",
        "algorithm",
        "seed",
        "clients",
        "metrics",
        "delta",
        "losers",
        "bytes",
        "seconds",
        "commit",
    } <= set(results)
    assert (results["scenario"], results["algorithm"], results["seed"]) == ("tiny", "fedmuscle", 3)
    assert list(results["clients"]) == ["ada", "ben", "cleo"]
    gains = []
    for client in results["clients"].values():
        assert {"model", "task", "metric", "alone", "value", "gain", "hash"} <= set(client)
        assert 0 <= client["value"] <= 100 and 0 < client["alone"] <= 100
        assert client["gain"] == pytest.approx(
            100 * (client["value"] - client["alone"]) / client["alone"]
        )
        gains.append(client["gain"])
    assert results["delta"] == pytest.approx(sum(gains) / 3) and results["losers"] == sum(
        g < 0 for g in gains
    )
    assert (
        set(results["bytes"]) == {"up", "down"}
        and min(results["bytes"].values()) > 0
        and results["seconds"] > 0
    )
    files = {path.name for path in (tmp_path / "one").iterdir()}
    assert {
        "config.yaml",
        "events.jsonl",
        "ledger.csv",
        "checkpoints",
        "results.json",
        "report.html",
    } <= files
    events = [
        json.loads(line) for line in (tmp_path / "one" / "events.jsonl").read_text().splitlines()
    ]
    assert events[0]["event"] == "start" and events[-1]["event"] == "finish"
    again = command("resume", "one", "--json")
    assert again[0] == 0 and json.loads(again[1].rstrip("\n").split("\n")[-1]) == results
    assert command("run", scenario(), "--out", "one")[0] == 2


def test_a_report_that_was_left_out_is_drawn_later(command, scenario, tmp_path):
    few = ["--set", "rounds=1", "--set", "training.epochs=1", "--no-alone"]
    code, out, _ = command("run", scenario(), "--out", "plain", *few, "--no-report")
    assert code == 0 and "`unalike report plain` does" in out and "report.html" not in out
    assert not (tmp_path / "plain" / "report.html").exists()
    assert command("report", "plain")[0] == 0
    assert (tmp_path / "plain" / "report.html").exists()


def test_a_run_shows_a_table_and_the_path_of_the_report(command, scenario, tmp_path):
    code, out, err = command(
        "run",
        scenario(),
        "--out",
        "shown",
        "--set",
        "rounds=1",
        "--no-alone",
        "--set",
        "training.epochs=1",
    )
    assert code == 0 and "Traceback" not in err
    for word in ("ada", "ben", "cleo", "cnn", "shown/report.html"):
        assert word in out
    assert (tmp_path / "shown" / "report.html").exists()
    config = yaml.safe_load((tmp_path / "shown" / "config.yaml").read_text())
    assert config["training"]["rounds"] == 1 and config["alone"] is False
    assert json.loads((tmp_path / "shown" / "results.json").read_text())["delta"] is None


def test_the_local_baseline_is_cached_for_the_next_run(command, scenario, tmp_path, monkeypatch):
    words = ["run", scenario(), "--json", "--algorithm", "local", "--set", "rounds=1"]
    first, again = (
        json.loads(command(*words, "--out", name)[1].rstrip("\n").split("\n")[-1])
        for name in ("first", "again")
    )
    (cached,) = (tmp_path / "cache" / "alone").iterdir()
    cached.write_text("damaged")
    anew = json.loads(command(*words, "--out", "anew")[1].rstrip("\n").split("\n")[-1])
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("UNALIKE_CACHE", str(tmp_path / "file" / "under"))
    code, out, _ = command(*words, "--out", "without")
    assert code == 0
    for results in (again, anew, json.loads(out.rstrip("\n").split("\n")[-1])):
        assert results["clients"] == first["clients"] and all(
            c["gain"] == 0 for c in results["clients"].values()
        )
    events = [
        (tmp_path / name / "events.jsonl").read_text().count('"who": "alone"')
        for name in ("first", "again")
    ]
    assert events[0] == events[1] > 0


def test_runs_without_out_get_different_folders(command, scenario, tmp_path):
    for _ in range(2):
        assert (
            command(
                "run",
                scenario(),
                "--json",
                "--algorithm",
                "local",
                "--no-alone",
                "--set",
                "rounds=1",
            )[0]
            == 0
        )
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_a_lost_quorum_gives_exit_code_1_and_names_the_failed_clients(command, scenario):
    code, _, err = command(
        "run",
        scenario(),
        "--json",
        "--no-alone",
        "--set",
        "federation.dropout=0.999999",
        "--out",
        "lost",
    )
    assert code == 1 and "Traceback" not in err
    assert err.startswith(
        "unalike: train, round 2: 0 of 3 clients replied, the quorum is 2. ada, ben, cleo: "
        "dropped out\n"
    )
    assert err.endswith(
        "\nThe run is kept in lost. Resuming will fail the same way unless the cause was external "
        "(disk, network). To resume: unalike resume lost\n"
    )


def test_ctrl_c_shows_the_run_folder_and_resume_finishes_the_run(command, scenario, monkeypatch):
    from unalike.algorithms import FedMuscle

    with monkeypatch.context() as patched:
        patched.setattr(
            FedMuscle, "finish", lambda self, fed: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        code, out, err = command("run", scenario(), "--no-alone", "--out", "my run")
    assert code == 130 and out == ""
    assert err.endswith(
        "unalike: stopped.\nThe run is kept in 'my run'; to resume: unalike resume 'my run'\n"
    )
    assert command("resume", "my run")[0] == 0


def test_a_damaged_checkpoint_is_skipped_and_reported(command, scenario, tmp_path):
    command("run", scenario(), "--no-alone", "--json", "--out", "hurt")
    (tmp_path / "hurt" / "results.json").unlink()
    newest = max((tmp_path / "hurt" / "checkpoints" / "server" / "server").glob("*.safetensors"))
    newest.write_bytes(b"cut short")
    code, _, err = command("resume", "hurt")
    assert code == 0 and f"checkpoint {newest.relative_to(tmp_path)} cannot be read" in err
    assert "it was changed since; the run goes on from round 1\n" in err
    assert "damaged" in (tmp_path / "hurt" / "events.jsonl").read_text()
    (tmp_path / "hurt" / "results.json").unlink()
    for checkpoint in (tmp_path / "hurt" / "checkpoints" / "server" / "server").glob(
        "*.safetensors"
    ):
        checkpoint.write_bytes(b"cut short")
    code, _, err = command("resume", "hurt")
    assert (
        code == 2
        and "no checkpoint of hurt can be read" in err
        and err.endswith("The run is kept in hurt.\n")
    )


def test_a_run_with_an_edited_config_cannot_be_resumed(command, scenario, tmp_path, monkeypatch):
    from unalike.algorithms import FedMuscle

    with monkeypatch.context() as patched:
        patched.setattr(
            FedMuscle, "finish", lambda self, fed: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        command("run", scenario(), "--no-alone", "--out", "cut")
    config = tmp_path / "cut" / "config.yaml"
    was = yaml.safe_load(config.read_text())
    edited = {
        **was,
        "training": {**was["training"], "lr": 0.5},
        "clients": [{**was["clients"][0], "speed": 7.0}, *was["clients"][1:]],
    }
    config.write_text(yaml.safe_dump(edited))
    code, _, err = command("resume", "cut")
    assert (
        code == 2
        and "cut/config.yaml was edited since the run began: training.lr was 0.001, is 0.5, "
        "clients.ada.speed was"
        in err
    )
    config.write_text(yaml.safe_dump({**was, "workers": 2, "data_dir": str(tmp_path)}))
    assert command("resume", "cut")[0] == 0


def test_a_client_with_a_nonfinite_loss_is_named_and_left_out(command, scenario, tmp_path):
    """With a learning rate of 1e30 all clients diverge; with quorum 0 the run still finishes."""
    words = [
        "run",
        scenario(),
        "--json",
        "--no-alone",
        "--algorithm",
        "local",
        "--set",
        "lr=1.0e30",
        "--set",
        "optimizer=sgd",
        "--set",
        "training.epochs=4",
    ]
    code, out, err = command(*words, "--set", "quorum=0", "--out", "nan")
    assert code == 0, err
    results = json.loads(out.rstrip("\n").split("\n")[-1])
    assert {f["client"] for f in results["failures"]} == {"ada", "ben", "cleo"}
    assert all("training loss became" in f["reason"] for f in results["failures"])
    code, _, err = command(*words, "--out", "nan2")
    assert code == 1 and "ada, ben, cleo: the training loss became" in err


@pytest.mark.parametrize("bug", [NameError("x"), ValueError("x"), RuntimeError("x"), KeyError("x")])
def test_a_bug_in_a_method_keeps_its_traceback(command, scenario, monkeypatch, bug):
    """Only recognised mistakes become a sentence: Python prints the traceback of all else."""
    from unalike.algorithms import FedMuscle

    def fail(self, fed):
        raise bug

    monkeypatch.setattr(FedMuscle, "serve", fail)
    with pytest.raises(type(bug)) as caught:
        command("run", scenario(), "--no-alone", "--json", "--out", "bug")
    assert caught.value is bug and caught.traceback[-1].name == "fail"
    assert any("The run is kept in bug" in note for note in bug.__notes__)


@pytest.mark.parametrize("words", [["run", "digts"], ["check", "digts"], ["resume", "nowhere"]])
def test_debug_raises_mistakes_instead_of_printing_them(command, monkeypatch, words):
    from unalike.base.errors import UserError

    monkeypatch.setenv("UNALIKE_DEBUG", "")  # so that it is restored after the test
    with pytest.raises(UserError):
        command(*words, "--debug")
    assert os.environ["UNALIKE_DEBUG"] == "1"


def test_a_full_disk_is_one_sentence_and_other_system_errors_keep_their_traceback(
    command, monkeypatch
):
    def fail_with(error):
        def fail():
            raise error

        return fail

    monkeypatch.setattr(commands, "app", fail_with(OSError(28, "No space left on device", "runs")))
    assert command() == (1, "", "unalike: runs: No space left on device\n")
    monkeypatch.setattr(commands, "app", fail_with(FileNotFoundError(2, "No such file", "mine")))
    with pytest.raises(FileNotFoundError):
        command()


def test_help_imports_no_heavy_packages():
    code = """
import sys
from unalike.cli import main
sys.argv = ["unalike", "--help"]
try:
    main()
except SystemExit as exit:
    print("CODE", exit.code)
heavy = {"torch", "sklearn", "numpy", "pydantic", "transformers", "matplotlib"}
print("HEAVY", sorted(heavy & set(sys.modules)))
"""
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert "HEAVY []" in out and "CODE 0" in out
    for verb in ("run", "list", "check", "compare", "resume", "report", "bench", "export"):
        assert verb in out


def test_omp_wait_policy_is_passive_by_default(monkeypatch):
    monkeypatch.setattr(commands, "app", lambda: None)
    for before, after in (("ACTIVE", "ACTIVE"), (None, "PASSIVE")):
        monkeypatch.setenv("OMP_WAIT_POLICY", before or "")
        if before is None:
            monkeypatch.delenv("OMP_WAIT_POLICY")
        cli.main()
        assert os.environ["OMP_WAIT_POLICY"] == after
