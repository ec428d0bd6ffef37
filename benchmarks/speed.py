"""Benchmark of speed: FedAvg by Unalike, by a hand-written PyTorch loop and, where installed, by pfl."""

import copy
import importlib.util
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.engines import run_alone
from benchmarks.study import Study, benchmark
from unalike.algorithms.fedavg import FedAvg
from unalike.base.randomness import stream
from unalike.core.client import Client
from unalike.core.client_stack import ClientStack, StackedReplies
from unalike.core.federation import Federation
from unalike.core.participation import FederationConfig
from unalike.core.runtime import ClientRuntime
from unalike.data import Tensors
from unalike.engines.host import Host
from unalike.engines.local import LocalEngine
from unalike.methods import averaging
from unalike.models import CNN, MLP
from unalike.models.classics import ResNet18
from unalike.runs import Run, RunPlan
from unalike.runs.run_folder import Folder
from unalike.tasks import Classification
from unalike.training.batching import batches
from unalike.training.loop import Training, build_optimizer
from unalike.training.precision import exact_arithmetic
from unalike.training.stacked_epochs import StackedEpochs, StackRows

CLASSES = 10
WARM_UP = 2  # rounds before the clock starts

BuildEncoder = Callable[[], nn.Module]


@dataclass(frozen=True)
class Workload:
    """Equal clients with random images that average their models.

    Attributes:
        clients, rows: their number, and the training rows of each.
        shape: of an image.
        encoders: of the clients in turn; one for each kind.
        per_round: clients that take part in a round.
        rounds: that are timed.
        precision: of Unalike's training, where it is not float32. The loop stays float32, with
            convolutions in TF32, PyTorch's default on a GPU, and another time without.
    """

    clients: int
    rows: int
    shape: tuple[int, ...]
    encoders: tuple[BuildEncoder, ...]
    per_round: int
    rounds: int
    epochs: int = 1
    batch_size: int = 16
    precision: str | None = None

    @property
    def training(self) -> Training:
        settings: dict[str, Any] = {"precision": self.precision} if self.precision else {}
        return Training(
            rounds=self.rounds + WARM_UP,
            epochs=self.epochs,
            batch_size=self.batch_size,
            optimizer="sgd",
            lr=0.05,
            weight_decay=0.0,
            **settings,
        )

    def data(self) -> tuple[Tensor, Tensor]:
        """Images (clients, rows, *shape) and labels (clients, rows)."""
        source = stream(0, "bench")
        x = torch.randn(self.clients, self.rows, *self.shape, generator=source)
        return x, torch.randint(CLASSES, (self.clients, self.rows), generator=source)

    def kind(self, client: int) -> int:
        """Which of the encoders a client has."""
        return client % len(self.encoders)

    def sample(self, round: int) -> list[int]:
        """The clients of a round, the same for everybody that is timed."""
        federation = FederationConfig(participation=self.per_round / self.clients)
        numbers = [str(client) for client in range(self.clients)]
        return [int(number) for number in federation.sample(numbers, 0, round)]


SMALL = Workload(
    clients=100,
    rows=64,
    shape=(1, 28, 28),
    encoders=(partial(CNN, (1, 28, 28), (8, 16), 32),),
    per_round=10,
    rounds=40,
    epochs=2,
)
WORKLOADS = {
    "small CNN: 100 clients x 64 rows of 1x28x28, 10 a round, 2 epochs of 16": SMALL,
    "pfl's CIFAR shape: 1000 x 50 rows of 3x32x32, 50 a round, 1 epoch of 10": Workload(
        clients=1000,
        rows=50,
        shape=(3, 32, 32),
        encoders=(partial(CNN, (3, 32, 32), (32, 64), 128),),
        per_round=50,
        rounds=20,
        batch_size=10,
    ),
    "ResNet-18, 64 channels: 20 x 512 rows of 3x32x32, 20 a round, 1 epoch of 256": Workload(
        clients=20,
        rows=512,
        shape=(3, 32, 32),
        encoders=(partial(ResNet18, (3, 32, 32), 64),),
        per_round=20,
        rounds=5,
        batch_size=256,
        precision="bfloat16",
    ),
    "three kinds: 30 x 64 rows of 1x28x28, 30 a round, 2 epochs of 16": Workload(
        clients=30,
        rows=64,
        shape=(1, 28, 28),
        encoders=(
            partial(CNN, (1, 28, 28), (8, 16), 32),
            partial(CNN, (1, 28, 28), (16, 32), 64),
            partial(MLP, (1, 28, 28), (64,), 64),
        ),
        per_round=30,
        rounds=20,
        epochs=2,
    ),
}
PER_ROUND = (1, 3, 10, 30, 100, 300, 1000)
# One step of hardly any arithmetic: what is left is what a client costs in Python.
OVERHEAD = Workload(
    clients=100,
    rows=8,
    shape=(64,),
    encoders=(partial(MLP, (64,), (16,), 16),),
    per_round=100,
    rounds=20,
)


