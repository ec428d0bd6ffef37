"""What seeing a run costs: trackers and the live page against a run without them."""

import ctypes
import json
import os
import re
import resource
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

from benchmarks.study import benchmark

SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of Linux: orphans of a run become children of the bench
EVERY = 0.02  # seconds between looks at a store
TRACKED = ["--track", "tensorboard", "--watch"]
BAR_COST, BAR_FIRST_POINT = 5.0, 5.0  # percent, seconds


@benchmark("tracking")
def bench_tracking(quick: bool = False) -> dict:
    """What `--track tensorboard --watch` costs on `digits`, and when the first points are seen.

    Plain and tracked runs in turns; CPU time is that of all processes of a run, with the server of
    its page, which a reader has open. First points: seconds after the end of round 1 at which
    TensorBoard's file, MLflow's new store and the page have it. Linux only.
    """
    ctypes.CDLL(None).prctl(SUBREAPER, 1)
    pairs, rounds = (1, 2) if quick else (6, 12)
    run = ["run", "digits", "--set", f"rounds={rounds}"]
    plain: list[tuple[float, float]] = []
    tracked: list[tuple[float, float]] = []
    for pair in range(pairs):
        order: list[tuple[list, list[str]]] = [(plain, []), (tracked, TRACKED)]
        for kept, options in order if pair % 2 else order[::-1]:
            kept.append(time_run([*run, *options])[:2])
    first = {}
    for tracker in ("tensorboard", "mlflow"):
        first[tracker] = time_run([*run, "--track", tracker, "--watch"])[2]
    result: dict = {"rounds": rounds, "pairs": pairs}
    for place, unit in enumerate(("wall", "cpu")):
        before, after = ([numbers[place] for numbers in kept] for kept in (plain, tracked))
        costs = [100 * (b / a - 1) for a, b in zip(before, after, strict=True)]
        result |= {
            f"seconds_{unit}_plain": [round(value, 2) for value in before],
            f"seconds_{unit}_tracked": [round(value, 2) for value in after],
            f"cost_{unit}_percent": round(statistics.median(costs), 1),
            f"cost_{unit}_percent_of_means": round(100 * (sum(after) / sum(before) - 1), 1),
        }
    return {
        **result,
        "bar_cost_percent": BAR_COST,
        "first_point_seconds": first,
        "bar_first_point_seconds": BAR_FIRST_POINT,
    }


def time_run(options: list[str]) -> tuple[float, float, dict[str, float]]:
    """Run the command in an empty folder.

    Returns: seconds until it ended, seconds of CPU of all its processes, and seconds from the end
        of round 1 to the first point in each store and on the page.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}"}
        command = [sys.executable, "-m", "unalike", *options, "--out", str(folder / "run")]
        seen: dict[str, float] = {}
        before = cpu_of_children()
        start = time.monotonic()
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as process:
            ended = threading.Event()
            threads = watch_stores(folder, options, seen, ended)
            for line in process.stderr or []:
                shown = re.search(r"The run is shown at (\S+)", line)
                if shown:
                    threads.append(start_thread(look_at_page, shown[1], seen))
            code = process.wait()
        wall = time.monotonic() - start
        ended.set()
        for thread in threads:
            thread.join()
        with suppress(ChildProcessError):
            while True:  # the page's server, which outlives the run by a moment
                os.waitpid(-1, 0)
        if code:
            raise RuntimeError(f"{' '.join(command)} ended with exit code {code}")
        end = end_of_first_round(folder / "run")
        return wall, cpu_of_children() - before, {what: at - end for what, at in seen.items()}


def cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def start_thread(function: Callable, *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


def watch_stores(
    folder: Path, options: list[str], seen: dict[str, float], ended: threading.Event
) -> list[threading.Thread]:
    """Note when each tracker of the run has a first point."""
    looks = {"tensorboard": in_tensorboard, "mlflow": in_mlflow}

    def watch(name: str) -> None:
        while not looks[name](folder):
            if ended.wait(EVERY):
                return
        seen[name] = time.time()

    return [start_thread(watch, name) for name in looks if name in options]


def in_tensorboard(folder: Path) -> bool:
    files = (folder / "run" / "tensorboard").glob("events*")
    return any(b"ada/accuracy" in file.read_bytes() for file in files)


def in_mlflow(folder: Path) -> bool:
    store = folder / "mlflow.db"
    if not store.exists():
        return False
    query = "select count(*) from metrics where key = 'ada/accuracy'"
    try:
        with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as opened:
            return bool(opened.execute(query).fetchone()[0])
    except sqlite3.Error:  # it is being made
        return False


def look_at_page(address: str, seen: dict[str, float]) -> None:
    """Keep the page open until it ends, as a browser does, and note when round 1 is on it."""
    with suppress(OSError):
        urllib.request.urlopen(address, timeout=30).read()
        for line in changes_of(f"{address.rstrip('/')}/events"):
            if "page" not in seen and re.search(r"\b1 of \d+ rounds", line):
                seen["page"] = time.time()


def changes_of(address: str) -> Iterator[str]:
    with urllib.request.urlopen(address, timeout=60) as stream:
        for line in stream:
            yield line.decode()


def end_of_first_round(run: Path) -> float:
    for line in (run / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "round" and event["round"] == 1:
            return event["time"]
    raise RuntimeError("the run has no first round")
