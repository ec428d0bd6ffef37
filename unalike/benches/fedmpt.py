"""FedMPT against its rivals on VOC 2012, twelve clusters of images as clients (t = 60 %), three seeds; quick, scenes of digits."""

from collections.abc import Mapping, Sequence
from typing import Any

from unalike.benches import Row, Study, averages
from unalike.report import Run

RATES = {  # each method's best of several on `choosing`, seed 100 (LOG.md)
    "fedmpt": 0.008,
    "promptfl": 0.008,
    "feddualcoop": 0.03,
    "fedtpg": 0.002,
    "fedmvp": 0.002,
    "fedram": 0.004,
    "linearprobe": 0.008,
    "zeroshot": 0.002,
}
METHODS = {name: [f"algorithm={{name: {name}}}", f"lr={rate}"] for name, rate in RATES.items()}
CLASSES = 20
SHOWN = ("mAP", "CF1", "OF1")
PLAIN = ("alone=false", "evaluations=1", "checkpoint=1000")
QUICK = ("rounds=2", "data.options={train: 240, test: 100}", "clients.0.count=3")


def run(study: Study) -> dict:
    """A row for each method; how far FedMPT is ahead of the best other in mAP, where both were run."""
    told = table(study, {name: [] for name in METHODS})
    others = [row["mAP"] for name, row in told["rows"].items() if name != "fedmpt"]
    if "fedmpt" in told["rows"] and others:
        told |= {
            "mAP_lead": round(told["rows"]["fedmpt"]["mAP"] - max(others), 3),
            "mAP_lead_bar": 2.0,
        }
    return told


def table(study: Study, rows: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Rows by name with their settings; a row's method is what its name begins with."""
    scenario = "fedmpt-digits" if study.quick else "fedmpt-voc"
    made: dict[str, Row] = {
        name: (scenario, [*PLAIN, *METHODS[name.split(",")[0]], *settings])
        for name, settings in rows.items()
    }
    return {
        "scenario": scenario,
        "rows": {
            name: averages(runs, figures)
            for name, runs in study.runs(made, QUICK, range(3)).items()
        },
    }


def swept(study: Study, what: str, at: Mapping[int, Sequence[str]]) -> dict[str, Any]:
    """Every method at every percentage, and mAP as curves."""
    told = table(
        study,
        {
            f"{method}, {percent} %": settings
            for percent, settings in at.items()
            for method in METHODS
        },
    )
    lines = {
        method: {
            str(percent): told["rows"][row]["mAP"]
            for percent in at
            if (row := f"{method}, {percent} %") in told["rows"]
        }
        for method in METHODS
    }
    return told | {
        "curves": {
            "across": what,
            "up": "mAP",
            "lines": {method: line for method, line in lines.items() if line},
        }
    }


def figures(run: Run) -> dict[str, float]:
    told = run.results or {}
    client = next(iter(run.clients.values()))
    return {name: told["metrics"][name] for name in SHOWN} | {
        "trainable": client.get("trainable", 0)
    }
