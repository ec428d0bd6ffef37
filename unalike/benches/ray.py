"""What a call over Ray costs: a group call to 3 clients, each answering with 32 x 256 float32 values, on this machine."""

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from unalike.algorithm import Algorithm, ClientSide, question
from unalike.client import Client
from unalike.data import Tensors
from unalike.engines.ray import RayEngine
from unalike.federation import Federation
from unalike.models import MLP
from unalike.runs.run import make_side
from unalike.tasks import Classification
from unalike.tasks.task import label_names
from unalike.training import Training

SHAPE = (32, 256)


class Echo(Algorithm):
    """Sends back what it got."""

    class Side(ClientSide):
        @question
        def echo(self, values: torch.Tensor) -> torch.Tensor:
            return values + 1


def run(quick: bool = False) -> dict:
    """Milliseconds from the server's call until it has all replies, decoded and counted, after some to warm up."""
    calls = 50 if quick else 500
    training = Training()
    made = [Client(id=f"c{i}", model=partial(MLP, (4,), (4,), 4), task=Classification(label_names(2)),
                   train=Tensors(torch.zeros(4, 4), torch.arange(4) % 2)) for i in range(3)]
    with tempfile.TemporaryDirectory() as folder:
        engine = RayEngine(made, partial(make_side, Echo(), training, 0, False, None), Path(folder) / "clients", actors=3, cpus=0.5)
        try:
            engine.load(0, 0.0, [])
            fed = Federation(engine, training)
            values, took = torch.randn(SHAPE), []
            for _ in range(calls + 20):
                begun = time.perf_counter()
                fed.call("echo", values=values, quorum=1.0)
                took.append(1000 * (time.perf_counter() - begun))
        finally:
            engine.close()
    took = sorted(took[20:])
    return {"clients": 3, "values": list(SHAPE), "calls": calls, "median_ms": round(statistics.median(took), 2), "bar_median_ms": 10.0,
            "p90_ms": round(took[int(0.9 * len(took))], 2)}
