"""The leaderboard: what is run, how settings are chosen, and what tables are made of the runs."""

import json

import pytest

from benchmarks import leaderboard
from benchmarks.leaderboard import (
    FOLDER,
    GRID,
    Cell,
    cells_of,
    choose_and_report,
    operations_of,
    skip_reason,
)
from benchmarks.leaderboard_page import MARK, write_page, write_tables
from benchmarks.leaderboard_tables import critical_difference, rank_family, setting_table
from benchmarks.study import Study
from unalike.algorithms import ALGORITHMS
from unalike.scenarios import load


def test_settings_are_scenarios_and_the_grid_knows_methods_and_their_fields():
    settings = sorted(path.stem for path in FOLDER.glob("*.yaml"))
    assert len(settings) == 6
    for name in settings:
        assert load(str(FOLDER / f"{name}.yaml"))[0].name == name
    for method, fields in GRID["own"].items():
        (field,) = fields
        assert field in ALGORITHMS[method].__dataclass_fields__, (method, field)
    for entry in GRID["skip"]:
        assert set(entry["settings"]) <= set(settings) and set(entry["methods"]) <= set(ALGORITHMS)


def test_only_selects_settings_and_methods_and_what_everyone_asks_for_comes_first(tmp_path):
    cells = list(cells_of(Study(only=("digits",)), str(tmp_path)))
    assert {cell.setting for cell in cells} == {"digits"} and cells[0].method in GRID["first"]
    assert skip_reason("digits", "ditto") and skip_reason("pacs-domains", "ditto") is None
    (cell,) = cells_of(Study(only=("digits", "fedproto")), str(tmp_path))
    assert (cell.setting, cell.method) == ("digits", "fedproto")


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """A cell of FedProto on digits whose scores are told by its settings."""
    asked = []

    def measure(self, settings, seed):
        asked.append((tuple(settings), seed))
        lr = float(settings[0].partition("=")[2])
        bonus = 5.0 if settings[1:] == ["algorithm.lam=10.0"] else 0.0
        return run(a=50.0 + 1000 * lr + bonus)

    def count(self, settings):
        asked.append((tuple(settings), "operations"))
        return {"client": 1.0, "server": 0.0}

    monkeypatch.setattr(Cell, "_measure", measure)
    monkeypatch.setattr(Cell, "_count", count)
    return Cell("digits", "fedproto", "cpu", None, str(tmp_path / "keep")), asked


def test_rate_then_field_are_chosen_on_other_seeds(measured):
    cell, asked = measured
    found = choose_and_report(cell, (0, 1, 2))
    assert found["chosen"] == ["training.lr=0.003", "algorithm.lam=10.0"]
    assert [seed for _, seed in asked] == [100, 101] * 5 + [0, 1, 2]
    assert {settings for settings, _ in asked[-3:]} == {tuple(found["chosen"])}


def test_operations_are_counted_with_the_chosen_settings(measured):
    cell, asked = measured
    found = {"chosen": ["training.lr=0.003"]}
    assert operations_of(cell, found)["client"] == 1.0
    assert asked == [(("training.lr=0.003",), "operations")]
    assert operations_of(cell, {}) == {}


def test_a_finished_run_is_not_made_again(measured):
    cell, asked = measured
    choose_and_report(cell, (0, 1, 2))
    leaderboard.kept_runs.cache_clear()
    count = len(asked)
    choose_and_report(cell, (0, 1, 2))
    assert len(asked) == count
    (path,) = (cell.file.parent / cell.keep).glob("*.jsonl")
    assert len(path.read_text().splitlines()) == count
    assert json.loads(path.read_text().splitlines()[0])["method"] == "fedproto"


def run(**values):
    return {
        "values": values,
        "score": sum(values.values()) / len(values),
        "megabytes": 2.0,
        "seconds": 1.0,
        "works_alone": False,
    }


def test_a_row_has_mean_spread_worst_and_degraded_clients():
    found = {
        "local": {"chosen": [], "runs": [run(a=60.0, b=40.0), run(a=50.0, b=50.0)]},
        "fedavg": {"chosen": ["x"], "runs": [run(a=70.0, b=30.0), run(a=60.0, b=60.0)]},
        "fedmuscle": {"misfit": "needs a public set"},
    }
    table = setting_table(found)
    assert list(table["rows"]) == ["fedavg", "local"] and table["misfits"] == {
        "fedmuscle": "needs a public set"
    }
    row = table["rows"]["fedavg"]
    assert (row["score"], row["worst"], row["degraded"]) == (55.0, 45.0, 0.5)
    assert row["spread"] == pytest.approx(50**0.5, abs=1e-3)


def test_ranks_are_means_over_blocks_with_nemenyis_difference():
    """Demsar 2006, sec. 3.2.2: four methods on 14 data sets differ by 1.25."""
    assert critical_difference(4, 14) == pytest.approx(1.25, abs=0.005)
    first = {"a": {"scores": [3.0, 1.0]}, "b": {"scores": [2.0, 1.0]}, "c": {"scores": [1.0, 0.0]}}
    second = {"a": {"scores": [1.0, 1.0]}, "b": {"scores": [2.0, 2.0]}}
    family = rank_family([first, second])
    assert family["blocks"] == 4 and family["mean_rank"] == {"b": 1.38, "a": 1.62}


def test_tables_are_made_of_kept_runs_alone_and_name_what_is_missing(
    measured, monkeypatch, tmp_path
):
    cell, asked = measured
    choose_and_report(cell, (0, 1, 2))
    written = []
    for writer in ("write_page", "write_tables"):
        monkeypatch.setattr(leaderboard, writer, lambda result, path: written.append(path.name))
    study = Study(keep=cell.keep, only=("digits", "fedproto", "fedtgp"))
    count = len(asked)
    result = leaderboard.bench_leaderboard_tables(study)
    assert len(asked) == count and written == ["leaderboard.html", "leaderboard.md"]
    assert list(result["settings"]["digits"]["rows"]) == ["fedproto"]
    assert result["missing"] == {"digits": ["fedtgp"]}


def test_the_page_has_every_row_and_its_sorting_keys(tmp_path):
    result = {
        "settings": {
            "digits": setting_table({"fedavg": {"chosen": ["lr=1"], "runs": [run(a=70.0)]}})
        },
        "ranks": {"one": {"blocks": 3, "critical_difference": 1.5, "mean_rank": {"fedavg": 1.0}}},
    }
    write_page(result, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "<td>fedavg</td><td data-value=70.0>70.00</td>" in text and "lr=1" in text
    assert "3 blocks; critical difference 1.5" in text
    page = tmp_path / "page.md"
    page.write_text(f"above\n{MARK}old")
    write_tables(result | {"missing": {"digits": ["fedtgp"]}}, page)
    text = page.read_text()
    assert text.startswith(f"above\n{MARK}") and "old" not in text
    assert "| `fedavg` | 70.00 |" in text and "No runs of: `fedtgp`." in text