@benchmark("speed")
def bench_speed(study: Study) -> dict:
    """Rounds per second of FedAvg against a hand-written loop and pfl, on CPU or GPU.

    Four workloads, rounds per second against clients a round with a picture of it, what a client
    costs in Python, the CPU time of a whole run with 200 small clients, and start and memory of a
    run with 100,000. Quick: two rounds of fewer, smaller clients.

    Only when named by `--only`: "phases", where a round of each workload spends its time, and
    "variants", rounds per second with cuDNN's search for the fastest convolution.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return measure_speed(study)
    finally:
        torch.set_num_threads(threads)


def measure_speed(study: Study) -> dict:
    """What is written to results/speed.json."""
    rivals: dict[str, Callable[[Workload, str], float]] = {
        "by hand": rounds_by_hand,
        "unalike": rounds_by_unalike,
        "unalike, one by one": partial(rounds_by_unalike, stack="never"),
    }
    if importlib.util.find_spec("pfl") is not None:
        rivals["pfl"] = rounds_by_pfl
    rows: dict[str, dict[str, Any]] = {}
    extra_words = [w for w in study.only if w in "phases" or w in "variants"]
    for name, workload in WORKLOADS.items():
        if not extra_words and study.selects(name):
            small = shrink(workload) if study.quick else workload
            rows[name] = compare(small, rivals, study.device)
    result: dict[str, Any] = {"rows": rows}
    for extra, measure in (("phases", phases_of_a_round), ("variants", variants)):
        if any(word in extra for word in study.only):
            chosen = [w for w in study.only if w not in extra]
            result[extra] = {}
            for name, workload in WORKLOADS.items():
                if not chosen or any(word in name for word in chosen):
                    small = shrink(workload) if study.quick else workload
                    result[extra][name] = measure(small, study.device)
    if study.selects("clients a round"):
        result["curves"] = curves(rivals, study)
    if study.selects("python of a client"):
        result["python of a client"] = client_overhead(study.device, quick=study.quick)
    if study.selects("200 clients"):
        result["whole run of 200 clients"] = whole_run(quick=study.quick)
    if study.selects("100,000 clients"):
        result["start with 100,000 clients"] = many_clients(quick=study.quick)
    return result


def shrink(workload: Workload) -> Workload:
    """The same in seconds: two rounds, fewer rows and clients, ResNet-18 with 8 channels."""
    encoders = workload.encoders
    if workload.precision:
        encoders = (partial(ResNet18, workload.shape, 8),)
    return replace(
        workload,
        clients=min(workload.clients, 30),
        rows=min(workload.rows, 32),
        encoders=encoders,
        per_round=min(workload.per_round, 6),
        rounds=2,
        precision=None,
    )


def compare(
    workload: Workload, rivals: dict[str, Callable[[Workload, str], float]], device: str
) -> dict[str, Any]:
    """Rounds per second of each, and how many times as fast as the others Unalike is."""
    row: dict[str, Any] = {}
    for name, rounds_per_second in rivals.items():
        if name == "pfl" and len(workload.encoders) > 1:
            continue  # pfl has one model for everybody
        row[name] = round(rounds_per_second(workload, device), 3)
    if workload.precision:
        with exact_arithmetic():
            row["by hand, no TF32"] = round(rounds_by_hand(workload, device), 3)
        row["times the loop without TF32"] = round(row["unalike"] / row["by hand, no TF32"], 2)
    row["times the loop"] = round(row["unalike"] / row["by hand"], 2)
    row["times one by one"] = round(row["unalike"] / row["unalike, one by one"], 2)
    if "pfl" in row:
        row["times pfl"] = round(row["unalike"] / row["pfl"], 2)
    return row


def curves(rivals: dict[str, Callable[[Workload, str], float]], study: Study) -> dict:
    """Rounds per second against clients a round, for the picture."""
    lines: dict[str, dict[str, float]] = {name: {} for name in rivals}
    for count in PER_ROUND[:3] if study.quick else PER_ROUND:
        rounds = 2 if study.quick or count > 100 else 5
        workload = replace(SMALL, clients=max(100, count), per_round=count, rounds=rounds)
        for name, rounds_per_second in rivals.items():
            lines[name][str(count)] = round(rounds_per_second(workload, study.device), 3)
    return {
        "across": "clients a round",
        "up": "rounds per second",
        "scale": "log",
        "lines": lines,
    }


# the same work, three times


def synchronise(device: str) -> None:
    """Wait until a GPU is done; work on it is queued."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def build_model(encoder: BuildEncoder) -> nn.Module:
    """Encoder and head, as `Classification` adds it."""
    body = encoder()
    return nn.Sequential(body, Classification(CLASSES).head(body.width))  # type: ignore[arg-type]


