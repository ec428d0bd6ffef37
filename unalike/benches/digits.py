"""The demo's numbers: FedMuscle on `digits`, three seeds, with and without the safeguard."""

import tempfile
from pathlib import Path

from unalike.runs import run_scenario
from unalike.scenarios import load


def run(quick: bool = False) -> dict:
    """Delta, losers and the worst client of each seed; a mean never stands alone."""
    seeds = [0] if quick else [0, 1, 2]
    told = {}
    for seed in seeds:
        scenario, algorithm = load(
            "digits", settings=["rounds=2"] if quick else [], seed=seed, workers=2, safeguard=True
        )
        with tempfile.TemporaryDirectory() as folder:
            told[seed], _ = run_scenario(scenario, algorithm, out=Path(folder) / "run")
    mean = lambda values: sum(values) / len(values)
    each = {
        str(seed): {
            "delta": r["delta"],
            "losers": r["losers"],
            "gains": {c: its["gain"] for c, its in r["clients"].items()},
            "safeguarded_delta": r["safeguard"]["delta"],
            "safeguarded_losers": r["safeguard"]["losers"],
            "safeguarded_gains": {c: its["safeguarded_gain"] for c, its in r["clients"].items()},
            "kept": {c: its["kept"] for c, its in r["clients"].items()},
            "seconds": r["seconds"],
            "bytes": r["bytes"],
        }
        for seed, r in told.items()
    }
    return {
        "delta": mean([r["delta"] for r in told.values()]),
        "bar_delta": 25.0,
        "worst_gain": min(g for e in each.values() for g in e["gains"].values()),
        "bar_worst_gain": -3.0,
        "safeguarded_delta": mean([r["safeguard"]["delta"] for r in told.values()]),
        "safeguarded_worst_gain": min(
            g for e in each.values() for g in e["safeguarded_gains"].values()
        ),
        "seconds": max(r["seconds"] for r in told.values()),
        "bar_seconds": 90,
        "seeds": each,
    }
