"""Ranks over scenarios: Friedman's and Nemenyi's tests give what Demsar's paper does."""

import pytest

from unalike.base.errors import UserError
from unalike.report.compare import compare
from unalike.report.comparison_formats import FORMATS, format_rows
from unalike.report.ranks import describe_ranks, judge_ranks, rank_methods, rank_rows


def test_the_critical_difference_is_that_of_the_papers_example():
    """Demsar 2006, section 3.2.2: four classifiers on 14 data sets, q = 2.569, CD = 1.25."""
    scores = {f"d{i}": {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0} for i in range(14)}
    told = judge_ranks(scores)
    assert told["critical_difference"] == pytest.approx(1.25, abs=0.005)
    assert told["ranks"] == {"d": 1.0, "c": 2.0, "b": 3.0, "a": 4.0}
    assert told["friedman"]["chi2"] == pytest.approx(42.0)  # 14 * (4 - 1): all agree
    told |= {"scenarios": list(scores), "against": "a"}
    assert "Not told apart from d: c." in describe_ranks(told)


def test_methods_are_ranked_by_their_gain_on_each_scenario(make):
    folders = []
    for scenario in ("digits", "clinic", "hapt"):
        for shift, method in enumerate(("fedavg", "fedprox", "ditto")):
            name = f"{scenario}-{method}"
            how = {"scenario": scenario, "algorithm": method, "shift": float(shift)}
            folders.append(make(name, **how))
    told = rank_methods(folders)
    assert told["methods"] == ["ditto", "fedprox", "fedavg"]
    assert told["gains"]["hapt"]["fedavg"] == 0 < told["gains"]["hapt"]["fedprox"]
    assert "mean gains over fedavg." in describe_ranks(told)
    for format in FORMATS:
        assert "ditto" in format_rows(rank_rows(told), describe_ranks(told), format)
    with pytest.raises(UserError, match="two methods or more"):
        rank_methods([folders[0], folders[4]])


def test_the_lowest_decile_and_the_spread_of_gains_are_told(make):
    clients = {f"c{i}": ("cnn", "t", "accuracy", 50.0, 50.0 + i / 2) for i in range(11)}
    group = compare([make("a", clients=clients), make("b", clients=clients, seed=1)])["groups"][0]
    assert group["decile"]["mean"] == pytest.approx(1.0)  # gains are 0, 1 ... 10 %
    assert group["spread"]["mean"] == pytest.approx(3.3166, abs=1e-3)
