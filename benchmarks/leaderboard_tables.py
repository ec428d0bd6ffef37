"""What is made of the leaderboard's runs: a table for each setting, mean ranks, and a page."""

from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import mean, stdev
from typing import Any

import numpy as np

Table = dict[str, Any]


def setting_table(found: Mapping[str, Mapping[str, Any]]) -> Table:
    """Rows by method, best first, and the methods that do not fit with the reason.

    A row has the mean `score` over clients and seeds with its spread over seeds, the `worst` client's value,
    how many clients are `degraded` (worse than by local training with the same seed), `megabytes`
    a client and round both ways, `seconds` of a run, and what was chosen.
    """
    misfits = {name: entry["misfit"] for name, entry in found.items() if "misfit" in entry}
    fitting = {name: entry for name, entry in found.items() if name not in misfits}
    local = fitting.get("local", {}).get("runs", [])
    rows = {name: table_row(entry, local) for name, entry in fitting.items()}
    ranked = sorted(rows, key=lambda name: -rows[name]["score"])
    return {"rows": {name: rows[name] for name in ranked}, "misfits": misfits}


def table_row(entry: Mapping[str, Any], local: Sequence[Mapping[str, Any]]) -> Table:
    """The row of a method; a run that failed has the score 0."""
    runs = entry["runs"]
    scores = [run.get("score", 0.0) for run in runs]
    done = [run for run in runs if "score" in run]
    row: Table = {
        "score": round(mean(scores), 3),
        "spread": round(stdev(scores), 3) if len(scores) > 1 else None,
        "scores": [round(score, 3) for score in scores],
        "failed": len(runs) - len(done),
        "chosen": entry["chosen"],
    }
    if done:
        worst = [min(run["values"].values()) for run in done]
        row["worst"] = round(mean(worst), 2)
        row["megabytes"] = round(mean(run["megabytes"] for run in done), 4)
        row["seconds"] = round(mean(run["seconds"] for run in done), 2)
        row["works_alone"] = all(run["works_alone"] for run in done)
    operations = entry.get("operations", {})
    if "client" in operations:
        row["megaflops"] = operations["client"]
        row["server_megaflops"] = operations["server"]
    if len(local) == len(runs) == len(done) and all("values" in run for run in local):
        degraded = [
            sum(run["values"][client] < value for client, value in alone["values"].items())
            for run, alone in zip(runs, local, strict=True)
        ]
        row["degraded"] = round(mean(degraded), 2)
    return row


def summarize_ranks(settings: Mapping[str, Table]) -> Table:
    """Mean ranks over the settings that the same methods fit, with Nemenyi's critical difference.

    Methods are compared where all of them can be: a family is a set of settings, and the methods
    with a row in each. A block is a setting and seed; seeds of a setting are no independent
    blocks, so the critical difference is too small rather than too large.
    """
    families = {
        "unlike models": ("agnews-encoders", "digits", "htfe8"),
        "one architecture": ("cifar10-shards", "hapt-persons", "pacs-domains"),
    }
    return {
        family: rank_family([settings[name]["rows"] for name in names])
        for family, names in families.items()
        if all(name in settings for name in names)
    }


def rank_family(tables: Sequence[Mapping[str, Table]]) -> Table:
    """Mean rank of each method that has a full row in all tables; 1 is best, ties share a rank."""
    from scipy.stats import rankdata

    blocks = min(len(row["scores"]) for table in tables for row in table.values())
    methods = [
        name
        for name in tables[0]
        if all(name in table and not table[name].get("works_alone") for table in tables)
    ]
    scores = np.array(
        [
            [table[name]["scores"][seed] for name in methods]
            for table in tables
            for seed in range(blocks)
        ]
    )
    ranks = rankdata(-scores, axis=1).mean(0)
    order = np.argsort(ranks)
    return {
        "blocks": len(scores),
        "critical_difference": round(critical_difference(len(methods), len(scores)), 2),
        "mean_rank": {methods[i]: round(float(ranks[i]), 2) for i in order},
    }


def critical_difference(methods: int, blocks: int, alpha: float = 0.05) -> float:
    """Nemenyi's: mean ranks that differ by more are different at this level.

    Demsar 2006, eq. in section 3.2.2, https://jmlr.org/papers/v7/demsar06a.html

    >>> round(critical_difference(4, 14), 2)
    1.25
    """
    from scipy.stats import studentized_range

    q = studentized_range.ppf(1 - alpha, methods, np.inf) / sqrt(2)
    return float(q * sqrt(methods * (methods + 1) / (6 * blocks)))
