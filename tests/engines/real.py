"""Shared by the programs that try real engines (on_ray.py, on_flare.py, on_flower.py).

All methods take minutes: without UNALIKE_FAULTS only a few that stand for the rest.
"""

import json
import os
import sys
import time
from pathlib import Path

from unalike.algorithms import ALGORITHMS
from unalike.runs.run_folder import commit

REAL = (
    tuple(ALGORITHMS)
    if os.environ.get("UNALIKE_FAULTS")
    else ("fedmuscle", "afmcc", "fedavg", "subflot", "creamfl")
)


def note_faults(engine, report):
    """Add what `make test-faults` measured to results/faults.json, by engine and step."""
    if not os.environ.get("UNALIKE_FAULTS"):
        return
    path = Path(__file__).parents[2] / "results" / "faults.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    when = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "load": round(os.getloadavg()[1], 1),
    }
    plain = lambda fact: round(fact, 2) if isinstance(fact, float) else fact
    for step, facts in report.items():
        known.setdefault(engine, {})[step] = when | {
            key: plain(fact) for key, fact in facts.items()
        }
    path.write_text(json.dumps(known, indent=1) + "\n")


def steps(named):
    """The main function: `python PROGRAM FOLDER STEP...`.

    Each step has a folder of its own, where one that was killed continues. What steps return is in
    FOLDER/report.json, also if a later one fails.
    """
    where, report = Path(sys.argv[1]), {}
    for step in sys.argv[2:]:
        start = time.time()
        report[step] = {
            **named[step](where / step),
            "seconds_in_all": round(time.time() - start, 1),
        }
        (where / "report.json").write_text(json.dumps(report))
