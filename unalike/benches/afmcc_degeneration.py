"""AFMCC and FMCSC trained long, with the constraint and without it: whether accuracy falls again (AFMCC's Figure 1 and Table 3c)."""

from math import ceil
from statistics import mean

from unalike.benches import Row, Study, averages
from unalike.benches.afmcc import figures, scenario
from unalike.report import Run, history

LENGTH, SUBSETS, MARKS = (
    800,
    3,
    (200, 400, 600, 800),
)  # gradient steps of a client with both modalities
EPOCHS = 10  # of FMCSC in a round on BDGP, a step each: a batch holds a whole client
PAPER = {
    "200": {"without": 90.58, "with": 91.06},
    "800": {"without": 81.65, "with": 90.01},
}  # of FMCSC, with and without it
QUICK = ("rounds=2", "pretraining=2", "checkpoint=1000")


def run(study: Study) -> dict:
    """BDGP, F/S 1:1: ACC and joint ACC by the number of gradient steps, for AFMCC with 2 steps a subset and visit, as shipped, and with 5,
    and for FMCSC with its own budget of a round."""
    rows: dict[str, Row] = {}
    pace: dict[str, int] = {}  # gradient steps a visit or round
    for word, weight in (("with", 0.01), ("without", 0.0)):
        for steps in (2, 5):
            rows[name := f"{word} the constraint, {steps} steps"] = (
                scenario(study),
                [f"beta={weight}", f"steps={steps}"],
            )
            pace[name] = steps * SUBSETS
        rows[name := f"fmcsc {word} the constraint"] = (
            scenario(study),
            [
                f"algorithm={{name: fmcsc, constraint: {weight}}}",
                f"epochs={EPOCHS}",
                "batch_size=256",
            ],
        )
        pace[name] = EPOCHS
    rows = {
        name: (
            where,
            [
                "alone=false",
                "evaluations=20",
                "checkpoint=1000",
                *settings,
                f"rounds={ceil(LENGTH / pace[name])}",
            ],
        )
        for name, (where, settings) in rows.items()
    }
    told = {}
    for name, runs in study.runs(rows, QUICK).items():
        steps = pace[name]
        told[name] = averages(runs, figures) | {
            "peak_acc": round(mean(max(course(run, "acc").values()) for run in runs), 3)
        }
        told[name] |= {
            f"acc_at_{mark}": round(mean(at(course(run, "acc"), mark / steps) for run in runs), 3)
            for mark in MARKS
        }
        told[name]["courses"] = {
            str(run.seed): {
                key: {
                    str(steps * visit): round(value, 2) for visit, value in course(run, key).items()
                }
                for key in ("acc", "joint acc")
            }
            for run in runs
        }
    return {"rows": told, "paper_fmcsc": PAPER}


def course(run: Run, name: str) -> dict[int, float]:
    return history.figures(run)[name]


def at(values: dict[int, float], visit: float) -> float:
    """What was measured nearest to so many visits."""
    return values[min(values, key=lambda known: abs(known - visit))]
