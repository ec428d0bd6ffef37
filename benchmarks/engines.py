"""Benchmarks of the engines: overhead, memory, bytes, Ray."""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

from benchmarks.study import benchmark
from unalike.algorithms.fedavg import FedAvg
from unalike.algorithms.fedmuscle import FedMuscle
from unalike.base.message import encoded_size
from unalike.base.randomness import stream
from unalike.core.algorithm import Algorithm
from unalike.core.client import Client
from unalike.core.federation import Federation
from unalike.core.operations import query
from unalike.core.participation import FederationConfig
from unalike.core.program import ClientProgram
from unalike.core.runtime import build_runtime
from unalike.data import Tensors
from unalike.models import CNN, MLP
from unalike.runs import Run, RunPlan
from unalike.runs import run as run_clients
from unalike.runs.run_folder import Folder
from unalike.tasks import Classification
from unalike.tasks.task import label_names
from unalike.training.batching import batches
from unalike.training.loop import Training, build_optimizer

# engine: overhead of the local engine

SHAPE, CLIENTS, SAMPLES = (1, 28, 28), 100, 64
TRAINING = Training(rounds=8, epochs=2, batch_size=16, optimizer="sgd", lr=0.05, weight_decay=0.0)


@benchmark("engine")
def bench_engine(quick: bool = False) -> dict:
    """Overhead of the engine: FedAvg with a small CNN against a hand-written PyTorch loop.

    100 clients, 10 in a round. Medians of repeated, interleaved runs; the engine's time includes
    a checkpoint after every round.
    """
    repeats, training = (1, TRAINING.model_copy(update={"rounds": 2})) if quick else (5, TRAINING)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    clients = random_clients()
    by_hand, workers_0, workers_2 = [], [], []
    train_by_hand(clients, training)  # warm up
    for _ in range(repeats):
        by_hand.append(timed(partial(train_by_hand, clients, training)))
        workers_0.append(time_engine(clients, training, workers=0))
        workers_2.append(time_engine(clients, training, workers=2))
    torch.set_num_threads(threads)
    overheads = [ours / hand for ours, hand in zip(workers_0, by_hand, strict=True)]
    speedups = [hand / ours for ours, hand in zip(workers_2, by_hand, strict=True)]
    return {
        "seconds_by_hand": statistics.median(by_hand),
        "seconds_workers_0": statistics.median(workers_0),
        "seconds_workers_2": statistics.median(workers_2),
        "overhead_workers_0": statistics.median(overheads),
        "bar_overhead_workers_0": 1.10,
        "speedup_workers_2": statistics.median(speedups),
        "bar_speedup_workers_2": 1.4,
    }


def random_clients() -> list[Client]:
    """Clients with one small CNN architecture and random images."""
    source = stream(0, "bench")
    clients = []
    for index in range(CLIENTS):
        x = torch.randn(SAMPLES, *SHAPE, generator=source)
        y = torch.randint(10, (SAMPLES,), generator=source)
        model = partial(CNN, SHAPE, (8, 16), 32)
        task = Classification(label_names(10))
        clients.append(Client(id=f"c{index}", model=model, task=task, train=Tensors(x, y)))
    return clients


def time_engine(clients: list[Client], training: Training, workers: int) -> float:
    """Seconds of the rounds alone, without starting processes and building models."""
    folder = Path(tempfile.mkdtemp())
    federation = FederationConfig(participation=0.1)
    plan = RunPlan(
        FedAvg(),
        clients,
        training,
        federation,
        name="bench",
        engine_options={"workers": workers},
        local_baseline=False,
    )
    run = Run(plan, Folder.create(folder / "run", {"name": "bench"}))
    engine = run.build_engine(run.folder.clients)
    try:
        fed = Federation(engine, training, federation, 0)
        fed.call("describe", clients=fed.clients)
        return timed(lambda: run.run_rounds(fed, lambda: 0.0))
    finally:
        engine.close()
        shutil.rmtree(folder)


