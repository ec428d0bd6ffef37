"""Memory: the demo's peak, and a thousand clients of whom ten take part in a round and the idle ones lie on disk."""

import json
import subprocess
import sys
import tempfile

DIGITS = """
import resource, sys
from unalike.scenarios import load
from unalike.runs import run_scenario
scenario, algorithm = load("digits", settings=["rounds={rounds}"])
run_scenario(scenario, algorithm, out=sys.argv[1] + "/run")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""

THOUSAND = """
import json, sys
from functools import partial
import torch
import unalike
from unalike.models import MLP
from unalike.base.randomness import stream
from unalike.runs.run_folder import Folder
from unalike.runs.run import Run

def resident():
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmRSS"))

draw = stream(0, "bench")
x, y = torch.randn(1000, 20, 64, generator=draw), torch.randint(10, (1000, 20), generator=draw)
clients = [unalike.Client(id=f"c{{i}}", model=partial(MLP, (64,), (128,), 64), task=unalike.Classification(10), train=(x[i], y[i]))
           for i in range(1000)]
seen = []
def watch(event, **facts):
    if event == "round":
        seen.append(resident())
rounds = {rounds}
training = unalike.Training(rounds=rounds, epochs=1, batch=10)
unalike.run(unalike.{method}(), clients, training=training, terms=unalike.Terms(participation=0.01), out=sys.argv[1] + "/run",
            alone=False, alive=32, watch=watch)
print(json.dumps([seen[rounds // 4], seen[-1], max(seen)]))
"""


def run(quick: bool = False) -> dict:
    """Megabytes, each measured in a process of its own."""
    rounds = 20 if quick else 400
    local, average = (
        json.loads(alone(THOUSAND.format(rounds=rounds, method=method)))
        for method in ("Local", "FedAvg")
    )
    return {
        "digits_peak_mb": float(alone(DIGITS.format(rounds=2 if quick else 8))),
        "bar_digits_peak_mb": 1000,
        "thousand_personal_quarter_mb": local[0],
        "thousand_personal_end_mb": local[1],
        "thousand_personal_peak_mb": local[2],
        "thousand_fedavg_quarter_mb": average[0],
        "thousand_fedavg_end_mb": average[1],
        "thousand_fedavg_peak_mb": average[2],
        "bar_thousand_peak_mb": 2000,
    }


def alone(program: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", program, folder], capture_output=True, text=True
        )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return done.stdout.strip().splitlines()[-1]
