"""Benchmarks on patients and persons: `clinic` (three tasks on tables), `hapt`, `hapt-recordings`."""

from collections.abc import Sequence
from statistics import mean, median, stdev
from typing import Any

from benchmarks.study import Study, benchmark
from unalike.report import Run

SEEDS = range(3)
OWN_EPOCHS = "algorithm={{name: heterofl, finetune: {}}}"
WHOLE = tuple(f"clients.{group}.capacity=1" for group in range(3))
MIXED = "data.options={split: stretches}"
# what may cost a person of `hapt-recordings` accuracy, each row without one of them
CAUSES: dict[str, tuple[str, ...]] = {
    "as it was": (OWN_EPOCHS.format(0),),
    "every phone holds all": (OWN_EPOCHS.format(0), *WHOLE),
    "5 own epochs": (OWN_EPOCHS.format(5),),
    "20 own epochs": (OWN_EPOCHS.format(20),),
    "40 own epochs": (OWN_EPOCHS.format(40),),
    "safeguard": (OWN_EPOCHS.format(0), "safeguard=true"),
    "20 own epochs, safeguard": (OWN_EPOCHS.format(20), "safeguard=true"),
    "labels of both recordings": (OWN_EPOCHS.format(0), MIXED),
    "labels of both recordings, safeguard": (OWN_EPOCHS.format(0), MIXED, "safeguard=true"),
}
# methods that keep something of a model personal, and whole models averaged; every phone holds all
PERSONAL = ("fedavg", "fedavgft", "fedper", "fedbn", "ditto", "fedproto")


@benchmark("clinic")
def bench_clinic(study: Study) -> dict:
    """A classifier, a regressor and a survival client learn together: gain of each over 3 seeds."""
    return compare_with_local(study, "clinic")


@benchmark("hapt")
def bench_hapt(study: Study) -> dict:
    """Thirty persons, labels of every recording, safeguard: gains over 3 seeds; hapt_raw.npz."""
    return compare_with_local(study, "hapt")


@benchmark("hapt-recordings")
def bench_hapt_recordings(study: Study) -> dict:
    """The same persons, phones of three strengths, tested on a recording that nobody labelled."""
    return compare_with_local(study, "hapt-recordings")


@benchmark("hapt-causes")
def bench_hapt_causes(study: Study) -> dict:
    """What costs a person of `hapt-recordings` accuracy: width, own epochs, or no safeguard."""
    rows = {
        name: ("hapt-recordings", ["evaluations=1", *settings]) for name, settings in CAUSES.items()
    }
    found = study.runs(rows, seeds=range(100, 103))
    return {"rows": {name: compare_persons(runs) for name, runs in found.items()}}


@benchmark("hapt-methods")
def bench_hapt_methods(study: Study) -> dict:
    """`hapt-recordings` where every phone holds the whole network: methods that keep a part personal."""
    rows = {
        name: ("hapt-recordings", ["evaluations=1", f"algorithm={{name: {name}}}", *WHOLE])
        for name in PERSONAL
    }
    found = study.runs(rows, seeds=range(100, 103))
    return {"rows": {name: compare_persons(runs) for name, runs in found.items()}}


def compare_persons(runs: Sequence[Run]) -> dict[str, Any]:
    """Accuracy and gain over persons and seeds, and who loses, of the last model and of the one
    that the safeguard keeps."""
    outcomes = {"together": ("value", "gain"), "safeguarded": ("safeguarded", "safeguarded_gain")}
    result: dict[str, Any] = {
        "alone": mean(mean(entry["alone"] for entry in run.clients.values()) for run in runs)
    }
    for outcome, (value, gain) in outcomes.items():
        if any(value not in entry for run in runs for entry in run.clients.values()):
            continue
        gains = {name: known_gains(runs, name, gain) for name in runs[0].clients}
        result[outcome] = {
            "accuracy": mean(mean(e[value] for e in run.clients.values()) for run in runs),
            "median_gain": median(mean(found) for found in gains.values()),
            "degraded_by_seed": [count_degraded(run, gain) for run in runs],
            "degraded_in_the_mean": sorted(n for n, g in gains.items() if mean(g) < 0),
            "degraded_beyond_noise": sorted(n for n, g in gains.items() if beyond_noise(g)),
            "gains": gains,
        }
    return result


def known_gains(runs: Sequence[Run], name: str, field: str = "gain") -> list[float]:
    """A client's gains by seed, without those over a local value of 0, of which no percent is."""
    gains = [run.clients[name][field] for run in runs]
    return [gain for gain in gains if gain is not None]


def count_degraded(run: Run, field: str = "gain") -> int:
    """Clients whose gain is below 0."""
    gains = [entry[field] for entry in run.clients.values()]
    return sum(gain < 0 for gain in gains if gain is not None)


def beyond_noise(gains: Sequence[float]) -> bool:
    """Whether gains are below 0 by more than two standard errors of their mean."""
    return mean(gains) < -2 * standard_error(gains)


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of values."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def compare_with_local(study: Study, scenario: str) -> dict[str, Any]:
    """Delta and degraded clients of each seed, and each client's gain over the seeds."""
    (runs,) = study.runs({"as shipped": (scenario, ["evaluations=1"])}, seeds=SEEDS).values()
    clients = {name: summarize_client(runs, name) for name in runs[0].clients}
    return {
        "delta": mean((run.results or {})["delta"] for run in runs),
        "by_seed": {
            str(run.seed): {
                "delta": (run.results or {})["delta"],
                "degraded": (run.results or {})["losers"],
                "worst_gain": min(known for n in run.clients for known in known_gains([run], n)),
                "seconds": (run.results or {})["seconds"],
            }
            for run in runs
        },
        "degraded_in_the_mean": sorted(name for name, c in clients.items() if c["gain"] < 0),
        "degraded_beyond_noise": sorted(
            name for name, c in clients.items() if c["gain"] < -2 * c["standard_error"]
        ),
        "clients": clients,
        "outcomes": compare_persons(runs),  # with safeguard=true also of the models kept
    }


def summarize_client(runs: Sequence[Run], name: str) -> dict[str, Any]:
    """Means over seeds of a client's value alone, together and its gain in percent.

    `standard_error` is that of the mean gain, over seeds.
    """
    entries = [run.clients[name] for run in runs]
    gains = known_gains(runs, name)
    return {
        "metric": entries[0]["metric"],
        "alone": mean(entry["alone"] for entry in entries),
        "together": mean(entry["value"] for entry in entries),
        "gain": mean(gains),
        "standard_error": standard_error(gains),
        "gains": gains,
    }
