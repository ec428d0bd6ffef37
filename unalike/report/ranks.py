"""Methods ranked over several scenarios, with the tests of Friedman and Nemenyi (Demsar 2006).

https://www.jmlr.org/papers/v7/demsar06a.html
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from unalike.base.errors import UserError
from unalike.report.compare import compare
from unalike.report.folder import Run, read
from unalike.report.formatting import MISSING, format_gain

LEVEL = 0.05


def rank_methods(paths: Iterable[str | Path], against: str | None = None) -> dict[str, Any]:
    """Rank methods by their mean gain on each scenario, averaged over clients and seeds.

    Args:
        paths: folders of finished runs of two scenarios or more, one setting of each method.
        against: method whose values gains are over; by default the first one of each scenario.
    Returns: a dict with
        scenarios, methods: methods that every scenario has, the best mean rank first.
        against: the method that gains are over.
        gains: {scenario: {method: gain in percent}}, that method's is 0.
        ranks: {method: mean rank}; 1 is the best, ties share theirs.
        friedman: {"chi2", "p"}, whether methods differ at all; None with two methods, where the
            sign of a difference is all there is.
        critical_difference: mean ranks closer than this do not differ (Nemenyi, 5 %).
    Raises: UserError where fewer than two methods were run on all scenarios.
    """
    runs = [read(path) for path in paths]
    by_scenario: dict[str, list[Run]] = {}
    for run in runs:
        by_scenario.setdefault(run.scenario, []).append(run)
    common = list(dict.fromkeys(run.algorithm for run in runs))
    for own in by_scenario.values():
        methods = {run.algorithm for run in own}
        common = [name for name in common if name in methods]
    if len(common) < 2 or len(by_scenario) < 2:
        raise UserError(
            "ranks need two methods or more that were run on each of two scenarios or more; "
            f"on all of {', '.join(by_scenario)}: {', '.join(common) or 'none'}"
        )
    reference = against or common[0]
    if reference not in common:
        raise UserError(f"--against {reference}: it was not run on all of {', '.join(by_scenario)}")
    scores = {}
    for scenario, own in by_scenario.items():
        chosen = [run for run in own if run.algorithm in common]
        scores[scenario] = _gains(chosen, reference)
    judged = judge_ranks(scores)
    return {"scenarios": list(by_scenario), "against": reference, "gains": scores, **judged}


def _gains(runs: list[Run], reference: str) -> dict[str, float]:
    result = compare([run.path for run in runs], against=reference)
    scores: dict[str, float] = {}
    for group in result["groups"]:
        if group["algorithm"] in scores:
            raise UserError(
                f"{result['scenario']} has two settings of {group['algorithm']}: give one of each"
            )
        if group["delta"]["mean"] is None:
            raise UserError(f"{group['label']} has no seed in common with {reference}")
        scores[group["algorithm"]] = group["delta"]["mean"]
    return scores


def judge_ranks(scores: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Return methods, mean ranks, Friedman's test and Nemenyi's critical difference.

    Args:
        scores: {scenario: {method: score}}, higher is better.

    >>> judged = judge_ranks({"a": {"x": 1.0, "y": 2.0}, "b": {"x": 1.0, "y": 1.0}})
    >>> judged["ranks"], judged["friedman"]
    ({'y': 1.25, 'x': 1.75}, None)
    """
    from scipy.stats import friedmanchisquare, rankdata, studentized_range

    methods = list(next(iter(scores.values())))
    table = np.array([list(map(own.get, methods)) for own in scores.values()])
    means = rankdata(-table, axis=1).mean(0)  # one for each method
    by_rank = np.argsort(means, kind="stable")
    ranks = {methods[i]: float(means[i]) for i in by_rank}
    friedman = None
    if len(methods) > 2:
        chi2, p = friedmanchisquare(*table.T)
        friedman = {"chi2": float(chi2), "p": float(p)} if math.isfinite(p) else None
    count = len(methods)
    quantile = studentized_range.ppf(1 - LEVEL, count, math.inf) / math.sqrt(2)
    difference = quantile * math.sqrt(count * (count + 1) / (6 * len(scores)))
    return {
        "methods": list(ranks),
        "ranks": ranks,
        "friedman": friedman,
        "critical_difference": float(difference),
    }


def rank_rows(result: dict[str, Any]) -> list[list[str]]:
    """Return a header and one row per method: its mean rank, and its gain on each scenario."""
    rows = [["method", "mean rank", *result["scenarios"]]]
    for method in result["methods"]:
        own = [format_gain(result["gains"][name].get(method)) for name in result["scenarios"]]
        rows.append([method, f"{result['ranks'][method]:.2f}", *own])
    return rows


def describe_ranks(result: dict[str, Any]) -> str:
    """Return what the tests say, in one line."""
    best = result["methods"][0]
    near = [
        name
        for name in result["methods"][1:]
        if result["ranks"][name] - result["ranks"][best] < result["critical_difference"]
    ]
    friedman = result["friedman"]
    told = f"p = {friedman['p']:.3g}" if friedman is not None else MISSING
    return (
        f"Percentages are mean gains over {result['against']}. "
        f"Friedman over {len(result['scenarios'])} scenarios: {told}; Nemenyi's critical "
        f"difference of mean ranks at 5 %: {result['critical_difference']:.2f}. "
        f"Not told apart from {best}: "
        f"{', '.join(near) or 'none'}."
    )
