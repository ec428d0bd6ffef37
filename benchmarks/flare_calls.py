"""Times calls over FLARE. Needs the extra `flare`."""

import json
import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.engines import RAY_SHAPE, Echo
from unalike.algorithms import ALGORITHMS
from unalike.core.client import Client
from unalike.core.federation import Federation
from unalike.cross_silo import flare, supervisor
from unalike.cross_silo import flare_kits as kits
from unalike.data import Tensors
from unalike.engines.remote import RemoteEngine, handshake
from unalike.models import MLP
from unalike.runs.plan import plan_to_dict
from unalike.tasks import Classification
from unalike.tasks.task import label_names
from unalike.training.loop import Training

IDS = ["c0", "c1", "c2"]


def call(folder: Path, calls: int, large: int) -> dict[str, Any]:
    """Time group calls to 3 clients that return the values they were sent.

    From the server's call until it has all replies. Also the peak memory of the server's
    processes (FLARE's and the job's), above that before, while `large` bytes go to each client
    and come back.
    """
    here = kits.LocalFlareFederation(folder / "flare", IDS, folder)
    for id in IDS:
        local = here.kits / id / "local"
        (local / "client.yaml").write_text(
            json.dumps({"factory": "benchmarks.flare_calls:make", "options": {"id": id}})
        )
    resources = here.kits / "localhost" / "local" / "resources.json"
    allowed = json.loads(resources.read_text())
    allowed["class_allow_list"].append("benchmarks.flare_calls.Timer")
    resources.write_text(json.dumps(allowed))
    out = folder / "told.json"
    session = flare.Session(here)
    try:
        ended = session.submit(
            flare.Job(
                "benchmarks.flare_calls.Timer",
                {"out": str(out), "calls": calls, "large": large},
                len(IDS),
            )
        )
        began, looked, seen = time.monotonic(), 0.0, []
        job = out.with_suffix(".pid")
        while not out.exists():
            server = [
                *supervisor.descendants(here.processes["localhost"].pid),
                *([int(job.read_text())] if job.exists() else []),
            ]
            seen.append((time.time(), sum(map(resident_bytes, server))))
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
        "values": list(RAY_SHAPE),
        "calls": calls,
        "median_ms": round(statistics.median(took), 2),
        "bar_median_ms": 30.0,
        "p90_ms": round(took[int(0.9 * len(took))], 2),
        "large_bytes_each_way": large,
        "large_seconds": round(last - first, 2),
        "large_memory_in_payloads": round(most / (large * len(IDS)), 2),
        "bar_large_memory_in_payloads": 3.0,
    }


def resident_bytes(pid: int) -> int:
    """Resident memory of a process in bytes; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    sizes = [line.split()[1] for line in lines if line.startswith(("RssAnon", "RssShmem"))]
    return 1024 * sum(map(int, sizes))


def make(run: dict[str, Any], id: str) -> Client:
    """A client that returns the values it is sent."""
    ALGORITHMS["echo"] = Echo
    return Client(
        id=id,
        model=partial(MLP, (4,), (4,), 4),
        task=Classification(label_names(2)),
        train=Tensors(torch.zeros(4, 4), torch.arange(4) % 2),
    )


class Timer:
    """The server part of the FLARE job that times calls."""

    def __init__(self, out: str, calls: int, large: int):
        self.out, self.calls, self.large = Path(out), calls, large

    @flare.collab.main
    def main(self) -> None:
        # A supervisor starts this process, so it is no descendant of FLARE's server process.
        pid_file = self.out.with_suffix(".made")
        pid_file.write_text(str(os.getpid()))
        pid_file.replace(self.out.with_suffix(".pid"))
        line = flare.job_transport()
        about: dict[str, Any] = {"name": "bench", "algorithm": "echo", "seed": 0}
        infos, _ = handshake(line, about, 60.0)
        training = Training()
        engine = RemoteEngine(
            line,
            "bench",
            "clients",
            infos,
            {"about": about, "terms": plan_to_dict(Echo(), "echo", training, 0, False, None)},
        )
        engine.load(0, 0.0, [])
        fed, values, took = Federation(engine, training), torch.randn(RAY_SHAPE), []
        for _ in range(self.calls + 20):
            called = time.perf_counter()
            fed.call("echo", values=values, quorum=1.0)
            took.append(1000 * (time.perf_counter() - called))
        start = time.time()
        fed.call("echo", values=torch.zeros(self.large // 4), quorum=1.0)
        partial_file = self.out.with_suffix(".partial")
        partial_file.write_text(json.dumps({"took": took[20:], "large": [start, time.time()]}))
        partial_file.replace(self.out)
