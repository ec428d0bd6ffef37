"""Runs on real engines whose processes are killed at random moments.

For the tests of each engine, and for `unalike bench kills`, which counts them all. Most kills are
made by the step `storm` of on_ray.py, on_flare.py and on_flower.py; this kills these programs.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
KILLS = "UNALIKE_KILLS"  # environment variable: kills that a storm makes
# Ray uses the machine's address: in a namespace of its own only loopback is up.
ALONE = ["unshare", "-rn", "sh", "-c", 'ip link set lo up; exec "$@"', "sh"]
# What a killed program is called, the share of kills that it gets, seconds after a round, its run.
PROGRAMS = {
    "ray": ("server", 0.2, 6.0, "cut"),
    "flare": ("program", 0.1, 10.0, "away"),
    "flower": ("program", 0.0, 0.0, "away"),
}


def planned_kills():
    return int(os.environ.get(KILLS, "50"))


def begin_on_ray(folder, *steps):
    """The program that tries Ray, alone on a network of its own."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE.parent)]),
        "OMP_NUM_THREADS": "1",
        "RAY_memory_monitor_refresh_ms": "0",
    }  # or Ray kills actors because of what other programs hold
    return subprocess.Popen(
        [*ALONE, sys.executable, str(HERE / "on_ray.py"), str(folder), *steps],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )


def kill_programs(begin, storm, run, victim, count, seconds):
    """Kill a program `count` times, each at random after it has finished another round."""
    events = storm / run / "events.jsonl"
    rounds = lambda: events.read_text().count('"event": "round"') if events.exists() else 0
    for _ in range(count):
        process, before = begin(), rounds()
        while process.poll() is None and rounds() == before:
            time.sleep(0.1)
        time.sleep(random.uniform(0, seconds))
        assert process.poll() is None, process.communicate()[1][-3000:]
        process.send_signal(signal.SIGKILL)
        process.communicate()
        with (storm / "kills").open("a") as file:
            file.write(f"kill {victim}\n")


def run_storm(engine, folder, kills):
    """Kill processes of a run on an engine until there were so many deaths.

    Returns: what the step `storm` tells, with "killed" by victim, "same" and "left" processes.
    """
    import organisations

    os.environ[KILLS] = str(kills)
    victim, share, seconds, run = PROGRAMS[engine]
    program = f"on_{engine}.py"
    begin = lambda: organisations.begin(folder, "storm", program=program)
    if engine == "ray":
        begin = lambda: begin_on_ray(folder, "storm")
    kill_programs(begin, folder / "storm", run, victim, int(share * kills), seconds)
    outcome = organisations.finish(begin(), folder, 7200, program)["storm"]
    same = outcome.get("same", outcome.get("apart", 1.0) <= 1e-9 and outcome.get("same_ledger"))
    return {"left": [], **outcome, "same": bool(same)}
