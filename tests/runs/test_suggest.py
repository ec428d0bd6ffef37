"""`unalike suggest`: what our tables say, for whom they say it, and that they are the tables."""

import json
import re

import pytest
import yaml
from typer.testing import CliRunner

import unalike
from benchmarks.evidence import collect
from unalike.cli.commands import app
from unalike.runs import suggest as module
from unalike.scenarios.load import shipped_scenarios


def table(rows, **about):
    """A table about classification with one architecture."""
    situation = {"tasks": ["classification"], "models": "one"} | about.pop("situation", {})
    empty = {"source": "results/x.json", "setting": None, "metric": "accuracy", "date": "today"}
    rows = [
        {"algorithm": {"name": name}, "score": score, "spread": 1.0, "megabytes": None}
        for name, score in rows
    ]
    return empty | {"scenarios": [], "like": [], "situation": situation, "rows": rows} | about


@pytest.fixture
def tell(monkeypatch, tmp_path):
    """Advice for a scenario of alike clients with these changes, from these tables."""

    def ask(tables, **changed):
        monkeypatch.setattr(module, "read_evidence", lambda: tables)
        mine = {
            "name": "mine",
            "algorithm": {"name": "fedavg"},
            "data": {"name": "digits"},
            "clients": [{"id": "c", "count": 2, "model": {"name": "mlp"}, "target": "digit"}],
        }
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump(mine | changed))
        return module.suggest(str(path))

    return ask


def test_the_packaged_evidence_is_what_results_say():
    assert collect() == module.read_evidence()


def test_every_shipped_scenario_gets_the_first_of_its_table():
    """Without data, by name: the first row, as nothing can be checked. Some have no table yet."""
    named = {name for t in module.read_evidence() for name in t["scenarios"] + t["like"]}
    assert named <= set(shipped_scenarios()) and len(named) > 20
    for name in sorted(named):
        tables = [t for t in module.read_evidence() if name in t["scenarios"] + t["like"]]
        tables.sort(key=lambda t: module.closeness(t, name))
        advice = module.suggest(name, data_dir="/nowhere")
        assert (
            advice.first is not None and advice.first.algorithm == tables[0]["rows"][0]["algorithm"]
        )


def test_the_first_that_fits_is_suggested_and_the_others_say_why(tell):
    rows = [("fedmuscle", 90.0), ("fedbn", 80.0), ("fedavg", 79.0), ("local", 60.0)]
    advice = tell([table(rows)])
    assert advice.first.name == "fedbn" and not advice.exact
    assert [c.name for c in advice.misfits] == ["fedmuscle"]
    assert advice.misfits[0].problem == "needs a public set"
    assert [c.close for c in advice.candidates] == [False, True, False]  # 1.0 apart, spreads of 1


def test_a_table_about_another_situation_says_nothing(tell):
    rows = [("fedbn", 80.0)]
    others = [
        table(rows, situation={"models": "unlike"}),
        table(rows, situation={"tasks": ["multilabel"]}),
        table(rows, situation={"capacity": True}),
        table(rows, situation={"public": True}),
    ]
    assert tell(others).first is None
    assert tell(others, public={"size": 50}).first.name == "fedbn"


def test_the_command_names_method_source_and_numbers():
    result = CliRunner().invoke(app, ["suggest", "digits"])
    assert result.exit_code == 0
    assert re.search(r"digits: fedmuscleplus .*\nmeasured on this scenario", result.output)
    assert "results/rivals.json" in result.output and "31.5" in result.output


def test_it_is_a_function_of_the_package():
    advice = unalike.suggest("digits")
    assert isinstance(advice, unalike.Advice) and advice.first.name == "fedmuscleplus"
    json.dumps(dict(advice.first.algorithm))
