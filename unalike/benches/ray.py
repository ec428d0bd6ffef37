"""What a call over Ray costs on this machine: a group call to 3 clients, each answering with 32 x 256 float32 values.

And the server's memory while 200 MB go to each of them and come back.
"""

import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from unalike.core.algorithm import Algorithm, ClientProgram
from unalike.core.client import Client
from unalike.core.federation import Federation
from unalike.core.operations import query
from unalike.data import Tensors
from unalike.engines.ray import RayEngine
from unalike.models import MLP
from unalike.runs.run import build_program
from unalike.tasks import Classification
from unalike.tasks.task import label_names
from unalike.training.loop import Training

SHAPE = (32, 256)
LARGE = 200 * 10**6  # bytes


class Echo(Algorithm):
    """Sends back what it got."""

    class Program(ClientProgram):
        @query
        def echo(self, values: torch.Tensor) -> torch.Tensor:
            return values + 1


def run(quick: bool = False) -> dict:
    """Milliseconds from the server's call until it has all replies, decoded and counted, after some to warm up."""
    calls = 50 if quick else 500
    training = Training()
    made = [
        Client(
            id=f"c{i}",
            model=partial(MLP, (4,), (4,), 4),
            task=Classification(label_names(2)),
            train=Tensors(torch.zeros(4, 4), torch.arange(4) % 2),
        )
        for i in range(3)
    ]
    with tempfile.TemporaryDirectory() as folder:
        engine = RayEngine(
            made,
            partial(build_program, Echo(), training, 0, False, None),
            Path(folder) / "clients",
            actors=3,
            cpus=0.5,
        )
        try:
            engine.load(0, 0.0, [])
            fed = Federation(engine, training)
            values, took = torch.randn(SHAPE), []
            for _ in range(calls + 20):
                begun = time.perf_counter()
                fed.call("echo", values=values, quorum=1.0)
                took.append(1000 * (time.perf_counter() - begun))
            large = memory(
                lambda: fed.call(
                    "echo", values=torch.zeros((LARGE // 20 if quick else LARGE) // 4), quorum=1.0
                )
            )
        finally:
            engine.close()
    took = sorted(took[20:])
    return {
        "clients": 3,
        "values": list(SHAPE),
        "calls": calls,
        "median_ms": round(statistics.median(took), 2),
        "bar_median_ms": 10.0,
        "p90_ms": round(took[int(0.9 * len(took))], 2),
        "large_bytes_each_way": LARGE // 20 if quick else LARGE,
        **large,
    }


def memory(work: Callable[[], dict]) -> dict[str, float]:
    """What the process held at most while it worked, beyond what it held before, in payloads of all clients: its own memory, and what of
    Ray's shared memory it had opened."""

    def held() -> tuple[int, int]:
        told = {
            words[0]: int(words[1]) * 1024
            for line in Path("/proc/self/status").read_text().splitlines()
            if (words := line.replace(":", "").split())[0] in ("RssAnon", "RssShmem", "RssFile")
        }
        return told["RssAnon"], told["RssShmem"]

    before, most, done = held(), [0, 0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            most[:] = [
                max(known, now - then)
                for known, now, then in zip(most, held(), before, strict=True)
            ]

    watcher = threading.Thread(target=watch)
    watcher.start()
    begun = time.perf_counter()
    replies = work()
    took = time.perf_counter() - begun
    done.set()
    watcher.join()
    payload = sum(reply.numel() * reply.element_size() for reply in replies.values())
    return {
        "large_seconds": round(took, 2),
        "large_own_memory_in_payloads": round(most[0] / payload, 2),
        "large_memory_in_payloads": round(sum(most) / payload, 2),
        "bar_large_memory_in_payloads": 3.0,
    }
