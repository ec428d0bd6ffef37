"""Ways to record a training step on a GPU: our graphs, PyTorch's graphed callables, its compiler."""

import copy
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from benchmarks.study import benchmark
from unalike.base.errors import UserError
from unalike.models import CNN
from unalike.models.classics import ResNet18
from unalike.training.cuda_graphs import GraphedFunction, GraphedStep

CLASSES = 10
LR = 0.05
Step = Callable[[Tensor, Tensor], Any]
# (encoder, input shape, rows of a batch)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "small CNN": (partial(CNN, (1, 28, 28), (8, 16), 32), (1, 28, 28), 16),
    "ResNet-18, 16 channels": (partial(ResNet18, (3, 32, 32), 16), (3, 32, 32), 32),
}


@benchmark("recording")
def bench_recording(quick: bool) -> dict[str, Any]:
    """Milliseconds of an SGD step by eager PyTorch, by our graphs, by graphed callables and by
    the compiler, of one model and of a stack of ten, and seconds until the first steps are done.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not quick:
        raise UserError("bench recording compares graphs of a GPU, and there is none here")
    rows = {}
    for name, (encoder, shape, size) in list(NETWORKS.items())[: 1 if quick else None]:
        x = torch.randn(size, *shape, device=device)
        y = torch.randint(CLASSES, (size,), device=device)
        for way, build_step in ways_of_one(device).items():
            step = build_step(build_network(encoder).to(device), x)
            rows[f"{name}, {way}"] = timed(step, x, y, quick)
    encoder, shape, size = NETWORKS["small CNN"]
    x = torch.randn(10, size, *shape, device=device)
    y = torch.randint(CLASSES, (10, size), device=device)
    for way, build_stack in ways_of_stack(device).items():
        step = build_stack(build_network(encoder).to(device))
        rows[f"ten small CNNs as a stack, {way}"] = timed(step, x, y, quick)
    return {"rows": rows}


def build_network(encoder: Callable[[], nn.Module]) -> nn.Module:
    """Encoder and a linear layer."""
    torch.manual_seed(0)
    body = encoder()
    return nn.Sequential(body, nn.ReLU(), nn.Linear(int(body.width), CLASSES))  # type: ignore[arg-type]


def timed(step: Step, x: Tensor, y: Tensor, quick: bool) -> dict[str, float]:
    """Seconds of the first five steps, and milliseconds of a later one (median of five times)."""
    start = time.perf_counter()
    for _ in range(5):
        step(x, y)
    synchronise(x)
    first = time.perf_counter() - start
    steps = 2 if quick else 50
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(steps):
            step(x, y)
        synchronise(x)
        times.append((time.perf_counter() - start) / steps)
    return {"ms": round(1000 * sorted(times)[2], 4), "first_five_s": round(first, 2)}


def synchronise(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


def ways_of_one(device: str) -> dict[str, Callable[[nn.Module, Tensor], Step]]:
    """Ways to take a step of one model; those of a GPU only where there is one."""

    def eager(model: nn.Module, x: Tensor, network: Callable | None = None) -> Step:
        optimizer = torch.optim.SGD(model.parameters(), LR, fused=True)
        network = network or model

        def step(x: Tensor, y: Tensor) -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x), y).backward()
            optimizer.step()

        return step

    def ours(model: nn.Module, x: Tensor) -> Step:
        optimizer = torch.optim.SGD(model.parameters(), LR, fused=True)
        graphed = GraphedStep(model, lambda x, y: nn.functional.cross_entropy(model(x), y))

        def step(x: Tensor, y: Tensor) -> None:
            graphed(x, y)
            optimizer.step()

        return step

    def callables(model: nn.Module, x: Tensor) -> Step:
        graphed: Any = torch.cuda.make_graphed_callables(copy.deepcopy(model), (x,))
        return eager(graphed, x)

    def compiled(model: nn.Module, x: Tensor) -> Step:
        return eager(model, x, torch.compile(model, mode="reduce-overhead"))

    ways: dict[str, Callable[[nn.Module, Tensor], Step]] = {"eager": eager, "our graph": ours}
    if device == "cuda":
        ways |= {"make_graphed_callables": callables, "torch.compile": compiled}
    return ways


def ways_of_stack(device: str) -> dict[str, Callable[[nn.Module], Step]]:
    """Ways to take a step of a stack of models."""

    def build(
        model: nn.Module, record: Callable[[Callable], Callable], with_update: bool = True
    ) -> Step:
        stacked = {
            name: parameter.detach().expand(10, *parameter.shape).clone()
            for name, parameter in model.named_parameters()
        }

        def loss(own: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(functional_call(model, own, (x,)), y)

        def gradients(own: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
            return vmap(grad(loss))(own, x, y)

        def update(found: dict[str, Tensor]) -> None:
            torch._foreach_add_(list(stacked.values()), list(found.values()), alpha=-LR)

        def whole(x: Tensor, y: Tensor) -> Tensor:
            update(gradients(stacked, x, y))
            return y

        if with_update:
            recorded = record(whole)
            return lambda x, y: recorded(x, y)
        recorded = record(gradients)
        return lambda x, y: update(recorded(stacked, x, y))

    ways: dict[str, Callable[[nn.Module], Step]] = {
        "eager": lambda model: build(model, lambda function: function),
        "our graph": lambda model: build(model, GraphedFunction),
    }
    if device == "cuda":
        compiler = partial(torch.compile, mode="reduce-overhead")
        ways["torch.compile"] = lambda model: build(model, compiler, with_update=False)
    return ways