def train_by_hand(clients: list[Client], training: Training) -> None:
    """FedAvg as a plain loop: load, train, copy, average."""
    model = nn.Sequential(CNN(SHAPE, (8, 16), 32), Classification(label_names(10)).head(32))
    shared = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for number in range(1, training.rounds + 1):
        order = torch.randperm(CLIENTS, generator=stream(0, "participation", number))
        states = []
        for index in order[: CLIENTS // 10].tolist():
            client = clients[index]
            model.load_state_dict(shared)
            model.train()
            optimizer = build_optimizer(list(model.parameters()), training)
            x, y = client.train.x, client.train.y
            for epoch in range(training.epochs):
                source = stream(0, "order", client.id, number, epoch)
                for rows in batches(SAMPLES, training.batch_size, source):
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
                    optimizer.step()
            states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        for name in shared:
            shared[name] = torch.stack([state[name] for state in states]).mean(0)


def timed(work: Callable[[], object]) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# memory: resident memory

DIGITS = """
import resource, sys
from unalike.scenarios import load
from unalike.runs import run_scenario
scenario, algorithm = load("digits", settings=["rounds={rounds}"])
run_scenario(scenario, algorithm, out=sys.argv[1] + "/run")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""

THOUSAND = """
import json, sys
from functools import partial
import torch
import unalike
from unalike.models import MLP
from unalike.base.randomness import stream

def resident():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))

draw = stream(0, "bench")
x, y = torch.randn(1000, 20, 64, generator=draw), torch.randint(10, (1000, 20), generator=draw)
model, task = partial(MLP, (64,), (128,), 64), unalike.Classification(10)
clients = [
    unalike.Client(id=f"c{{i}}", model=model, task=task, train=(x[i], y[i])) for i in range(1000)
]
sizes = []
def watch(event, **facts):
    if event == "round":
        sizes.append(resident())
rounds = {rounds}
training = unalike.Training(rounds=rounds, epochs=1, batch_size=10)
federation = unalike.FederationConfig(participation=0.01)
unalike.run(unalike.{method}(), clients, training=training, federation=federation,
            out=sys.argv[1] + "/run", alone=False, alive=32, watch=watch)
