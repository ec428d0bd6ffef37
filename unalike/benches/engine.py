"""What the engine costs: FedAvg with a small CNN, 100 clients, 10 a round, against a hand-written torch loop doing the same work."""

import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

from unalike.algorithms.fedavg import FedAvg
from unalike.base.randomness import stream
from unalike.core.client import Client
from unalike.core.federation import Federation
from unalike.core.participation import FederationConfig
from unalike.data import Tensors
from unalike.models import CNN
from unalike.runs.run import Run
from unalike.runs.run_folder import Folder
from unalike.tasks import Classification
from unalike.tasks.task import label_names
from unalike.training.loop import Training, batches, build_optimizer

SHAPE, CLIENTS, SAMPLES = (1, 28, 28), 100, 64
TRAINING = Training(rounds=8, epochs=2, batch_size=16, optimizer="sgd", lr=0.05, weight_decay=0.0)


def run(quick: bool = False) -> dict:
    """Medians of repeated, interleaved runs; checkpoints after every round are part of the engine's time."""
    repeats, training = (1, TRAINING.model_copy(update={"rounds": 2})) if quick else (5, TRAINING)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = clients()
    times: dict[str, list[float]] = {"by hand": [], "workers=0": [], "workers=2": []}
    by_hand(made, training)  # warm up
    for _ in range(repeats):
        times["by hand"].append(timed(partial(by_hand, made, training)))
        for workers in (0, 2):
            times[f"workers={workers}"].append(engine(made, training, workers))
    torch.set_num_threads(threads)
    median = {name: sorted(values)[len(values) // 2] for name, values in times.items()}
    ratios = sorted(
        ours / hand for ours, hand in zip(times["workers=0"], times["by hand"], strict=True)
    )
    faster = sorted(
        hand / ours for ours, hand in zip(times["workers=2"], times["by hand"], strict=True)
    )
    return {
        "seconds_by_hand": median["by hand"],
        "seconds_workers_0": median["workers=0"],
        "seconds_workers_2": median["workers=2"],
        "overhead_workers_0": ratios[len(ratios) // 2],
        "bar_overhead_workers_0": 1.10,
        "speedup_workers_2": faster[len(faster) // 2],
        "bar_speedup_workers_2": 1.4,
    }


def clients() -> list[Client]:
    draw = stream(0, "bench")
    return [
        Client(
            id=f"c{i}",
            model=partial(CNN, SHAPE, (8, 16), 32),
            task=Classification(label_names(10)),
            train=Tensors(
                torch.randn(SAMPLES, *SHAPE, generator=draw),
                torch.randint(10, (SAMPLES,), generator=draw),
            ),
        )
        for i in range(CLIENTS)
    ]


def engine(made: list[Client], training: Training, workers: int) -> float:
    """Seconds of the rounds alone: starting processes and building models come before."""
    folder = Path(tempfile.mkdtemp())
    federation = FederationConfig(participation=0.1)
    run = Run(
        Folder(folder),
        FedAvg(),
        made,
        training,
        federation,
        name="bench",
        method="fedavg",
        seed=0,
        workers=workers,
        alone=False,
    )
    carrier = run.engine(run.folder.clients)
    try:
        fed = Federation(carrier, training, federation, 0)
        fed.call("describe", clients=fed.clients)
        return timed(lambda: run.serve(fed, lambda: 0.0))
    finally:
        carrier.close()
        shutil.rmtree(folder)


def by_hand(made: list[Client], training: Training) -> None:
    """The plain loop: load, train, keep a copy, average."""
    model = nn.Sequential(CNN(SHAPE, (8, 16), 32), Classification(label_names(10)).head(32))
    shared = {name: t.clone() for name, t in model.state_dict().items()}
    for number in range(1, training.rounds + 1):
        picks = torch.randperm(CLIENTS, generator=stream(0, "participation", number))[
            : CLIENTS // 10
        ].tolist()
        states = []
        for i in picks:
            model.load_state_dict(shared)
            model.train()
            optimizer = build_optimizer(list(model.parameters()), training)
            x, y = made[i].train.x, made[i].train.y
            for epoch in range(training.epochs):
                for rows in batches(
                    SAMPLES, training.batch_size, stream(0, "order", made[i].id, number, epoch)
                ):
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
                    optimizer.step()
            states.append({name: t.clone() for name, t in model.state_dict().items()})
        shared = {name: torch.stack([s[name] for s in states]).mean(0) for name in shared}


def timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
