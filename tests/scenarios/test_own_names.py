"""Parts of one's own by module:name, or of an installed package, wherever a scenario has names."""

import sys

import pytest
from typer.testing import CliRunner

from unalike import Problems, Refusal, Training, UserError
from unalike.base.registry import find_named, import_object, own_names
from unalike.cli.commands import app
from unalike.cli.lists import show
from unalike.cli.new import TEMPLATES, write_template
from unalike.data import load_dataset
from unalike.models import build_encoder
from unalike.runs import run_scenario
from unalike.runs.plan import plan_from_dict, plan_to_dict
from unalike.scenarios import build_clients, load
from unalike.scenarios.client_config import load_client

PAPER = '''
"""A paper's own repository."""
from __future__ import annotations
from dataclasses import dataclass
import torch
from torch import nn
import torch.nn.functional as F
import unalike

def stripes(folder: str | None = None, rows: int = 80) -> unalike.Table:
    """Rows of four numbers, two classes."""
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(0))
    return unalike.Table(
        x=x, targets={"side": (x[:, 0] > 0).long()}, tasks={"side": unalike.Classification(2)},
        train=torch.arange(rows // 2), test=torch.arange(rows // 2, rows),
    )

class Wide(nn.Module):
    """One linear layer."""
    def __init__(self, shape, width: int = 8):
        super().__init__()
        self.layer = nn.Linear(shape[0], width)
    def forward(self, x):
        return self.layer(x).relu()

def small(width: int = 3):
    return nn.Sequential(nn.Linear(4, width))

@dataclass(frozen=True)
class Sided(unalike.Classification):
    name = "sided"
    margin: float = 0.0

@dataclass
class FedMine(unalike.FedAvg):
    """FedAvg, half way."""
    half: float = 0.5

def odd(y, clients: int, generator, shift: int = 0):
    return [torch.arange((i + shift) % clients, len(y), clients) for i in range(clients)]

def twice(y, clients, generator):
    return [torch.arange(len(y)) for _ in range(clients)]

def hinge(output, y):
    return F.multi_margin_loss(output, y)

def hits(output, y):
    return float((output.argmax(1) == y).sum())

thing = 3
'''

SCENARIO = """
name: mine
algorithm: {name: "paper:FedMine", half: 0.25}
training: {rounds: 2, optimizer: "torch.optim:Adagrad", optimizer_options: {lr_decay: 0.1}}
data: {name: "paper:stripes", options: {rows: 60}, partition: {name: "paper:odd", shift: 1}}
public: {size: 5}
clients:
  - {id: a, model: {name: "paper:Wide", width: 6},
     task: {criterion: "paper:hinge", score: "paper:hits"}}
  - {id: b, model: {name: "paper:small"},
     task: {name: "paper:Sided", margin: 0.5, label_smoothing: 0.1}}
"""


@pytest.fixture
def paper(tmp_path, monkeypatch):
    """A folder with a scenario and its module; nothing of it stays importable afterwards."""
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "paper.py").write_text(PAPER)
    (folder / "mine.yaml").write_text(SCENARIO)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    yield folder
    sys.modules.pop("paper", None)


def test_every_name_of_a_scenario_may_be_ones_own(paper, tmp_path):
    scenario, algorithm = load(str(paper / "mine.yaml"))
    a, b = build_clients(scenario)
    assert (type(algorithm).__name__, algorithm.half) == ("FedMine", 0.25)
    assert [c.model_name for c in (a, b)] == ["Wide", "small"]
    assert a.encoder(0).layer.out_features == 6
    assert len(a.train) + len(b.train) == 25  # of 30, without the public ones
    assert (a.task.metric, a.task.criterion.__name__) == ("hits", "hinge")
    assert (b.task.name, b.task.margin, b.task.labels) == ("sided", 0.5, ("0", "1"))
    result, _ = run_scenario(scenario, algorithm, out=tmp_path / "run")
    assert result["algorithm"] == "paper:FedMine"
    assert {c["metric"] for c in result["clients"].values()} == {"hits", "accuracy"}


