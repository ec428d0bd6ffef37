"""Seconds of a FedMuscle round at full size, six clients and 5000 public images, and of its parts. All is random."""

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unalike.algorithms import fedmuscle
from unalike.benches import Study
from unalike.core.client import Client
from unalike.core.federation import Federation, FederationConfig
from unalike.data import Tensors
from unalike.engines.local import LocalEngine
from unalike.models import build_encoder
from unalike.tasks import Classification
from unalike.tasks.task import label_names
from unalike.training.loop import Training

LABELLED = (200, 200, 200, 100, 100, 50)  # as in muscle-vision
LITE = (1, 0, 2, 1, 0, 0)
SKIPPED = 3  # rounds: images go through the trunk, and the last batch comes for the third time


def run(study: Study) -> dict:
    """Parts are timed in runs of their own, which wait for the GPU around each. `..._played`: how many shapes of the loss, and of passes of
    all clients, were recorded."""
    told: dict[str, Any] = {}
    for how in ("recorded", "as written"):
        if study.only and how not in study.only:
            continue
        whole, _, played = seconds(study, how)
        waited, parts, too = seconds(study, how, apart=True)
        contrast = fedmuscle.stacked("muscle", 0, temperature=0.2, lower_temperature=0.15)
        told[how] = {
            "seconds_a_round": whole,
            "seconds_waited": waited,
            "loss_share": parts["loss"] / waited,
            "loss_played": sum(map(bool, contrast.kept.values())),
            "passes_played": min(played, too),
            **{f"{name}_seconds": parts[name] for name in parts},
        }
    return {"rows": told, "seconds_a_round_bar": 4.0, "loss_share_bar": 0.03}


def seconds(study: Study, how: str, apart: bool = False) -> tuple[float, dict[str, float], int]:
    """Seconds of a round, of the calls and the loss in it where they are timed apart, and how many shapes of passes were recorded."""
    program, public, skipped, rounds = (
        (32, 64, 1, 2) if study.quick else (96, 5000, SKIPPED, SKIPPED + 3)
    )
    draw = torch.Generator().manual_seed(0)
    images = lambda count: torch.randint(
        256, (count, 3, program, program), dtype=torch.uint8, generator=draw
    )
    shared, clients = Tensors(images(public)), []
    for i, (rows, lite) in enumerate(zip(LABELLED, LITE, strict=True)):
        rows = rows // 10 if study.quick else rows
        model = partial(
            build_encoder,
            "efficientnet",
            (3, program, program),
            {"lite": lite, "weights": "none", "adapters": 16},
        )
        held = Tensors(images(rows), torch.arange(rows) % 10)
        clients.append(
            Client(
                f"c{i}",
                model,
                Classification(label_names(10)),
                held,
                public=shared,
                device=study.device,
            )
        )
    algorithm, training, records = (
        fedmuscle.FedMuscle(),
        Training(rounds=rounds, epochs=6),
        fedmuscle.RECORDS,
    )
    parts: dict[str, float] = defaultdict(float)
    moments: list[tuple[float, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        engine = LocalEngine(
            clients, lambda client: algorithm.Program(client, algorithm, training, 0), Path(folder)
        )
        fed: Any = Federation(engine, training, FederationConfig(evaluations=1), 0)
        if apart:
            fed.call = timed(fed.call, parts)
            vars(algorithm)["pulls"] = timed(algorithm.pulls, parts, "loss")
        try:
            fedmuscle.RECORDS = how == "recorded"
            fedmuscle.stacked.cache_clear()
            for number in algorithm.serve(fed):
                fed.finished = number
                wait()
                moments.append((time.perf_counter(), dict(parts)))
            assert engine.host is not None
            played = sum(
                map(
                    bool,
                    (
                        made
                        for program in engine.host.programs.values()
                        for made in program.passes.kept.values()
                    ),
                )
            )
        finally:
            fedmuscle.RECORDS = records
            engine.close()
    (begun, before), (ended, after), count = moments[skipped - 1], moments[-1], rounds - skipped
    return (
        (ended - begun) / count,
        {name: (after[name] - before.get(name, 0.0)) / count for name in after},
        played,
    )


def timed(function: Callable, parts: dict[str, float], name: str | None = None) -> Callable:
    """The same, its seconds counted under this name, or that of its first argument."""

    def count(*given: Any, **named: Any) -> Any:
        wait()
        begun = time.perf_counter()
        told = function(*given, **named)
        wait()
        parts[name or given[0]] += time.perf_counter() - begun
        return told

    return count


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