print(json.dumps([sizes[rounds // 4], sizes[-1], max(sizes)]))
"""


@benchmark("memory")
def bench_memory(quick: bool = False) -> dict:
    """Memory of the digits demo, and of 1,000 clients, ten in a round and the idle ones on disk.

    Megabytes, each measured in a process of its own.
    """
    rounds = 20 if quick else 400
    local = json.loads(run_alone(THOUSAND.format(rounds=rounds, method="Local")))
    average = json.loads(run_alone(THOUSAND.format(rounds=rounds, method="FedAvg")))
    return {
        "digits_peak_mb": float(run_alone(DIGITS.format(rounds=2 if quick else 8))),
        "bar_digits_peak_mb": 1000,
        "thousand_personal_quarter_mb": local[0],
        "thousand_personal_end_mb": local[1],
        "thousand_personal_peak_mb": local[2],
        "thousand_fedavg_quarter_mb": average[0],
        "thousand_fedavg_end_mb": average[1],
        "thousand_fedavg_peak_mb": average[2],
        "bar_thousand_peak_mb": 2000,
    }


def run_alone(program: str) -> str:
    """Run Python code in a process of its own and return the last line it prints."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", program, folder], capture_output=True, text=True
        )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return done.stdout.strip().splitlines()[-1]


# bytes: traffic of FedMuscle

# GiB up and down by M, with B = 20 and 2 bytes per value.
PAPER = {
    1: (0.0024, 0.0024),
    2: (0.0024, 0.048),
    3: (0.0024, 0.954),
    4: (0.0024, 19.08),
    5: (0.0024, 381.6),
}
ROWS, BATCH, WIDTH = 5000, 32, 256


@benchmark("bytes")
def bench_bytes(quick: bool = False) -> dict:
    """FedMuscle's bytes per client and round for M = 1 to 5 and every exchange (Table 5).

    `gradient` is measured in the ledger of a real run; `peers` and `paper` are the encoded sizes
    of their messages.
    """
    rows = 320 if quick else ROWS
    measured = {m: ledger(m, rows) for m in (1, 3, 5)}
    table = {}
    for m in range(1, 6):
        up = measured.get(m, measured[3])[0]
        table[str(m)] = {
            "gradient_up": up,
            "gradient_down": measured.get(m, measured[3])[1],
            "peers_down": passes(rows, lambda b, m=m: m * b * WIDTH),
            "paper_down": passes(rows, lambda b, m=m: b**m * (WIDTH + 1)),
            "papers_table_5_down_gib": PAPER[m][1],
        }
    return {
        "rows": rows,
        "batch": BATCH,
        "width": WIDTH,
        "bytes_a_value": 4,
        "by_peers": table,
        "down_equals_up": all(up == down for up, down in measured.values()),
        "same_for_all_peers": len(set(measured.values())) == 1,
    }


def passes(rows: int, values: Callable[..., int]) -> int:
    """Bytes of one pass over the public set, a message for each batch."""
    header = encoded_size(
        {"operation": "align", "number": 1, "round": 1, "body": {"epoch": 0, "batch": 0}}
    )
    starts = list(range(0, rows, BATCH))
    return sum(header + 4 * values(min(BATCH, rows - start)) for start in starts)


def ledger(peers: int, rows: int) -> tuple[int, int]:
    """Bytes up and down of one client in one round, as the ledger counted them."""
    draw = torch.Generator().manual_seed(0)
    public = torch.randn(rows, 16, generator=draw)
    clients = [
        Client(
            id=f"c{i}",
            model=partial(MLP, (16,), (16,), 16),
            task=Classification(label_names(3)),
            train=Tensors(torch.randn(12, 16, generator=draw), torch.arange(12) % 3),
        )
        for i in range(6)
    ]
    with tempfile.TemporaryDirectory() as folder:
        results = run_clients(
            FedMuscle(peers=peers, width=WIDTH, batch=BATCH),
            clients,
            public=public,
            training=Training(rounds=1),
            out=Path(folder) / "run",
            alone=False,
        )
    return results["bytes"]["up"] // 6, results["bytes"]["down"] // 6


# ray: calls over Ray

RAY_SHAPE = (32, 256)
LARGE = 200 * 10**6  # bytes


class Echo(Algorithm):
    """Returns the values that were sent, plus one."""

    class Program(ClientProgram):
        @query
        def echo(self, values: torch.Tensor) -> torch.Tensor:
            return values + 1


@benchmark("ray")
def bench_ray(quick: bool = False) -> dict:
    """Milliseconds of a call over Ray to 3 clients on this machine, 32 x 256 float32 values each.

    From the server's call until all replies are decoded and counted, after a warm-up. Also the
    server's memory while 200 MB go to each client and come back.
    """
    from unalike.engines.ray import RayEngine

    calls = 50 if quick else 500
    training = Training()
    clients = [
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
            clients,
            partial(build_runtime, algorithm=Echo(), training=training, seed=0),
            Path(folder) / "clients",
            actors=3,
            cpus=0.5,
        )
        try:
            engine.load(0, 0.0, [])
            fed = Federation(engine, training)
            values, took = torch.randn(RAY_SHAPE), []
            for _ in range(calls + 20):
                start = time.perf_counter()
                fed.call("echo", values=values, quorum=1.0)
                took.append(1000 * (time.perf_counter() - start))
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
        "values": list(RAY_SHAPE),
        "calls": calls,
        "median_ms": round(statistics.median(took), 2),
        "bar_median_ms": 10.0,
        "p90_ms": round(took[int(0.9 * len(took))], 2),
        "large_bytes_each_way": LARGE // 20 if quick else LARGE,
        **large,
    }


def memory(work: Callable[[], dict]) -> dict[str, float]:
    """Peak memory of this process during `work`, above its memory before.

    In payloads of all clients: the process's own memory, and Ray's shared memory that it mapped.
    """

    def own_and_shared() -> tuple[int, int]:
        sizes = {}
        for line in Path("/proc/self/status").read_text().splitlines():
            words = line.replace(":", "").split()
            if words[0] in ("RssAnon", "RssShmem"):
                sizes[words[0]] = int(words[1]) * 1024
        return sizes["RssAnon"], sizes["RssShmem"]

    before, peak, done = own_and_shared(), [0, 0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            sizes = zip(peak, own_and_shared(), before, strict=True)
            peak[:] = [max(highest, now - then) for highest, now, then in sizes]

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    replies = work()
    took = time.perf_counter() - start
    done.set()
    watcher.join()
    payload = sum(reply.numel() * reply.element_size() for reply in replies.values())
    return {
        "large_seconds": round(took, 2),
        "large_own_memory_in_payloads": round(peak[0] / payload, 2),
        "large_memory_in_payloads": round(sum(peak) / payload, 2),
        "bar_large_memory_in_payloads": 3.0,
    }