def test_a_run_with_names_of_ones_own_is_resumed_from_anywhere(paper, tmp_path, monkeypatch):
    import unalike

    scenario, algorithm = load(str(paper / "mine.yaml"))

    def stop(event, **facts):
        if event == "round" and facts["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_scenario(scenario, algorithm, out=tmp_path / "run", watch=stop)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    sys.path[:] = [path for path in sys.path if path != str(paper)]
    sys.modules.pop("paper")
    assert unalike.resume(tmp_path / "run")["rounds"] == 2


def test_the_command_takes_a_method_of_the_current_folder(paper, monkeypatch):
    monkeypatch.chdir(paper)
    _, algorithm = load("digits", algorithm="paper:FedMine", settings=["half=0.1"])
    assert algorithm.half == 0.1


@pytest.mark.parametrize(
    "old, new, where, sentence",
    [
        ("paper:FedMine", "paper:FedMien", "algorithm.name", 'Did you mean "FedMine"'),
        ("paper:FedMine", "papre:FedMine", "algorithm.name", "No module named 'papre'; write"),
        ("paper:FedMine", "paper:thing", "algorithm.name", "a subclass of unalike.Algorithm"),
        ("paper:FedMine", "fedmine", "algorithm.name", "One of your own is written module:name"),
        ("half: 0.25", "half: much", "algorithm.half", "must be a number, got 'much'"),
        ("rows: 60", "row: 60", "data.options.row", 'no field "row". Did you mean "rows"'),
        ("paper:stripes", "paper:hits", "data", "is missing"),
        ("width: 6", "width: wide", "clients.0.model.width", "must be a whole number"),
        ("paper:Wide", "paper:thing", "clients.0.model", "no function or class, got 3"),
        ("paper:Sided", "paper:FedMine", "clients.1.task.name", "a subclass of unalike.Task"),
        ("margin: 0.5", "margn: 0.5", "clients.1.task.margn", 'Did you mean "margin"'),
        ("score:", "metric:", "clients.0.task.metric", '"metric" is called "score" now'),
        ("paper:hinge", "paper:hinges", "clients.0.task.criterion", 'Did you mean "hinge"'),
        ("shift: 1", "sift: 1", "data.partition.sift", 'Did you mean "shift"'),
        ('"paper:odd", shift: 1', '"paper:twice"', "data.partition", "got some twice"),
    ],
)
def test_what_is_wrong_with_a_name_is_said_where_it_is(paper, old, new, where, sentence):
    (paper / "mine.yaml").write_text(SCENARIO.replace(old, new))
    with pytest.raises(Problems) as caught:
        scenario, _ = load(str(paper / "mine.yaml"))
        build_clients(scenario)
    problems = dict(caught.value.problems)
    assert any(path.startswith(where) and sentence in why for path, why in problems.items()), (
        problems
    )


def test_a_bug_in_ones_own_module_keeps_its_traceback(paper):
    (paper / "paper.py").write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        load(str(paper / "mine.yaml"))


def test_a_client_file_takes_tasks_losses_and_models_by_module(paper):
    (paper / "rows.py").write_text(
        "import torch\ndef train(): return torch.ones(4, 4), torch.tensor([0, 1, 0, 1])"
    )
    (paper / "client.yaml").write_text(
        'id: a\nmodel: {name: "paper:Wide", width: 5}\ndata: {train: "rows:train"}\n'
        'task: {name: "paper:Sided", labels: [left, right], criterion: "paper:hinge"}'
    )
    client = load_client(paper / "client.yaml")
    assert client.encoder(0).layer.out_features == 5
    assert (client.task.name, client.task.labels) == ("sided", ("left", "right"))


def test_a_server_cannot_name_code_of_its_own(paper):
    sys.path.insert(0, str(paper))
    method = import_object("paper:FedMine")()
    for name, training in (
        ("paper:FedMine", Training()),
        ("fedavg", Training(optimizer="paper:small")),
    ):
        plan = plan_to_dict(method, name, training, 0, False, None)
        with pytest.raises(Refusal, match="only what is installed here"):
            plan_from_dict(plan)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package with one part of each kind, and another package that cannot be imported."""
    folder = tmp_path / "site"
    for package, module, code, points in [
        ("fl_paper", "fl_paper_parts", PAPER.replace("paper", "fl_paper_parts"), ENTRY_POINTS),
        ("fl_broken", "fl_broken_parts", "import nowhere_to_be_found", BROKEN_POINTS),
    ]:
        info = folder / f"{package}-1.2.dist-info"
        info.mkdir(parents=True)
        (folder / f"{module}.py").write_text(code)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for module in ("fl_paper_parts", "fl_broken_parts"):
        sys.modules.pop(module, None)


ENTRY_POINTS = """[unalike.algorithms]
fedmine = fl_paper_parts:FedMine
[unalike.datasets]
stripes = fl_paper_parts:stripes
[unalike.models]
wide = fl_paper_parts:Wide
[unalike.tasks]
sided = fl_paper_parts:Sided
"""
BROKEN_POINTS = """[unalike.algorithms]
fedbroken = fl_broken_parts:Method
"""


def test_parts_of_an_installed_package_have_names(installed):
    _, algorithm = load("digits", algorithm="fedmine", settings=["half=0.1"])
    assert algorithm.half == 0.1
    assert len(load_dataset("stripes", rows=20)) == 20
    assert build_encoder("wide", (4,), {"width": 7}).layer.out_features == 7
    plan = plan_to_dict(algorithm, "fedmine", Training(), 0, False, None)
    assert type(plan_from_dict(plan)["algorithm"]) is type(algorithm)  # a server may name it


def test_unalike_list_shows_installed_parts_and_names_broken_ones(installed, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    show("algorithms")
    text = capsys.readouterr().out
    assert "FedAvg, half way. (fl_paper 1.2)" in text and "half" in text
    assert "fedbroken" in text and "No module named 'nowhere_to_be_found'" in text
    assert "zeroshot" in text  # the rest goes on
    show("tasks")
    assert "sided" in capsys.readouterr().out
    with pytest.raises(
        UserError, match=r"fedbroken of fl_broken 1.2 cannot be imported: No module"
    ):
        find_named("algorithm", "fedbroken", {})


def test_only_texts_of_that_form_are_names_of_ones_own():
    values = {"a": ["paper:odd", {"b": "x.y:Z.w"}], "c": "10:30", "d": "say: this", "e": 3}
    assert own_names(values) == ["paper:odd", "x.y:Z.w"]


@pytest.mark.parametrize("kind", TEMPLATES)
def test_every_template_runs_as_it_says(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    lines = write_template(kind, "trial_run")
    commands = [line.removeprefix("try   unalike ") for line in lines if line.startswith("try")]
    assert commands
    for command in commands:
        words = command.replace("rounds=5", "rounds=1").split()
        if words[0] == "run":
            words += ["--set", "rounds=1", "--no-alone"]
        result = CliRunner().invoke(app, words, catch_exceptions=False)
        assert result.exit_code == 0, result.output
    with pytest.raises(UserError, match="is there already"):
        write_template(kind, "trial_run")
    for module in ("trial_run", "trial_run_site"):
        sys.modules.pop(module, None)


def test_templates_are_for_python_names():
    with pytest.raises(UserError, match="cannot be the name of a Python module"):
        write_template("method", "fed-mine")
    with pytest.raises(UserError, match=r'no template "metod"\. Did you mean "method"'):
        write_template("metod", "fedmine")


def test_more_training_rows_than_there_are_is_a_problem(paper):
    (paper / "mine.yaml").write_text(SCENARIO.replace("{id: a,", "{id: a, train: 4000,"))
    scenario, _ = load(str(paper / "mine.yaml"))
    with pytest.raises(Problems, match="a wants 4000 training rows of paper:stripes, there are 25"):
        build_clients(scenario)
