"""Measures the Muscle loss against the paper's literal sum: time, memory and accuracy. Knows nothing of federations; writes no files.

    python -c "from unalike.benches import muscle; print(muscle.run())"

Times are of loss and gradient at B=32, d=256 in float32, t=0.2, t_low=0.15, one thread for both sides (a second thread on a shared core
measures the neighbours), the two sides taking turns, the fastest turn of each; a turn of ours is the median
of 9, being so short. The literal form is measured whole: S is in memory at
once, 32 MiB at M=3 and 1 GiB at M=4, and `muscle_literal` alone is timed, nothing chunked and nothing recomputed. `anchor` is the gradient
with respect to z, all that FedMuscle needs; `all` adds the peers.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch

from unalike.losses.muscle import muscle_literal, muscle_loss

BATCH, WIDTH = 32, 256
BARS = {3: 25.0, 4: 300.0}  # times faster than the literal form
LITERAL_GIB = 5.0  # what the literal form may take at M=4 with its gradients


def run(quick: bool = False) -> dict:
    """A flat dict of numbers, each with its bar where there is one; None where it was not measured. `quick` skips the literal M=4.

    >>> sorted(accuracy(cases=2))
    ['accuracy_cases', 'gradient_error', 'gradient_error_bar', 'loss_error', 'loss_error_bar']
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        literal_at_four = not quick and _free_gib() > LITERAL_GIB
        return {
            "batch": BATCH,
            "width": WIDTH,
            "threads": 1,
            **speed(3, turns=5 if quick else 20),
            **speed(4, turns=3, literal=literal_at_four),
            **_in_fresh_process("five_peers"),
            **accuracy(cases=20 if quick else 100),
        }
    finally:
        torch.set_num_threads(threads)


def speed(peers: int, turns: int, literal: bool = True) -> dict:
    """Milliseconds of loss + gradient, ours and literal, and their ratio."""
    found: dict[str, float | None] = {}
    for which in ("anchor", "all"):
        z, *others = torch.randn(
            1 + peers, BATCH, WIDTH, generator=torch.Generator().manual_seed(0)
        ).unbind()
        wanted = [z, *others] if which == "all" else [z]
        for tensor in wanted:
            tensor.requires_grad_()
        ours, theirs = [], []
        _seconds(muscle_loss, z, others, wanted)
        for _ in range(turns):
            ours.append(median(_seconds(muscle_loss, z, others, wanted) for _ in range(9)))
            theirs += [_seconds(muscle_literal, z, others, wanted)] if literal else []
        name = f"m{peers}_{which}"
        found[f"{name}_ms"] = 1e3 * min(ours)
        found[f"{name}_literal_ms"] = 1e3 * min(theirs) if literal else None
        found[f"{name}_times_faster"] = min(theirs) / min(ours) if literal else None
        found[f"{name}_times_faster_bar"] = BARS[peers]
    return found


def five_peers() -> dict:
    """Seconds and extra resident memory of M=5, all gradients; in a fresh process, because the peak of a process never falls."""
    torch.set_num_threads(1)
    z, *others = torch.randn(6, BATCH, WIDTH, generator=torch.Generator().manual_seed(0)).unbind()
    wanted = [tensor.requires_grad_() for tensor in (z, *others)]
    _seconds(muscle_loss, z, others[:2], wanted[:3])  # what torch loads on first use is not ours
    before = _peak_mb()
    seconds = min(_seconds(muscle_loss, z, others, wanted) for _ in range(3))
    return {
        "m5_all_s": seconds,
        "m5_all_s_bar": 2.0,
        "m5_extra_mb": _peak_mb() - before,
        "m5_extra_mb_bar": 500.0,
    }


def accuracy(cases: int) -> dict:
    """Largest differences from the literal sum in float64, loss relative to its size where that is above 1, over random cases."""
    source = torch.Generator().manual_seed(0)
    losses, gradients = [], []

    def draw(low: float, high: float) -> float:
        return low + (high - low) * torch.rand((), generator=source).item()

    for case in range(cases):
        peers, batch, width = 1 + case % 4, int(draw(2, 8)), int(draw(2, 40))
        z, *others = wanted = (
            torch.randn(1 + peers, batch, width, generator=source).double().unbind()
        )
        for tensor in wanted:
            tensor.requires_grad_()
        temperatures = draw(0.05, 1), draw(0.02, 1)
        ours, theirs = (loss(z, others, *temperatures) for loss in (muscle_loss, muscle_literal))
        losses.append((ours - theirs).abs().item() / max(1.0, theirs.item()))
        pairs = zip(
            torch.autograd.grad(ours, wanted), torch.autograd.grad(theirs, wanted), strict=True
        )
        gradients.append(max((a - b).abs().max().item() for a, b in pairs))
    return {
        "accuracy_cases": cases,
        "loss_error": max(losses),
        "loss_error_bar": 1e-9,
        "gradient_error": max(gradients),
        "gradient_error_bar": 1e-8,
    }


def _seconds(loss, z, others, wanted) -> float:
    start = time.perf_counter()
    torch.autograd.grad(loss(z, others), wanted)
    return time.perf_counter() - start


def _peak_mb() -> float:
    """Highest resident memory of this process so far. Not ru_maxrss on Linux: a child starts with its parent's, and hides its own."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split("VmHWM:")[1].split()[0]) / 2**10
    import resource  # not on Windows, where only this number is lost

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
        2**20 if sys.platform == "darwin" else 2**10
    )


def _free_gib() -> float:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def _in_fresh_process(function: str) -> dict:
    code = (
        f"import json; from unalike.benches import muscle; print(json.dumps(muscle.{function}()))"
    )
    root = str(Path(__file__).resolve().parents[2])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
    }
    return json.loads(
        subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    )
