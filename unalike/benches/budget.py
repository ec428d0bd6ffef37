"""How much of the gain is a head start: Delta on `digits` when everybody, alone and together, trains longer on its labels."""

import multiprocessing
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

BUDGETS = {"20 rounds x 1 epoch": (20, 1), "20 x 2": (20, 2), "20 x 5": (20, 5), "30 x 5": (30, 5), "20 x 10": (20, 10)}


def run(quick: bool = False) -> dict:
    """Mean over seeds of Delta and of the values alone and together, and the worst gain of all."""
    wanted = {name: [f"rounds={rounds}", f"epochs={epochs}"] for name, (rounds, epochs) in BUDGETS.items()}
    told = {}
    for name, results in everything(wanted, quick).items():
        every = [c for r in results for c in r["clients"].values()]
        told[name] = {"delta": mean([r["delta"] for r in results]), "worst_gain": min(c["gain"] for c in every),
                      "losers": sum(r["losers"] for r in results), "alone": mean([c["alone"] for c in every]),
                      "together": mean([c["value"] for c in every])}
    return {"by_budget": told}


def everything(wanted: dict[str, list[str]], quick: bool) -> dict[str, list[dict]]:
    """Results of every setting for seeds 0, 1 and 2, as many at once as there are cores."""
    seeds, more = ([0], ["rounds=2"]) if quick else ([0, 1, 2], [])
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        jobs = {name: [pool.submit(once, [*settings, "evaluations=1", *more], seed) for seed in seeds] for name, settings in wanted.items()}
        return {name: [job.result() for job in each] for name, each in jobs.items()}


def once(settings: list[str], seed: int) -> dict:
    from unalike.runs import run_scenario
    from unalike.scenarios import load
    scenario, algorithm = load("digits", settings=settings, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        return run_scenario(scenario, algorithm, out=Path(folder) / "run")[0]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)
