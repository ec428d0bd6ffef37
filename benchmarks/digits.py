"""Benchmarks on the embedded scenario `digits`: budgets and the safeguard."""

import tempfile
from pathlib import Path
from statistics import mean

from benchmarks.study import Study, benchmark
from unalike.runs import run_scenario
from unalike.scenarios import load

# budget

BUDGETS = {
    "20 rounds x 1 epoch": (20, 1),
    "20 x 2": (20, 2),
    "20 x 5": (20, 5),
    "30 x 5": (30, 5),
    "20 x 10": (20, 10),
}


@benchmark("budget")
def bench_budget(study: Study) -> dict:
    """How much of the gain is a head start: Delta on `digits` when everybody, alone and together, trains longer on its labels.

    Mean over seeds of Delta and of the values alone and together, and the worst gain of all.
    """
    rows = {
        name: ("digits", ["evaluations=1", f"rounds={rounds}", f"epochs={epochs}"])
        for name, (rounds, epochs) in BUDGETS.items()
    }
    told = {}
    for name, runs in study.runs(rows, seeds=range(3)).items():
        results = [run.results or {} for run in runs]
        every = [c for run in runs for c in run.clients.values()]
        told[name] = {
            "delta": mean(r["delta"] for r in results),
            "worst_gain": min(c["gain"] for c in every),
            "losers": sum(r["losers"] for r in results),
            "alone": mean(c["alone"] for c in every),
            "together": mean(c["value"] for c in every),
        }
    return {"by_budget": told}


# digits


@benchmark("digits")
def bench_digits(quick: bool = False) -> dict:
    """The demo's numbers: FedMuscle on `digits`, three seeds, with and without the safeguard.

    Delta, losers and the worst client of each seed; a mean never stands alone.
    """
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


# safeguard

SETTINGS = {
    "as shipped": [],
    "one optimizer for task and alignment": [
        "algorithm={name: benchmarks.variants:OneOptimizer, width: 32, distill_public: never}"
    ],
    "rates three times too high": ["lr=0.003", "align_lr=0.01"],
}


@benchmark("safeguard")
def bench_safeguard(study: Study) -> dict:
    """What the safeguard saves and costs: `digits` where taking part helps, and under two settings where it hurts.

    Delta, number of losers and worst gain with and without, over all clients and seeds.
    """
    rows = {
        name: ("digits", ["evaluations=1", "safeguard=true", *settings])
        for name, settings in SETTINGS.items()
    }
    told: dict[str, dict] = {}
    for name, runs in study.runs(rows, seeds=range(3)).items():
        every = [c for run in runs for c in run.clients.values()]
        told[name] = {
            "clients_and_seeds": len(every),
            "kept_alone": sum(c["kept"] == "alone" for c in every),
        }
        for program, key in (("without", "gain"), ("with", "safeguarded_gain")):
            gains = [c[key] for c in every]
            told[name][program] = {
                "delta": mean(gains),
                "losers": sum(g < 0 for g in gains),
                "worst_gain": min(gains),
            }
    return {"by_setting": told}
