"""FedMuscle, its losses and its rivals on `muscle-vision`: gains over training alone (the paper's Table 1 and Figure 2)."""

from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from unalike.algorithms import ALGORITHMS
from unalike.benches import Row, Study, averages
from unalike.report import Run

RIVALS = ("sage", "fedhenn", "cofed", "feddf", "fedrcl", "simclr", "pseudolabel")
METHODS: dict[str, list[str]] = {
    "muscle": [],
    "pairwise": ["algorithm.loss=pairwise"],
    "gramian": ["algorithm.loss=gramian"],
    "nobody aligned": [
        "algorithm.align_rate=1e-12"
    ],  # what a joint start, heads and opinions do without the Muscle loss
    "own start": ["algorithm.start=own"],
    "own opinions": ["algorithm.opinions=own"],
    "absent wrong": ["algorithm.absent=wrong"],
    "no company": ["algorithm.own=3"],  # each contrasts with itself
    "heads shared": ["algorithm={name: fedmuscle, heads: shared, align_rate: 0.0003, decay: true}"],
    "own heads": ["algorithm={name: fedmuscle, align_rate: 0.0003, decay: true}"],
    "as printed": ["algorithm={name: fedmuscle}"],
    **{name: [f"algorithm={{name: {name}}}"] for name in RIVALS if name in ALGORITHMS},
}
QUICK = ("rounds=2", "epochs=1", "public.size=64")
BARS = {"delta_bar": 10.0, "lead_on_pairwise_bar": 0.0, "lead_on_gramian_bar": 0.0}


def run(study: Study) -> dict:
    """A row for each method, three seeds, and how far the Muscle loss is ahead of the two others on the same seeds."""
    told = table(study, {name: (scenario(study), settings) for name, settings in METHODS.items()})
    rows = told["rows"]
    for other in ("pairwise", "gramian"):
        if {"muscle", other} <= rows.keys():
            leads = [
                delta - rows[other]["seeds"][seed]
                for seed, delta in rows["muscle"]["seeds"].items()
            ]
            spread = round(stdev(leads), 3) if len(leads) > 1 else None
            told |= {f"lead_on_{other}": round(mean(leads), 3), f"lead_on_{other}_spread": spread}
    return told | BARS


def scenario(study: Study, name: str = "muscle-vision") -> str:
    return "digits" if study.quick else name


def table(study: Study, rows: Mapping[str, Row]) -> dict[str, Any]:
    """Every row against clients alone: its own where it says alone=true (other models or labelled rows), else those of the first row."""
    chosen = [name for name in rows if not study.only or any(word in name for word in study.only)]
    asked = {
        name: (
            which,
            ["evaluations=1", "alone=true" if name in chosen[:1] else "alone=false", *settings],
        )
        for name, (which, settings) in rows.items()
    }
    runs = study.runs(asked, QUICK, range(3))
    shared = {made.seed: values(made, "alone") for made in runs[chosen[0]]} if chosen else {}
    own = {name for name, (_, settings) in rows.items() if "alone=true" in settings}
    return {
        "rows": {
            name: summary(
                made, [values(run, "alone") if name in own else shared[run.seed] for run in made]
            )
            for name, made in runs.items()
        }
    }


def curves(
    told: dict[str, Any], across: str, lines: Mapping[str, Mapping[Any, str]]
) -> dict[str, Any]:
    """A table with Delta drawn over numbers, by the row of each; rows that were not run are left out."""
    rows = told["rows"]
    found = {
        name: {str(at): rows[row]["delta"] for at, row in sorted(line.items()) if row in rows}
        for name, line in lines.items()
    }
    return told | {
        "curves": {
            "across": across,
            "up": "Delta, %",
            "lines": {name: line for name, line in found.items() if line},
        }
    }


def megabytes(run: Run) -> float:
    """Of a client and round, both ways."""
    told = run.results or {}
    return (told["bytes"]["up"] + told["bytes"]["down"]) / told["rounds"] / len(run.clients) / 1e6


def values(run: Run, key: str = "value") -> dict[str, float]:
    """What clients leave with, which the safeguard may have chosen, or what they have `alone`."""
    return {
        client: its.get("safeguarded", its[key]) if key == "value" else its[key]
        for client, its in run.clients.items()
    }


def summary(runs: Sequence[Run], alone: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Figures over seeds, and who loses beyond noise: by more than two standard errors of the gain, three seeds or more."""
    gains = [
        {
            client: 100 * (value - before[client]) / before[client]
            for client, value in values(run).items()
            if before[client]
        }
        for run, before in zip(runs, alone, strict=True)
    ]
    of = {id(run): its for run, its in zip(runs, gains, strict=True)}

    def figures(run: Run) -> dict[str, float]:
        its = of[id(run)]
        lost = sum(gain < 0 for gain in its.values())
        return {
            "delta": mean(its.values()),
            "worst_gain": min(its.values()),
            "losers": lost,
            "megabytes": megabytes(run),
            **values(run),
        }

    each = {client: [its[client] for its in gains if client in its] for client in gains[0]}
    lost = [
        client
        for client, its in each.items()
        if len(its) > 2 and mean(its) + 2 * stdev(its) / len(its) ** 0.5 < 0
    ]
    return averages(runs, figures) | {
        "losers_beyond_noise": len(lost),
        "gains": {c: round(mean(its), 2) for c, its in each.items()},
    }