def rounds_by_hand(workload: Workload, device: str) -> float:
    """Rounds per second of FedAvg as a plain loop: load, train, add up."""
    training = workload.training
    x, y = (tensor.to(device) for tensor in workload.data())
    models = [build_model(encoder).to(device) for encoder in workload.encoders]
    shared = [copy.deepcopy(model.state_dict()) for model in models]
    start = 0.0
    for number in range(1, training.rounds + 1):
        sampled = workload.sample(number)
        totals = [
            {name: torch.zeros_like(tensor) for name, tensor in state.items()} for state in shared
        ]
        counts = [
            sum(workload.kind(client) == kind for client in sampled) for kind in range(len(models))
        ]
        for client in sampled:
            kind = workload.kind(client)
            model = models[kind]
            model.load_state_dict(shared[kind])
            train_by_hand(model, x[client], y[client], training, f"c{client}", number)
            with torch.no_grad():
                for name, tensor in model.state_dict().items():
                    totals[kind][name] += (tensor / counts[kind]).to(tensor.dtype)
        shared = [total if counts[kind] else shared[kind] for kind, total in enumerate(totals)]
        if number == WARM_UP:
            synchronise(device)
            start = time.perf_counter()
    synchronise(device)
    return workload.rounds / (time.perf_counter() - start)


def train_by_hand(
    model: nn.Module, x: Tensor, y: Tensor, training: Training, client: str, number: int
) -> None:
    """The local epochs of one client, in the order that Unalike takes the rows."""
    model.train()
    optimizer = build_optimizer(list(model.parameters()), training)
    for epoch in range(training.epochs):
        source = stream(0, "order", client, number, epoch)
        for rows in batches(len(x), training.batch_size, source):
            index = rows.to(x.device)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()


def rounds_by_unalike(workload: Workload, device: str, stack: str = "auto") -> float:
    """Rounds per second of a run, its clients built and its processes started before.

    Args:
        stack: option of the local engine; "never" trains clients one by one.
    """
    times = round_times(workload, device, stack, time.perf_counter)
    return workload.rounds / (times[-1] - times[WARM_UP - 1])


def client_overhead(device: str, quick: bool) -> dict[str, float]:
    """Milliseconds of CPU time that a client costs in a round, in the quickest round."""
    workload = replace(OVERHEAD, clients=20, per_round=20, rounds=2) if quick else OVERHEAD
    result: dict[str, float] = {"clients": workload.clients, "rounds": workload.rounds}
    for name, stack in (("stacked", "always"), ("one by one", "never")):
        times = round_times(workload, device, stack, time.process_time)
        quickest = min(later - earlier for earlier, later in pairwise(times[WARM_UP - 1 :]))
        result[f"ms_{name}"] = round(1000 * quickest / workload.clients, 3)
    return result


