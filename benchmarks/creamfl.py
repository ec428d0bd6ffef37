"""Benchmark of CreamFL."""

from statistics import mean

from benchmarks.study import Row, Study, averages, benchmark
from unalike.report import Run

# creamfl

METHODS = {"server alone": "none", "creamfl": "cream", "creamfl + muscle": "muscle"}
QUICK = ("rounds=1", "epochs=1", "public.size=64")


@benchmark("creamfl")
def bench_creamfl(study: Study) -> dict:
    """CreamFL, and CreamFL with the Muscle loss, against a server that learns alone: recalls of its model (FedMuscle's Table 3).

    A row for each, three seeds; Delta is the mean gain of the six recalls over the server alone, in percent, seed by seed.
    """
    scenario = "creamfl-digits" if study.quick else "creamfl-flickr8k"
    rows: dict[str, Row] = {
        name: (scenario, ["evaluations=1", f"contrast={how}"]) for name, how in METHODS.items()
    }
    runs = study.runs(rows, QUICK, range(3))
    told = {name: averages(made, recalls) for name, made in runs.items()}
    before = {run.seed: recalls(run) for run in runs.get("server alone", [])}
    for name, made in runs.items():
        deltas = {
            str(run.seed): mean(
                100 * (now - was[key]) / was[key]
                for key, now in recalls(run).items()
                if "R@" in key and was[key]
            )
            for run in made
            if (was := before.get(run.seed))
        }
        if deltas:
            told[name] |= {
                "delta": round(mean(deltas.values()), 3),
                "deltas": {seed: round(each, 1) for seed, each in deltas.items()},
            }
    lead = (
        {
            "lead_of_muscle": round(
                told["creamfl + muscle"]["delta"] - told["creamfl"]["delta"], 3
            ),
            "lead_of_muscle_bar": 0.0,
        }
        if (before and {"creamfl", "creamfl + muscle"} <= told.keys())
        else {}
    )
    return {"scenario": scenario, "rows": told, **lead}


def recalls(run: Run) -> dict[str, float]:
    return {
        name: value
        for name, value in (run.results or {})["server"]["metrics"].items()
        if name != "log_loss"
    }
