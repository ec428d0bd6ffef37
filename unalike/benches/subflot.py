"""SubFLOT against methods that send submodels, on each dataset: mean accuracy of the clients' own models on their own test sets."""

from collections.abc import Mapping
from statistics import mean
from typing import Any

from unalike.benches import Row, Study, averages
from unalike.report import Run

DATASETS = ("cifar10", "pacs", "agnews")
SMALL = ("cifar10", "agnews")  # of studies with many rows
GROUPS = range(4)  # of clients in each scenario, by capacity
METHODS: dict[str, list[str]] = {
    "subflot": [],  # as the scenario has it
    "subflot, spread plans": ["solver=auto"],
    "subflot, masked": ["algorithm.masked=true"],
    "heterofl": ["algorithm={name: heterofl}"],
    "heterofl, unmasked": ["algorithm={name: heterofl, masked: false}"],
    "fedrolex": ["algorithm={name: fedrolex}"],
    "feddropout": ["algorithm={name: feddropout}"],
    "feddse": ["algorithm={name: feddse}"],
    "flexfl": ["algorithm={name: flexfl}"],
    "fedavg, full width": [
        "algorithm={name: heterofl, masked: false}",
        *(f"clients.{i}.capacity=1.0" for i in GROUPS),
    ],
    "fedavg, smallest width": [
        "algorithm={name: heterofl, masked: false, scaler: false}",
        *(f"clients.{i}.capacity=0.25" for i in GROUPS),
    ],
    "local, full width": ["algorithm={name: local}"],
}
PAPER = {
    "cifar10 heterofl": 84.54,
    "cifar10 flexfl": 85.13,
    "cifar10 subflot": 86.89,
    "agnews heterofl": 84.12,
    "agnews flexfl": 86.02,
    "agnews subflot": 87.88,
    "pacs heterofl": 19.27,
    "pacs flexfl": 20.17,
    "pacs subflot": 41.58,
}
PLAIN = ("alone=false", "evaluations=10", "checkpoint=1000")
QUICK = ("rounds=2", "epochs=1")
TARGET = 80.0  # accuracy, of which the paper tells the time it takes


def run(study: Study) -> dict:
    """A row for each dataset and method, three seeds; the same clients, rows and budget for all."""
    rows = {
        f"{dataset} {method}": (scenario(study, dataset), settings)
        for dataset in DATASETS
        for method, settings in METHODS.items()
    }
    return table(study, rows, PAPER)


def scenario(study: Study, dataset: str = "cifar10") -> str:
    return "subflot-digits" if study.quick else f"subflot-{dataset}"


def table(
    study: Study, rows: Mapping[str, Row], paper: Mapping[str, float] | None = None
) -> dict[str, Any]:
    made = study.runs(
        {name: (scenario, [*PLAIN, *settings]) for name, (scenario, settings) in rows.items()},
        QUICK,
        range(3),
    )
    return {
        "rows": {
            name: averages(runs, figures)
            | {"to_80": together([reached(run) for run in runs])}
            | ({"paper": paper[name]} if paper and name in paper else {})
            for name, runs in made.items()
        }
    }


def together(times: list[float | None]) -> float | None:
    """The mean, where all have one."""
    there = [time for time in times if time is not None]
    return round(mean(there), 2) if len(there) == len(times) else None


def figures(run: Run) -> dict[str, float]:
    """Accuracy, that of the worst client, and of a client and round the bytes that travel and the operations, and simulated time."""
    told, clients = run.results or {}, list(run.clients.values())
    visits = told["rounds"] * len(clients)
    return {
        "accuracy": told["metrics"]["accuracy"],
        "worst": min(c["value"] for c in clients),
        "megabytes": (told["bytes"]["up"] + told["bytes"]["down"]) / visits / 1e6,
        "gigaflops": sum(c["round_flops"] for c in clients) / len(clients) / 1e9,
        "clock": told["clock"],
    }


def reached(run: Run) -> float | None:
    """Simulated time when the mean accuracy first was 80 %, if ever it was."""
    clock = {event["round"]: event["clock"] for event in run.events if event["event"] == "round"}
    return next(
        (
            clock[event["round"]]
            for event in run.events
            if event["event"] == "evaluation" and event["figures"].get("accuracy", 0) >= TARGET
        ),
        None,
    )