def round_times(
    workload: Workload, device: str, stack: str, clock: Callable[[], float]
) -> list[float]:
    """What a clock showed at the end of each round."""
    x, y = (tensor.to(device) for tensor in workload.data())  # as the others have them
    clients = []
    for i in range(workload.clients):
        clients.append(
            Client(
                id=f"c{i}",
                model=workload.encoders[workload.kind(i)],
                task=Classification(CLASSES),
                train=Tensors(x[i], y[i]),
                device=device,
            )
        )
    times: list[float] = []

    def watch(event: str, **facts: Any) -> None:
        if event == "round":
            synchronise(device)
            times.append(clock())

    training = workload.training
    folder = Path(tempfile.mkdtemp())
    plan = RunPlan(
        FedAvg(),
        clients,
        training,
        FederationConfig(participation=workload.per_round / workload.clients),
        name="bench",
        local_baseline=False,
        checkpoint=training.rounds,
        max_loaded_clients=workload.clients,
        engine_options={"stack": stack},
    )
    run = Run(plan, Folder(folder), watch)
    engine = run.build_engine(run.folder.clients)
    try:
        fed = run.federation(engine)
        fed.evaluator = lambda fed: None  # type: ignore[assignment, return-value]
        fed.log_event = watch
        for finished in plan.algorithm.serve(fed):
            fed.finished = finished
            watch("round")
    finally:
        engine.close()
        shutil.rmtree(folder)
    return times


# where the time of a round goes

# Functions whose time is told apart, and what it is spent for. Those called within another one
# count for themselves.
PHASES = (
    (Federation, "call", "calls, all else"),
    (LocalEngine, "send", "messages: sizes, copies"),
    (Host, "handle_all", "clients in lockstep or one by one"),
    (Host, "handle_stacks", "stack: waking and finding its clients"),
    (ClientRuntime, "perform_stack", "stack: checks of the request, all else"),
    (ClientStack, "_find_kind", "stack: kinds of its clients"),
    (ClientStack, "learn", "stack: data, orders of rows, all else"),
    (StackRows, "of_orders", "stack: rows and batches"),
    (StackedEpochs, "_load_from", "stack: loading"),
    (StackedEpochs, "take_steps", "steps of training"),
    (ClientStack, "_take", "stack: copying what was trained"),
    (StackedReplies, "__init__", "replies: rows, norms"),
    (Federation, "accept", "checks of replies"),
    (averaging, "drop_outliers", "sizes of updates"),
    (averaging, "mean_states", "mean"),
)


@contextmanager
def timed_phases(device: str, wait: bool) -> Iterator[dict[str, list[float]]]:
    """Seconds of each phase by itself, by its name: one number for each call.

    Args:
        wait: for the GPU, before and after each; else only what Python takes is measured.
    """
    seconds: dict[str, list[float]] = {}
    inner = [0.0]  # seconds of phases within the current one

    def timed(function: Callable, label: str) -> Callable:
        def run(*args: Any, **named: Any) -> Any:
            if wait:
                synchronise(device)
            inner.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **named)
            finally:
                if wait:
                    synchronise(device)
                whole = time.perf_counter() - start
                seconds.setdefault(label, []).append(whole - inner.pop())
                inner[-1] += whole

        return run

    with ExitStack() as patches:
        for owner, name, label in PHASES:
            found = vars(owner)[name]
            function = getattr(found, "__func__", found)
            new: Any = timed(function, label)
            if isinstance(found, staticmethod | classmethod):
                new = type(found)(new)
            patches.enter_context(mock.patch.object(owner, name, new))
        yield seconds


def phases_of_a_round(workload: Workload, device: str) -> dict[str, Any]:
    """Milliseconds of a round by phase, with and without waiting for the GPU, and its kernels."""
    result: dict[str, Any] = {}
    for wait in (False, True):
        with timed_phases(device, wait) as seconds:
            marks: list[dict[str, int]] = []

            def clock(seconds: dict = seconds, marks: list = marks) -> float:
                marks.append({label: len(calls) for label, calls in seconds.items()})
                return time.perf_counter()

            times = round_times(workload, device, "auto", clock)
        first, last = marks[WARM_UP - 1], marks[-1]
        own = {
            label: sum(calls[first.get(label, 0) : last[label]]) for label, calls in seconds.items()
        }
        whole = times[-1] - times[WARM_UP - 1]
        own["the server's method, all else"] = whole - sum(own.values())
        ordered = sorted(own.items(), key=lambda item: -item[1])
        result["waiting for the GPU" if wait else "as it is"] = {
            "ms a round": round(1000 * whole / workload.rounds, 2),
            **{label: round(1000 * value / workload.rounds, 2) for label, value in ordered},
        }
    if torch.device(device).type == "cuda":
        result["kernels"] = kernels_of_a_round(workload, device)
    return result


