"""Benchmark of FLARE: calls, and runs of `digits`."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.engines import LARGE
from benchmarks.study import benchmark
from unalike.base.events import EventTail


@benchmark("flare")
def bench_flare(quick: bool = False) -> dict:
    """FLARE on this machine with mutual TLS: group calls, 200 MB, digits, a killed client.

    Milliseconds of a group call and seconds with 200 MB each way; seconds of a digits run on
    FLARE and on the local engine; seconds from a killed client until the run continues.
    """
    from benchmarks.flare_calls import call

    with tempfile.TemporaryDirectory() as folder:
        calls = call(Path(folder), 30 if quick else 300, LARGE // 20 if quick else LARGE)
    rounds = 1 if quick else 20
    local, _ = digits(rounds, ["--workers", "2"])
    away, _ = digits(rounds, ["--engine", "flare"])
    _, goes_on = digits(max(rounds, 3), ["--engine", "flare"], kill=True)
    return {
        **calls,
        "digits_rounds": rounds,
        "digits_local_seconds": local,
        "digits_flare_seconds": away,
        "digits_times": round(away / local, 2),
        "bar_digits_times": 3.0,
        "goes_on_seconds": goes_on,
        "bar_goes_on_seconds": 20.0,
    }


def digits(rounds: int, how: list[str], kill: bool = False) -> tuple[float, float | None]:
    """Run digits in a process of its own.

    Returns: seconds of the run; and with `kill`, seconds from the death of a client's process in
        the middle of the run until the run continues.
    """
    root = str(Path(__file__).parents[1])
    around = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        command = [
            sys.executable,
            "-m",
            "unalike.cli",
            "run",
            "digits",
            "--no-alone",
            "--json",
            "--set",
            f"rounds={rounds}",
            "--out",
            str(folder),
            *how,
        ]
        start = time.time()
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=around
        )
        struck: list[float] = []
        if kill:
            threading.Thread(
                target=strike, args=(folder, struck, process.poll), daemon=True
            ).start()
        _, problems = process.communicate()
        if process.returncode:
            raise RuntimeError(problems[-2000:])
        took = time.time() - start
        if not kill:
            return round(took, 1), None
        resumed = [event["time"] for event in events(folder) if event["event"] == "resume"]
        if not (resumed and struck):
            raise RuntimeError(
                "expected a killed client process and a run that resumes; "
                f"got {len(struck)} killed and {len(resumed)} resumes: nothing to measure"
            )
        return round(took, 1), round(resumed[0] - struck[0], 1)


def strike(folder: Path, struck: list[float], ended: Callable[[], int | None]) -> None:
    """Kill the job process of the first client in the second round.

    Not in the first: a round is logged before it is saved, and a run with no saved round starts
    anew instead of resuming.
    """
    from unalike.cross_silo.flare_kits import job_processes

    while ended() is None and not any(event.get("round", 0) > 1 for event in events(folder)):
        time.sleep(0.1)
    for pid in job_processes(folder.resolve() / "flare" / "unalike" / "prod_00" / "ada"):
        os.kill(pid, signal.SIGKILL)
        struck.append(time.time())


def events(folder: Path) -> list[dict[str, Any]]:
    tail = EventTail(folder / "events.jsonl")
    tail.offset = 0
    return tail.read()
