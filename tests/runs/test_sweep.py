"""Sweeps: a grid is run once, whatever happens; the best setting is reported on other seeds."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from unalike.base.errors import UserError
from unalike.runs import sweep as module
from unalike.runs.sweep import Sweep, split_values

TINY = {
    "name": "tiny",
    "algorithm": {"name": "fedavg"},
    "training": {"rounds": 2, "epochs": 10, "batch_size": 16},
    "data": {"name": "digits"},
    "clients": [
        {
            "id": "ada",
            "count": 2,
            "model": {"name": "mlp", "hidden": [8], "width": 8},
            "target": "digit",
            "train": 40,
            "test": 40,
        },
    ],
}


@pytest.fixture
def scenario(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNALIKE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY))
    return str(path)


@pytest.fixture
def in_process(monkeypatch):
    """Commands are run in this process: a start of Python takes seconds. Returns the commands."""
    commands = []
    one_at_a_time = threading.Lock()

    class Process:
        returncode = 0

        def __init__(self, command, **_):
            commands.append(command[3:])
            self.command = command[3:]

        def communicate(self):
            from unalike.cli.commands import app

            with one_at_a_time:  # torch's random numbers are this process's
                try:
                    app(self.command, standalone_mode=False)
                except UserError as error:
                    self.returncode = 2
                    return "", f"unalike: {error}"
            return "", ""

        def terminate(self):
            pass

    stand_in = SimpleNamespace(Popen=Process, DEVNULL=None, PIPE=None)
    monkeypatch.setattr(module, "subprocess", stand_in)
    return commands


def test_the_best_setting_is_run_on_other_seeds_and_nothing_twice(scenario, tmp_path, in_process):
    make = lambda: Sweep(scenario, ["lr=0.00001,0.01"], tmp_path / "kept", seeds=(0, 1))
    result = make().run()
    assert result["best"] == ["lr=0.01"]
    assert result["seeds"] == [0, 1] and result["report"]["seeds"] == [2, 3]
    assert len(in_process) == 2 * 2 + 2
    assert result["scores"]["lr=0.00001"]["mean"] == 0 < result["scores"]["lr=0.01"]["mean"]
    best = yaml.safe_load((tmp_path / "kept" / "best.yaml").read_text())
    assert best["training"]["lr"] == 0.01
    before = (tmp_path / "kept" / "sweep.json").read_text()
    make().run()
    assert len(in_process) == 6  # no run twice
    assert (tmp_path / "kept" / "sweep.json").read_text() == before


def test_a_run_that_was_stopped_is_resumed(scenario, tmp_path, in_process):
    sweep = Sweep(scenario, ["lr=0.001,0.01"], tmp_path / "kept")
    first = sweep.grid_run(("lr=0.001",), 0)
    from unalike.cli.commands import app

    app(
        ["run", scenario, "--set", "lr=0.001", "--seed", "0", "--out", str(first.folder), "--json"],
        standalone_mode=False,
    )
    for name in ("results.json", "manifest.json"):
        (first.folder / name).unlink()
    sweep.run()
    assert in_process[0][:2] == ["resume", str(first.folder)]
    assert (first.folder / "results.json").exists()


def test_other_code_or_another_scenario_is_another_run(scenario, tmp_path, monkeypatch):
    sweep = Sweep(scenario, ["lr=0.001,0.01"], tmp_path / "kept")
    before = sweep.grid_run(("lr=0.001",), 0).folder
    assert before != sweep.grid_run(("lr=0.001",), 1).folder
    monkeypatch.setattr(module, "hash_of_the_code", lambda: "other")
    changed = sweep.grid_run(("lr=0.001",), 0).folder
    Path(scenario).write_text(yaml.safe_dump(TINY | {"summary": "edited"}))
    assert len({before, changed, sweep.grid_run(("lr=0.001",), 0).folder}) == 3


def test_a_setting_that_fails_is_left_out(scenario, tmp_path, in_process):
    grid = ["clients.ada.train=40,100000", "lr=0.001,0.01"]
    result = Sweep(scenario, grid, tmp_path / "kept").run()
    assert result["best"][0] == "clients.ada.train=40"
    assert len(result["failed"]) == 2 and len(result["scores"]) == 2


def test_mistakes_are_found_before_the_first_run(scenario, tmp_path, in_process):
    for grid, words in [
        (["lr=0.1"], "two settings or more"),
        (["lrr=0.1,0.2"], 'Did you mean "lr"'),
        (["lr=fast,0.1"], "lr"),
        (["lr=0.1,,0.2"], "between commas"),
    ]:
        with pytest.raises(UserError, match=words):
            Sweep(scenario, grid, tmp_path / "kept")
    with pytest.raises(UserError, match="criterion"):
        Sweep(scenario, ["lr=0.1,0.2"], tmp_path / "kept", by="luck")
    assert not in_process and not (tmp_path / "kept").exists()


def test_values_in_brackets_stay_whole():
    assert split_values("a.hidden=[8,{x: 1,y: 2}],[4]") == [
        "a.hidden=[8,{x: 1,y: 2}]",
        "a.hidden=[4]",
    ]


def test_a_search_that_is_stopped_again_and_again_ends_as_one_that_was_not(
    scenario, tmp_path, in_process, monkeypatch
):
    pytest.importorskip("optuna")
    grid = ["lr=0.00001..0.1", "epochs=1,5"]
    make = lambda folder: Sweep(scenario, grid, tmp_path / folder, by="delta", jobs=2, trials=6)
    whole = make("whole").run()
    count = len(in_process)
    assert count <= 6 + 1 and whole["report"]["seeds"] == [1]
    real = module.subprocess.Popen
    left = [2]

    def stop(command, **about):
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        return real(command, **about)

    stand_in = SimpleNamespace(Popen=stop, DEVNULL=None, PIPE=None)
    monkeypatch.setattr(module, "subprocess", stand_in)
    stops = 0
    while True:
        left[0] = 2
        try:
            again = make("stopped").run()
            break
        except KeyboardInterrupt:
            stops += 1
    assert stops >= 2 and len(in_process) == 2 * count  # no run twice
    assert again["scores"] == whole["scores"] and again["best"] == whole["best"]
    assert (tmp_path / "stopped" / "sweep.svg").read_text().count("<svg") == 1


def test_ranges_are_for_a_search(scenario, tmp_path):
    with pytest.raises(UserError, match="add --trials"):
        Sweep(scenario, ["lr=0.001..0.1"], tmp_path)
    with pytest.raises(UserError, match="two rising numbers"):
        Sweep(scenario, ["lr=0.1..0.001"], tmp_path, trials=3)
    with pytest.raises(UserError, match="lr"):  # the far end of a range does not fit, either
        Sweep(scenario, ["lr=-1..0.1"], tmp_path, trials=3)


def test_the_command_ends_in_a_table_and_a_best_setting(scenario, tmp_path):
    command = [sys.executable, "-m", "unalike", "sweep", scenario, "--set", "lr=0.00001,0.01"]
    command += ["--jobs", "2", "--keep", "kept"]
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "best       lr=0.01" in done.stdout and "3 of 3" in done.stderr
    assert json.loads((tmp_path / "kept" / "sweep.json").read_text())["report"]["seeds"] == [1]