def kernels_of_a_round(workload: Workload, device: str) -> dict[str, float]:
    """Milliseconds of a round that the GPU computes, and of the kernels that take longest."""
    from torch.profiler import ProfilerActivity, profile

    finished = 0
    profiler = profile(activities=[ProfilerActivity.CUDA])

    def clock() -> float:
        nonlocal finished
        finished += 1
        if finished == WARM_UP:
            profiler.start()
        elif finished == workload.rounds + WARM_UP:
            profiler.stop()
        return time.perf_counter()

    round_times(workload, device, "auto", clock)
    found = {event.key: event.self_device_time_total for event in profiler.key_averages()}
    slowest = sorted(found, key=lambda name: -found[name])[:12]
    scale = 1000 * workload.rounds  # from microseconds in all
    return {
        "all": round(sum(found.values()) / scale, 2),
        **{name[:120]: round(found[name] / scale, 2) for name in slowest},
    }


def variants(workload: Workload, device: str) -> dict[str, float]:
    """Rounds per second with and without cuDNN's search for the fastest convolution."""
    result: dict[str, float] = {}
    for search in (False, True):
        with torch.backends.cudnn.flags(benchmark=search):
            for name, stack in (("as a stack", "auto"), ("one by one", "never")):
                label = f"{name}, cuDNN searches" if search else name
                result[label] = round(rounds_by_unalike(workload, device, stack), 3)
    return result


