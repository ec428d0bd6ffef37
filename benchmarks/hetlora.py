"""Benchmarks of LoRA among clients of unlike ranks."""

from benchmarks.study import Study, averages, benchmark, megabytes
from unalike.report import Run

METHODS: dict[str, list[str]] = {
    "hetlora, svd": [],
    "hetlora, padded": ["algorithm={name: hetlora, combine: pad}"],
    "fedavg within equal ranks": ["algorithm={name: fedavg}"],
    "hetlora, stacked": ["algorithm={name: hetlora, combine: stack}"],
}


@benchmark("hetlora")
def bench_hetlora(study: Study) -> dict:
    """LoRA of ranks 4, 8 and 16 on AG News with MiniLM: products against other means.

    Accuracy of the clients' own models on their own test sets, three seeds; clients, data and
    budget are the same for all.
    """
    rows = {name: ("hetlora-agnews", settings) for name, settings in METHODS.items()}
    quick = ("rounds=1", *(f"clients.{i}.train=8" for i in range(3)))
    runs = study.runs(rows, quick, range(3))
    return {"rows": {name: averages(found, figures) for name, found in runs.items()}}


def figures(run: Run) -> dict[str, float]:
    """Mean and worst accuracy, and traffic."""
    results = run.results or {}
    return {
        "accuracy": results["metrics"]["accuracy"],
        "worst": min(client["value"] for client in run.clients.values()),
        "megabytes": megabytes(run),
    }
