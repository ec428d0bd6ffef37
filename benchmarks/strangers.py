"""Tables that the project was not made on, and what defaults do to clients there."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_wine, make_classification, make_friedman1

from benchmarks.people import beyond_noise, known_gains
from benchmarks.study import Study, benchmark
from unalike.data.table import Table
from unalike.report import Run
from unalike.tasks import Classification, Regression

SCENARIO = str(Path(__file__).with_name("strangers.yaml"))
METHODS = {
    "without distillation": "{name: fedmuscleplus, distill_public: never}",
    "fedmuscleplus": "{name: fedmuscleplus}",
    "as the README had it": "{name: fedmuscleplus, width: 64, align_lr: 0.003, distill_public: never}",
    "feddf": "{name: feddf}",
}


def cancer() -> Table:
    """569 tumours: malignant or benign, and the worst concave points, from 28 other numbers."""
    raw = load_breast_cancer()
    x = np.delete(raw.data, (7, 27), axis=1)  # 7 is the mean of what 27 is the worst of
    return make_table(x, raw.target, raw.data[:, 27], list(raw.target_names), test=200)


def wine() -> Table:
    """178 wines: their cultivar, and their alcohol, from 12 other measurements."""
    raw = load_wine()
    return make_table(raw.data[:, 1:], raw.target, raw.data[:, 0], list(raw.target_names), test=58)


def friedman() -> Table:
    """1,500 made rows of ten numbers: Friedman's first function, and whether it is high."""
    x, y = make_friedman1(1500, noise=1.0, random_state=0)
    return make_table(x, (y > np.median(y)).astype(int), y, ["low", "high"], test=800)


def blobs() -> Table:
    """2,000 made rows of 20 numbers in four classes; the number is one of the 20."""
    x, y = make_classification(
        2000, n_informative=8, n_redundant=4, n_classes=4, random_state=0, shuffle=False
    )
    return make_table(x[:, 1:], y, x[:, 0], list("abcd"), test=1000)


def make_table(
    x: np.ndarray, classes: np.ndarray, number: np.ndarray, names: list[str], test: int
) -> Table:
    """Standardized columns, two targets, and random rows to test."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    values = torch.from_numpy(number).float()
    return Table(
        x=torch.from_numpy((x - x.mean(0)) / x.std(0)).float(),
        targets={"class": torch.from_numpy(classes).long(), "number": values},
        tasks={
            "class": Classification(names),
            "number": Regression(["number"], mean=float(values.mean()), std=float(values.std())),
        },
        train=order[test:].sort().values,
        test=order[:test].sort().values,
    )


# Tables, and the settings of those with few rows.
TABLES: dict[Callable[[], Table], tuple[str, ...]] = {
    cancer: (),
    wine: ("public.size=60", *(f"clients.{i}.train=12" for i in range(5))),
    friedman: (),
    blobs: (),
}


@benchmark("strangers")
def bench_strangers(study: Study) -> dict:
    """Four tables of scikit-learn, five clients with two tasks: who gains with which defaults."""
    rows = {
        f"{table.__name__}, {name}": (
            SCENARIO,
            [
                f"algorithm={method}",
                f"data={{name: 'benchmarks.strangers:{table.__name__}'}}",
                *few,
            ],
        )
        for table, few in TABLES.items()
        for name, method in METHODS.items()
    }
    found = study.runs(rows, quick=("rounds=1",), seeds=range(3))
    return {"rows": {name: summarize(runs) for name, runs in found.items()}}


def summarize(runs: Sequence[Run]) -> dict[str, Any]:
    """Mean gain, the worst one, and who loses, over clients and seeds."""
    gains = {name: known_gains(runs, name) for name in runs[0].clients}
    everything = [gain for found in gains.values() for gain in found]
    return {
        "delta": mean(everything),
        "by_seed": {str(run.seed): (run.results or {})["delta"] for run in runs},
        "worst": min(everything),
        "degraded": sum(gain < 0 for gain in everything),
        "of": len(everything),
        "degraded_beyond_noise": sum(beyond_noise(found) for found in gains.values()),
        "gains": gains,
    }
