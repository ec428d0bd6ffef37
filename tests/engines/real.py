"""What programs that try real engines share: which methods go through them, and how they are begun and tell what they saw.

All methods take minutes, so without UNALIKE_FAULTS those that stand for the rest.
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path

from unalike.algorithms import ALGORITHMS

REAL = tuple(ALGORITHMS) if os.environ.get("UNALIKE_FAULTS") else ("fedmuscle", "afmcc", "fedavg", "subflot", "creamfl")


def steps(named):
    """`python PROGRAM FOLDER STEP...`: each step in a folder of its own; what they told is in told.json, also if a later one fails."""
    where, told = Path(sys.argv[1]), {}
    for step in sys.argv[2:]:
        begun = time.time()
        shutil.rmtree(where / step, ignore_errors=True)
        told[step] = {**named[step](where / step), "seconds_in_all": round(time.time() - begun, 1)}
        (where / "told.json").write_text(json.dumps(told))
