"""How long AFMCC takes on each dataset: a whole run, measured at the end, in a process that has run before (the paper's Table 5)."""

import tempfile
from pathlib import Path

from unalike.benches import Study
from unalike.benches.afmcc import scenario
from unalike.runs import run_scenario
from unalike.scenarios import load

BARS = {
    "bdgp": (52.9, 5.0),
    "mnist-usps": (7.6 * 60, 30.0),
    "multi-fashion": (2.0 * 3600, 180.0),
}  # the paper's seconds, and ours


def run(study: Study) -> dict:
    """Seconds; the paper's are on another GPU."""
    rows = {}
    for name in BARS if not study.quick else ["digits"]:
        if study.only and name not in study.only:
            continue
        once(study, name, ["rounds=3", "starts=2"])  # libraries are loaded, kernels chosen
        paper, bar = BARS.get(name, (None, None))
        results = once(study, name, ["rounds=3"] if study.quick else [])
        rows[name] = {
            "seconds": results["seconds"],
            "bar": bar,
            "paper_seconds": paper,
            "acc": results["metrics"]["acc"],
        }
    return {"rows": rows}


def once(study: Study, name: str, settings: list[str]) -> dict:
    made, algorithm = load(
        scenario(study, name),
        settings=[
            "alone=false",
            "evaluations=1",
            "checkpoint=1000",
            f"device={study.device}",
            *settings,
            *study.settings,
        ],
        seed=(study.seeds or (0,))[0],
    )
    with tempfile.TemporaryDirectory() as folder:
        return run_scenario(made, algorithm, out=Path(folder) / "run", data_dir=study.data_dir)[0]
