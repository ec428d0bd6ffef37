"""`unalike suggest`: what our tables say, for whom they say it, and that they are the tables."""

import json
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import unalike
from benchmarks.evidence import collect
from unalike.cli.commands import app
from unalike.runs import suggest as module
from unalike.scenarios.load import shipped_scenarios

ROOT = Path(__file__).parents[2]


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
    """Without data, by name: the first row, as nothing can be checked."""
    named = {name for t in module.read_evidence() for name in t["scenarios"] + t["like"]}
    assert named <= set(shipped_scenarios()) and len(named) > 20
    for name in sorted(named):
        tables = [t for t in module.read_evidence() if name in t["scenarios"] + t["like"]]
        tables.sort(key=lambda t: module.closeness(t, name))
        advice = module.suggest(name, data_dir="/nowhere")
        first = next(row for row in tables[0]["rows"] if "problem" not in row)
        assert advice.first is not None and advice.first.algorithm == first["algorithm"]
    assert named == set(shipped_scenarios())


# Who is first on a scenario in docs/results.md or the page of its method; of like ones in LIKE.
FIRST = {
    "digits": {"fedmuscleplus"},
    "clinic": {"fedmuscleplus"},
    "muscle-vision": {"fedmuscleplus"},
    "muscle-headroom": {"fedmuscleplus"},
    "muscle-multimodal": {"fedmuscleplus"},
    "muscle-noniid": {"fedmuscleplus"},
    "muscle-synthetic": {"local", "fedmuscleplus"},  # -0.8 +-1.4: within noise of training alone
    "creamfl-flickr8k": {"creamfl"},
    "afmcc-mnist-usps": {"afmcc"},
    "afmcc-bdgp": {"afmcc"},
    "afmcc-multi-fashion": {"afmcc"},
    "fednca-voc": {"fednca"},
    "fedmpt-voc": {"fedmpt"},
    "subflot-cifar10": {"heterofl", "subflot"},
    "subflot-pacs": {"subflot"},
    "subflot-agnews": {"heterofl", "fedrolex", "feddse", "feddropout", "flexfl"},
    "hapt": {"local", "heterofl"},
    "hapt-recordings": {"heterofl"},
    "hetlora-agnews": {"hetlora"},
}
LIKE = {
    "muscle-setup1": "muscle-vision",
    "muscle-setup1-vit": "muscle-vision",
    "muscle-r1": "muscle-vision",
    "muscle-setup2": "muscle-multimodal",
    "creamfl-digits": "creamfl-flickr8k",
    "afmcc-digits": "afmcc-mnist-usps",
    "afmcc-scene15": "afmcc-mnist-usps",
    "afmcc-nuswide": "afmcc-mnist-usps",
    "fednca-digits": "fednca-voc",
    "fednca-cifar-composites": "fednca-voc",
    "fednca-chest": "fednca-voc",
    "fednca-derma": "fednca-voc",
    "fedmpt-digits": "fedmpt-voc",
    "fedmpt-clip": "fedmpt-voc",
    "subflot-digits": "subflot-agnews",
}


def test_every_shipped_scenario_gets_what_the_docs_have_first():
    assert set(FIRST) | set(LIKE) == set(shipped_scenarios())
    for name in shipped_scenarios():
        advice = module.suggest(name, data_dir="/nowhere")
        expected = FIRST.get(LIKE.get(name, name))
        if expected is None:
            assert advice.first is None
            continue
        close = {candidate.name for candidate in advice.candidates if candidate.close}
        assert advice.first.name in expected <= {advice.first.name} | close, name
        assert advice.exact == (name in FIRST)


def test_on_digits_the_leaderboard_and_the_baselines_have_the_same_method_first():
    board = json.loads((ROOT / "results/leaderboard-tables.json").read_text())
    rows = board["settings"]["digits"]["rows"]
    first = max((name for name in rows if not rows[name]["failed"]), key=lambda n: rows[n]["score"])
    assert module.suggest("digits").first.name == first


def test_what_breaks_a_limit_is_told_with_its_score_and_never_suggested():
    advice = module.suggest("subflot-pacs", data_dir="/nowhere")
    (alone,) = [method for method in advice.misfits if method.name == "local"]
    assert alone.score > advice.first.score and "whole network" in alone.problem
    output = CliRunner().invoke(app, ["suggest", "subflot-pacs"]).output
    assert "does not fit: local (34.0): trains the whole network" in output


def test_gains_are_compared_with_training_alone():
    output = CliRunner().invoke(app, ["suggest", "muscle-synthetic"]).output
    assert "expect no gain from federating" in output
    assert "within noise of the first" in output and "No other method was measured" in output


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
