"""A finished run goes on for more rounds; one whose config was edited says so."""

import json

import pytest
import yaml

from unalike import runs
from unalike.base.errors import UserError
from unalike.runs.verify import verify
from unalike.scenarios import load

TINY = {
    "name": "tiny",
    "algorithm": {"name": "fedavg"},
    "training": {"rounds": 2, "batch_size": 8},
    "federation": {"participation": 0.7},
    "data": {"name": "digits"},
    "clients": [
        {
            "id": "ada",
            "count": 3,
            "model": {"name": "mlp", "hidden": [8], "width": 8},
            "target": "digit",
            "train": 20,
            "test": 40,
        }
    ],
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the scenario with some settings in a folder of that name; return the folder."""
    monkeypatch.setenv("UNALIKE_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(TINY))

    def make(name, *settings):
        runs.run_scenario(*load(str(file), None, list(settings)), out=tmp_path / name)
        return tmp_path / name

    return make


def results(folder, name="results.json"):
    told = json.loads((folder / name).read_text())
    return {key: told[key] for key in ("clients", "delta", "bytes", "clock", "rounds")}


def test_a_finished_run_with_more_rounds_ends_as_one_that_had_them_from_the_start(run):
    folder = run("short")
    before = results(folder)
    runs.resume(folder, rounds=4)
    assert results(folder) == results(run("long", "rounds=4"))
    assert results(folder, "results-2.json") == before
    assert runs.resume(folder)["rounds"] == 4
    runs.resume(folder, rounds=5)  # and again
    assert results(folder) == results(run("longer", "rounds=5"))
    assert verify(folder)[0] == []


def test_an_extended_run_that_is_stopped_goes_on(run):
    folder = run("short")

    def stop(event, **facts):
        if event == "round" and facts["round"] == 3:
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError):
        runs.resume(folder, stop, rounds=4)
    runs.resume(folder)
    assert results(folder) == results(run("long", "rounds=4"))


def test_what_cannot_have_more_rounds_says_why(run):
    folder = run("short")
    with pytest.raises(UserError, match="--rounds takes more, got 2"):
        runs.resume(folder, rounds=2)
    with pytest.raises(UserError, match="follows a schedule"):
        runs.resume(run("cosine", "schedule=cosine"), rounds=4)
    (folder / "results.json").rename(folder / "elsewhere.json")
    with pytest.raises(UserError, match="has not finished"):
        runs.resume(folder, rounds=4)


def test_an_edited_config_of_a_finished_run_is_told(run):
    folder = run("short")
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("rounds: 2", "rounds: 9"))
    words = "training.rounds was 2, is 9; its results are of the config before"
    with pytest.raises(UserError, match=words):
        runs.resume(folder)
    config.write_text(config.read_text().replace("rounds: 9", "rounds: 2") + "track: [mlflow]\n")
    runs.resume(folder)  # where a run is tracked changes nothing of it
