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
from dataclasses import dataclass, field
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
    its page, which a reader has open. On a busy machine such pairs differ by more than the cost, so
    it is also added up from its parts: the page's server, and the tracker's work in a process that
    has loaded all that a run loads. First points: seconds after the end of round 1 at which
    TensorBoard's file, MLflow's new store and the page have it. Linux only.
    """
    ctypes.CDLL(None).prctl(SUBREAPER, 1)
    pairs = 1 if quick else 3
    run = ["run", "digits", *(["--set", "rounds=2"] if quick else [])]
    plain: list[Measured] = []
    tracked: list[Measured] = []
    for pair in range(pairs):
        order: list[tuple[list, list[str]]] = [(plain, []), (tracked, TRACKED)]
        for kept, options in order if pair % 2 else order[::-1]:
            kept.append(time_run([*run, *options]))
    first = {}
    for tracker in ("tensorboard", "mlflow"):
        first[tracker] = time_run([*run, "--track", tracker, "--watch"]).first
    result: dict = {"pairs": pairs}
    for unit in ("wall", "cpu"):
        before, after = ([getattr(one, unit) for one in kept] for kept in (plain, tracked))
        costs = [100 * (b / a - 1) for a, b in zip(before, after, strict=True)]
        result |= {
            f"seconds_{unit}_plain": [round(value, 2) for value in before],
            f"seconds_{unit}_tracked": [round(value, 2) for value in after],
            f"cost_{unit}_percent": round(statistics.median(costs), 1),
            f"cost_{unit}_percent_of_means": round(100 * (sum(after) / sum(before) - 1), 1),
        }
    parts = {
        "page": statistics.median(one.cpu_page for one in tracked),
        "tracker": statistics.median(one.cpu_tracker for one in plain),
    }
    whole = statistics.median(one.cpu for one in plain)
    return {
        **result,
        "seconds_cpu_of_parts": {name: round(seconds, 2) for name, seconds in parts.items()},
        "cost_cpu_percent_of_parts": round(100 * sum(parts.values()) / whole, 1),
        "bar_cost_percent": BAR_COST,
        "first_point_seconds": first,
        "bar_first_point_seconds": BAR_FIRST_POINT,
    }


@dataclass(frozen=True)
class Measured:
    """One run.

    Attributes:
        wall: seconds until it ended.
        cpu: seconds of CPU of all its processes.
        cpu_page: those of its page's server.
        cpu_tracker: those that TensorBoard takes to write the run, where nothing tracked it.
        first: seconds from the end of round 1 to the first point in each store and on the page.
    """

    wall: float
    cpu: float
    cpu_page: float = 0.0
    cpu_tracker: float = 0.0
    first: dict[str, float] = field(default_factory=dict)


def time_run(options: list[str]) -> Measured:
    """Run the command in an empty folder."""
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
        page = 0.0
        with suppress(ChildProcessError):
            while True:  # the page's server, which outlives the run by a moment
                used = os.wait4(-1, 0)[2]
                page += used.ru_utime + used.ru_stime
        if code:
            raise RuntimeError(f"{' '.join(command)} ended with exit code {code}")
        end = end_of_first_round(folder / "run")
        first = {what: at - end for what, at in seen.items()}
        cpu = cpu_of_children() - before
        tracker = 0.0 if "--track" in options else cpu_of_tracker(folder / "run")
        return Measured(wall, cpu, page, tracker, first)


def cpu_of_tracker(run: Path) -> float:
    """Seconds of CPU that TensorBoard takes to write a run, its own import included."""
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "import matplotlib, unalike.runs.api\n"
        "from unalike.tracking.follow import replay\n"
        "before = time.process_time()\n"
        "replay(Path(sys.argv[1]), ['tensorboard'], print, lambda: False)\n"
        "print(time.process_time() - before)\n"
    )
    command = [sys.executable, "-c", program, str(run)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


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
