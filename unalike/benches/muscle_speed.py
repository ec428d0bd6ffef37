"""Seconds of a FedMuscle round at full size, six clients and 5000 public images, and the share of its loss. All is random."""

import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unalike.algorithms import fedmuscle
from unalike.benches import Study
from unalike.client import Client
from unalike.data import Tensors
from unalike.engines.local import LocalEngine
from unalike.federation import Federation, Terms
from unalike.models import build_encoder
from unalike.tasks import Classification
from unalike.tasks.task import label_names
from unalike.training import Training

LABELLED = (200, 200, 200, 100, 100, 50)        # as in muscle-vision
LITE = (1, 0, 2, 1, 0, 0)


class Timed(fedmuscle.FedMuscle):
    """The same, with the time its loss and gradient take; a GPU is waited for before and after."""

    loss_seconds = 0.0

    def pulls(self, fed: Federation, views: dict[str, Tensor], drawn: dict[str, list[str]]) -> tuple[dict, dict]:
        wait(views)
        begun = time.perf_counter()
        told = super().pulls(fed, views, drawn)
        wait(told[0])
        self.loss_seconds += time.perf_counter() - begun
        return told


def run(study: Study) -> dict:
    """The first round is left out: there images go through the trunk and passes are recorded. The loss is timed in runs of its own."""
    told: dict[str, Any] = {}
    for how in ("recorded", "as written"):
        whole, _ = seconds(study, fedmuscle.FedMuscle(), how)
        waited, loss = seconds(study, Timed(), how)
        told[how] = {"seconds_a_round": whole, "loss_seconds": loss, "loss_share": loss / waited}
    return {"rows": told, "seconds_a_round_bar": 4.0, "loss_share_bar": 0.03}


def seconds(study: Study, algorithm: fedmuscle.FedMuscle, how: str) -> tuple[float, float]:
    """Seconds of a round, and of the loss in it."""
    side, public, rounds = (32, 64, 2) if study.quick else (96, 5000, 4)
    draw = torch.Generator().manual_seed(0)
    images = lambda count: torch.randint(256, (count, 3, side, side), dtype=torch.uint8, generator=draw)
    shared, clients = Tensors(images(public)), []
    for i, (rows, lite) in enumerate(zip(LABELLED, LITE, strict=True)):
        rows = rows // 10 if study.quick else rows
        model = partial(build_encoder, "efficientnet", (3, side, side), {"lite": lite, "weights": "none", "adapters": 16})
        held = Tensors(images(rows), torch.arange(rows) % 10)
        clients.append(Client(f"c{i}", model, Classification(label_names(10)), held, public=shared, device=study.device))
    training, records = Training(rounds=rounds, epochs=6), fedmuscle.RECORDS
    with tempfile.TemporaryDirectory() as folder:
        engine = LocalEngine(clients, lambda client: algorithm.Side(client, algorithm, training, 0), Path(folder))
        fed, moments = Federation(engine, training, Terms(evaluations=1), 0), []
        try:
            fedmuscle.RECORDS = how == "recorded"
            fedmuscle.stacked.cache_clear()
            for number in algorithm.serve(fed):
                fed.finished = number
                moments.append((time.perf_counter(), getattr(algorithm, "loss_seconds", 0.0)))
        finally:
            fedmuscle.RECORDS = records
            engine.close()
    whole, loss = ((last - first) / (rounds - 1) for first, last in zip(moments[0], moments[-1], strict=True))
    return whole, loss


def wait(told: dict[str, Tensor]) -> None:
    if any(each.is_cuda for each in told.values()):
        torch.cuda.synchronize()