def rounds_by_pfl(workload: Workload, device: str) -> float:
    """Rounds per second of pfl's FederatedAveraging on the same shapes."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = build_model(workload.encoders[0])

        def forward(self, x: Tensor) -> Tensor:
            return self.network(x)

        def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
            self.train(not eval)
            return nn.functional.cross_entropy(self(x), y)

        @torch.no_grad()
        def metrics(self, x: Tensor, y: Tensor, eval: bool = True) -> dict:
            return {"loss": Weighted(float(self.loss(x, y)) * len(y), len(y))}

    times: list[float] = []

    class Clock(TrainingProcessCallback):
        def after_central_iteration(
            self, aggregate_metrics: Any, model: Any, *, central_iteration: int
        ) -> tuple:
            synchronise(device)
            times.append(time.perf_counter())
            return False, Metrics()

    x, y = (tensor.to(device) for tensor in workload.data())
    network = Network().to(device)
    model = PyTorchModel(
        model=network,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(network.parameters(), 1.0),
    )
    users = FederatedDataset(
        lambda user: Dataset([x[user], y[user]], user_id=str(user)),
        get_user_sampler("random", list(range(workload.clients))),
    )
    training = workload.training
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=training.rounds,
            evaluation_frequency=10**9,
            train_cohort_size=workload.per_round,
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(training_data=users, val_data=None),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_learning_rate=training.lr,
            local_num_epochs=training.epochs,
            local_batch_size=training.batch_size,
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=1000),
        callbacks=[Clock()],
        send_metrics_to_platform=False,
    )
    return workload.rounds / (times[-1] - times[WARM_UP - 1])


# 200 small clients: a whole run with local baseline, measurements and report


@dataclass(frozen=True)
class Tiny:
    """Small clients with 60 training and 20 test rows of 32 numbers each."""

    clients: int = 200
    rounds: int = 5

    @property
    def training(self) -> Training:
        return Training(rounds=self.rounds, epochs=1, batch_size=16)

    def data(self) -> tuple[Tensor, Tensor]:
        source = stream(0, "bench")
        x = torch.randn(self.clients, 80, 32, generator=source)
        return x, torch.randint(CLASSES, (self.clients, 80), generator=source)


def tiny_by_hand(tiny: Tiny) -> None:
    """The work of the run below as a plain loop: everyone alone, FedAvg, accuracy every round."""
    x, y = tiny.data()
    training = tiny.training
    model = build_model(partial(MLP, (32,), (64,), 64))
    start = copy.deepcopy(model.state_dict())

    def accuracy(client: int) -> float:
        model.eval()
        with torch.no_grad():
            return float((model(x[client, 60:]).argmax(1) == y[client, 60:]).float().mean())

    for client in range(tiny.clients):
        model.load_state_dict(start)
        for number in range(tiny.rounds):
            train_by_hand(model, x[client, :60], y[client, :60], training, f"c{client}", number)
            accuracy(client)
    shared = start
    for number in range(tiny.rounds):
        total = {name: torch.zeros_like(tensor) for name, tensor in shared.items()}
        for client in range(tiny.clients):
            model.load_state_dict(shared)
            train_by_hand(model, x[client, :60], y[client, :60], training, f"c{client}", number)
            for name, tensor in model.state_dict().items():
                total[name] += tensor / tiny.clients
        shared = total
        model.load_state_dict(shared)
        for client in range(tiny.clients):
            accuracy(client)


def tiny_by_unalike(tiny: Tiny, folder: str) -> None:
    """A run as a user starts it, with its report."""
    import unalike

    x, y = tiny.data()
    clients = []
    for i in range(tiny.clients):
        clients.append(
            Client(
                id=f"c{i}",
                model=partial(MLP, (32,), (64,), 64),
                task=Classification(CLASSES),
                train=(x[i, :60], y[i, :60]),
                test=(x[i, 60:], y[i, 60:]),
            )
        )
    unalike.run(FedAvg(), clients, training=tiny.training, out=Path(folder) / "run")


MEASURE_TINY = """
import sys, time, torch
from benchmarks.speed import Tiny, tiny_by_hand, tiny_by_unalike
torch.set_num_threads(1)
tiny = Tiny(clients={clients}, rounds={rounds})
start = time.process_time()
{call}
print(time.process_time() - start)
"""


def whole_run(quick: bool) -> dict[str, float]:
    """CPU seconds of 200 small clients, each in a process of its own, imports left out."""
    size = {"clients": 10, "rounds": 2} if quick else {"clients": 200, "rounds": 5}
    calls = ("tiny_by_hand(tiny)", "tiny_by_unalike(tiny, sys.argv[1])")
    by_hand, ours = (float(run_alone(MEASURE_TINY.format(call=call, **size))) for call in calls)
    return {
        **size,
        "cpu_seconds_by_hand": round(by_hand, 2),
        "cpu_seconds": round(ours, 2),
        "bar_cpu_seconds": round(1.3 * by_hand + 3, 2),
    }


# 100,000 clients of which 100 take part in a round

MEASURE_MANY = """
import json, resource, sys, time
start = time.perf_counter()
from functools import partial
import torch
import unalike
from unalike.models import MLP

def build(i):
    source = torch.Generator().manual_seed(i)
    x, y = torch.randn(30, 32, generator=source), torch.randint(10, (30,), generator=source)
    model = partial(MLP, (32,), (64,), 64)
    return unalike.Client(f"c{{i}}", model=model, task=unalike.Classification(10),
                          train=(x[:20], y[:20]), test=(x[20:], y[20:]))

seconds = []
def watch(event, **facts):
    if event in ("stage", "round"):
        seconds.append(time.perf_counter() - start)

count = {clients}
unalike.run(unalike.FedAvg(), unalike.LazyClients(count, build),
            training=unalike.Training(rounds={rounds}, batch_size=10),
            federation=unalike.FederationConfig(participation=100 / count),
            out=sys.argv[1] + "/run", watch=watch)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps([seconds[0], seconds[1], seconds[{rounds}], peak]))
"""


def many_clients(quick: bool) -> dict[str, float]:
    """Seconds until the first round begins and ends, and the peak of memory, imports included."""
    size = {"clients": 1000, "rounds": 1} if quick else {"clients": 100_000, "rounds": 5}
    starts, first, last, peak = json.loads(run_alone(MEASURE_MANY.format(**size)))
    return {
        **size,
        "seconds_to_start": round(starts, 2),
        "bar_seconds_to_start": 20,
        "seconds_to_first_round": round(first, 2),
        "seconds_to_last_round": round(last, 2),
        "peak_mb": round(peak),
        "bar_peak_mb": 2000,
    }
