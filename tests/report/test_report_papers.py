"""Comparisons for papers: formats, one baseline for all, curves as vector graphics."""

import csv
import io

import pytest

from unalike.base.errors import UserError
from unalike.report import compare, format_comparison, plot_comparison
from unalike.report.comparison_plot import group_curves


@pytest.fixture
def paths(make):
    """Three seeds each of a method and of `local`, which is 2 points below it."""
    runs = [make(f"m{seed}", seed=seed, shift=2.0 + 0.1 * seed) for seed in range(3)]
    return runs + [make(f"l{seed}", seed=seed, algorithm="local") for seed in range(3)]


def test_against_gives_one_baseline_for_all(paths):
    """Client `leaf` has 83 in `local`, 85, 85.1 and 85.2 in the method: gains of 2.41 % and more."""
    result = compare(paths, against="local")
    assert result["against"] == "local" and result["groups"][0]["label"] == "local"
    local, method = result["groups"]
    assert local["delta"]["mean"] == 0 and local["losers"]["mean"] == 0
    ends = {"leaf": 83.0, "moss": 88.9, "fern": 66.1, "reed": 41.0, "pine": 81.7, "oak": 49.5}
    shifts = [2.0, 2.1, 2.2]
    means = [sum(100 * shift / end for end in ends.values()) / 6 for shift in shifts]
    assert method["delta"]["mean"] == pytest.approx(sum(means) / 3)
    (difference,) = result["differences"]
    assert difference["group"] == "fedmuscle" and difference["mean"] == pytest.approx(2.1)
    assert compare(paths)["groups"][1]["delta"]["mean"] != pytest.approx(0)  # its own baseline


def test_against_a_method_that_is_not_there_says_how_to_make_it(paths):
    with pytest.raises(UserError, match="--algorithm fedavg"):
        compare(paths, against="fedavg")


def test_seeds_without_a_pair_have_no_gain(paths, make):
    result = compare([*paths[:3], paths[3]], against="local")
    assert result["groups"][1]["delta"]["n"] == 1


def test_csv_has_every_number(paths):
    result = compare(paths)
    rows = list(csv.DictReader(io.StringIO(format_comparison(result, "csv"))))
    (row,) = [
        row
        for row in rows
        if (row["group"], row["quantity"], row["client"]) == ("fedmuscle", "value", "leaf")
    ]
    assert float(row["mean"]) == pytest.approx(85.1) and row["n"] == "3"
    assert any(row["quantity"] == "difference to fedmuscle" for row in rows)


def test_markdown_has_a_row_for_each_group_and_client(paths):
    text = format_comparison(compare(paths), "markdown")
    summary, clients, _ = text.split("\n\n")
    assert len(summary.splitlines()) == 2 + 2 and len(clients.splitlines()) == 2 + 6
    leaf = next(line for line in clients.splitlines() if line.startswith("| leaf"))
    assert leaf == "| leaf | **85.1 ± 0.2** | 83.0 ± 0.0 |"


def by_label(even, high, **more):
    """What a multi-label run measured: F1 of `even` and `high`, AUC 10 points above it."""
    scores = {"even": even, "high": high, **more}
    return {label: {"f1": f1, "auc": f1 + 10, "positives": 7.0} for label, f1 in scores.items()}


@pytest.fixture
def labelled(make):
    """F1 of `even` is 60, 70 in fednca and 80, 80 in fedavg, of `high` 50, 52 and 40, 42."""
    scores = {"fednca": [(60.0, 50.0), (70.0, 52.0)], "fedavg": [(80.0, 40.0), (80.0, 42.0)]}
    return [
        make(f"{method}-{seed}", algorithm=method, seed=seed, by_label=by_label(*own[seed]))
        for method, own in scores.items()
        for seed in range(2)
    ]


def test_labels_are_averaged_over_seeds(labelled):
    result = compare(labelled)
    assert result["labels"] == ["even", "high"]
    nca, avg = result["groups"]
    assert nca["labels"]["even"]["f1"]["mean"] == 65 and avg["labels"]["high"]["auc"]["mean"] == 51
    half = 12.706 * 50**0.5 / 2**0.5  # t(0.975, 1) s / sqrt(2), s of 60 and 70
    assert nca["labels"]["even"]["f1"]["high"] == pytest.approx(65 + half, abs=0.01)


def test_tables_have_a_row_for_each_label_with_the_best_method_bold(labelled, make):
    result = compare(labelled)
    labels = format_comparison(result, "markdown").split("\n\n")[2].splitlines()
    assert labels[0] == "| label (F1 %) | fednca | fedavg |"
    assert labels[2] == "| even | 65.0 ± 63.5 | **80.0 ± 0.0** |"
    assert labels[3].startswith("| high | **51.0")
    assert r"label (AUC \%) & fednca & fedavg" in format_comparison(result, "latex", "auc")
    rows = list(csv.DictReader(io.StringIO(format_comparison(result, "csv"))))
    numbers = {(r["group"], r["quantity"], r["label"]): r["mean"] for r in rows if r["label"]}
    assert numbers["fednca", "auc", "even"] == "75.0" and len(numbers) == 2 * 2 * 3
    assert {r["unit"] for r in rows if r["quantity"] == "positives"} == {""}
    with pytest.raises(UserError, match='There is no metric of labels "f2"'):
        format_comparison(result, "latex", "f2")


def test_labels_that_a_run_did_not_measure_are_left_out(make):
    more = make("more", by_label=by_label(60.0, 50.0, rare=1.0))
    few = make("few", seed=1, by_label=by_label(61.0, 51.0))
    assert compare([more, few])["labels"] == ["even", "high"]
    without = compare([more, make("none", seed=2)])
    assert without["labels"] == [] and "label" not in format_comparison(without, "markdown")


def test_a_metric_that_is_undefined_in_a_run_counts_where_it_is_defined(make):
    scores = by_label(60.0, 50.0)
    del scores["even"]["auc"]  # only positives in this seed's test rows
    paths = [make("a", by_label=scores), make("b", seed=1, by_label=by_label(62.0, 52.0))]
    (group,) = compare(paths)["groups"]
    assert group["labels"]["even"]["auc"] == {"mean": 72.0, "low": None, "high": None, "n": 1}


def test_latex_is_escaped(paths, make):
    text = format_comparison(compare([make("a"), make("b", fields={"a_b": "x&y"})]), "latex")
    assert r"a\_b=x\&y" in text and text.count(r"\toprule") == 2
    body = [line for line in text.splitlines() if "&" in line]
    assert all(line.endswith(r"\\") for line in body)


def test_an_unknown_format_is_a_mistake(paths):
    with pytest.raises(UserError, match='There is no format "word"'):
        format_comparison(compare(paths), "word")


@pytest.mark.parametrize("suffix,start", [("pdf", b"%PDF"), ("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_curves_are_written(paths, tmp_path, suffix, start):
    file = tmp_path / f"curves.{suffix}"
    plot_comparison(compare(paths), file)
    content = file.read_bytes()
    assert content.startswith(start)
    if suffix == "svg":
        assert b"#0072b2" in content and b"#d55e00" in content


def test_curves_are_means_over_clients_with_an_interval_over_seeds(paths):
    result = compare(paths)
    curves = group_curves(result["groups"][0], result["clients"])
    assert list(curves) == list(range(1, 9))
    assert all(c["n"] == 3 and c["low"] < c["mean"] < c["high"] for c in curves.values())


def test_a_plot_of_another_kind_is_refused(paths, tmp_path):
    with pytest.raises(UserError, match=r"\.pdf, \.svg, \.png"):
        plot_comparison(compare(paths), tmp_path / "curves.docx")
