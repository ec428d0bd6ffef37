"""What FLARE costs, on this machine and with mutual TLS: a group call, 200 MB each way, a whole run of digits, a client that is killed."""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unalike.algorithms import ALGORITHMS
from unalike.benches.ray import LARGE, SHAPE, Echo
from unalike.core.client import Client
from unalike.core.federation import Federation
from unalike.cross_silo import flare
from unalike.cross_silo import flare_kits as kits
from unalike.cross_silo import supervisor as keeper
from unalike.cross_silo.remote_run import Tail
from unalike.data import Tensors
from unalike.engines.remote import RemoteEngine, greet
from unalike.models import MLP
from unalike.runs.plan import plan_to_dict
from unalike.tasks import Classification
from unalike.tasks.task import label_names
from unalike.training.loop import Training

IDS = ["c0", "c1", "c2"]


def run(quick: bool = False) -> dict:
    """Milliseconds of a group call; seconds of digits on FLARE and here; seconds from a killed client until the run goes on."""
    with tempfile.TemporaryDirectory() as folder:
        told = call(Path(folder), 30 if quick else 300, LARGE // 20 if quick else LARGE)
    rounds = 1 if quick else 20
    local, _ = digits(rounds, ["--workers", "2"])
    away, _ = digits(rounds, ["--engine", "flare"])
    _, goes_on = digits(max(rounds, 3), ["--engine", "flare"], kill=True)
    return {
        **told,
        "digits_rounds": rounds,
        "digits_local_seconds": local,
        "digits_flare_seconds": away,
        "digits_times": round(away / local, 2),
        "bar_digits_times": 3.0,
        "goes_on_seconds": goes_on,
        "bar_goes_on_seconds": 20.0,
    }


def call(folder: Path, calls: int, large: int) -> dict[str, Any]:
    """A group call to 3 clients, each answering with what it got, from the server's call until it has all replies; and what the server's
    processes, FLARE's and the job's, hold at most, beyond what they held before, while so many bytes go to each and come back."""
    here = kits.Local(folder / "flare", IDS, folder)
    for id in IDS:
        local = here.kits / id / "local"
        (local / "client.yaml").write_text(
            json.dumps({"factory": "unalike.benches.flare:make", "options": {"id": id}})
        )
    resources = here.kits / "localhost" / "local" / "resources.json"
    allowed = json.loads(resources.read_text())
    allowed["class_allow_list"].append("unalike.benches.flare.Timer")
    resources.write_text(json.dumps(allowed))
    out = folder / "told.json"
    session = flare.Session(here)
    try:
        ended = session.submit(
            flare.Job(
                "unalike.benches.flare.Timer",
                {"out": str(out), "calls": calls, "large": large},
                len(IDS),
            )
        )
        began, looked, seen = time.monotonic(), 0.0, []
        job = out.with_suffix(".pid")
        while not out.exists():
            server = [
                *keeper.below(here.processes["localhost"].pid),
                *([int(job.read_text())] if job.exists() else []),
            ]
            seen.append((time.time(), sum(map(held, server))))
            if time.monotonic() - looked > 5.0:
                looked = time.monotonic()
                if (why := ended()) is not None or time.monotonic() - began > 300:
                    raise RuntimeError(f"the job ended with nothing measured: {why}")
            time.sleep(0.05)
    finally:
        session.close()
    measured = json.loads(out.read_text())
    took, (first, last) = sorted(measured["took"]), measured["large"]
    before = [size for at, size in seen if at < first][-1]
    most = max(size for at, size in seen if first <= at <= last) - before
    return {
        "clients": len(IDS),
        "values": list(SHAPE),
        "calls": calls,
        "median_ms": round(statistics.median(took), 2),
        "bar_median_ms": 30.0,
        "p90_ms": round(took[int(0.9 * len(took))], 2),
        "large_bytes_each_way": large,
        "large_seconds": round(last - first, 2),
        "large_memory_in_payloads": round(most / (large * len(IDS)), 2),
        "bar_large_memory_in_payloads": 3.0,
    }


def held(pid: int) -> int:
    """Bytes of memory a process has."""
    try:
        told = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(
        int(line.split()[1]) * 1024 for line in told if line.startswith(("RssAnon", "RssShmem"))
    )


def make(run: dict[str, Any], id: str) -> Client:
    """A client that answers with what it got."""
    ALGORITHMS["echo"] = Echo
    return Client(
        id=id,
        model=partial(MLP, (4,), (4,), 4),
        task=Classification(label_names(2)),
        train=Tensors(torch.zeros(4, 4), torch.arange(4) % 2),
    )


class Timer:
    """The server's half of the job that times calls."""

    def __init__(self, out: str, calls: int, large: int):
        self.out, self.calls, self.large = Path(out), calls, large

    @flare.collab.main
    def main(self) -> None:
        made = self.out.with_suffix(".made")
        made.write_text(str(os.getpid()))  # it is nursed: FLARE's process did not start it
        made.replace(self.out.with_suffix(".pid"))
        line = flare.job_line()
        about: dict[str, Any] = {"name": "bench", "algorithm": "echo", "seed": 0}
        infos, _ = greet(line, about, 60.0)
        training = Training()
        engine = RemoteEngine(
            line,
            "bench",
            "clients",
            infos,
            {"about": about, "terms": plan_to_dict(Echo(), "echo", training, 0, False, None)},
        )
        engine.load(0, 0.0, [])
        fed, values, took = Federation(engine, training), torch.randn(SHAPE), []
        for _ in range(self.calls + 20):
            called = time.perf_counter()
            fed.call("echo", values=values, quorum=1.0)
            took.append(1000 * (time.perf_counter() - called))
        begun = time.time()
        fed.call("echo", values=torch.zeros(self.large // 4), quorum=1.0)
        partial_file = self.out.with_suffix(".partial")
        partial_file.write_text(json.dumps({"took": took[20:], "large": [begun, time.time()]}))
        partial_file.replace(self.out)


def digits(rounds: int, how: list[str], kill: bool = False) -> tuple[float, float | None]:
    """Seconds of a whole run; and, with `kill`, from the death of a client's process in the middle until the run goes on."""
    root = str(Path(__file__).parents[2])
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
        begun = time.time()
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
        took = time.time() - begun
        if not kill:
            return round(took, 1), None
        on = [e["time"] for e in events(folder) if e["event"] == "resume"]
        if not (on and struck):
            raise RuntimeError(
                f"{len(struck)} processes of a client were killed, and the run went on {len(on)} times: nothing to measure"
            )
        return round(took, 1), round(on[0] - struck[0], 1)


def strike(folder: Path, struck: list[float], ended: Callable[[], int | None]) -> None:
    """Kill the job process of the first client in the second round: the first is told before it is saved, and what is not saved is begun
    anew, not gone on with."""
    while ended() is None and not any(e.get("round", 0) > 1 for e in events(folder)):
        time.sleep(0.1)
    for pid in kits.job_processes(folder.resolve() / "flare" / "unalike" / "prod_00" / "ada"):
        os.kill(pid, signal.SIGKILL)
        struck.append(time.time())


def events(folder: Path) -> list[dict[str, Any]]:
    tail = Tail(folder / "events.jsonl")
    tail.at = 0
    return tail.read()
