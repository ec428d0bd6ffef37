"""Benchmarks on patients and persons: `clinic` (three tasks on tables) and `hapt` (30 phones)."""

from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any

from benchmarks.study import Study, benchmark
from unalike.report import Run

SEEDS = range(3)


@benchmark("clinic")
def bench_clinic(study: Study) -> dict:
    """A classifier, a regressor and a survival client learn together: gain of each over 3 seeds."""
    return compare_with_local(study, "clinic")


@benchmark("hapt")
def bench_hapt(study: Study) -> dict:
    """Thirty persons, phones of three strengths: gain of each over 3 seeds; needs hapt_raw.npz."""
    return compare_with_local(study, "hapt")


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
                "worst_gain": min(entry["gain"] for entry in run.clients.values()),
                "seconds": (run.results or {})["seconds"],
            }
            for run in runs
        },
        "degraded_in_the_mean": sorted(name for name, c in clients.items() if c["gain"] < 0),
        "degraded_beyond_noise": sorted(
            name for name, c in clients.items() if c["gain"] < -2 * c["standard_error"]
        ),
        "clients": clients,
    }


def summarize_client(runs: Sequence[Run], name: str) -> dict[str, Any]:
    """Means over seeds of a client's value alone, together and its gain in percent.

    `standard_error` is that of the mean gain, over seeds.
    """
    entries = [run.clients[name] for run in runs]
    gains = [entry["gain"] for entry in entries]
    spread = stdev(gains) if len(gains) > 1 else 0.0
    return {
        "metric": entries[0]["metric"],
        "alone": mean(entry["alone"] for entry in entries),
        "together": mean(entry["value"] for entry in entries),
        "gain": mean(gains),
        "standard_error": spread / len(gains) ** 0.5,
        "gains": gains,
    }
