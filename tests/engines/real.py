"""What programs that try real engines share: which methods go through them, and how they are begun and tell what they saw.

All methods take minutes, so without UNALIKE_FAULTS those that stand for the rest.
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


def noted(engine, told):
    """What was seen in `make test-faults`, in results/faults.json, by engine and step: numbers and whether all was as it should be."""
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
    for step, facts in told.items():
        known.setdefault(engine, {})[step] = when | {
            key: plain(fact) for key, fact in facts.items()
        }
    path.write_text(json.dumps(known, indent=1) + "\n")


def steps(named):
    """`python PROGRAM FOLDER STEP...`: each step in a folder of its own, where one that was killed goes on; what they told is in told.json,
    also if a later one fails."""
    where, told = Path(sys.argv[1]), {}
    for step in sys.argv[2:]:
        begun = time.time()
        told[step] = {**named[step](where / step), "seconds_in_all": round(time.time() - begun, 1)}
        (where / "told.json").write_text(json.dumps(told))
