"""Benchmarks of FedMuscle."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from benchmarks.baselines import round_of
from benchmarks.study import Row, Study, averages, benchmark, megabytes
from unalike.algorithms import ALGORITHMS
from unalike.core.client import Client
from unalike.core.federation import Federation, FederationConfig
from unalike.core.runtime import build_runtime
from unalike.data import Tensors
from unalike.engines.local import LocalEngine
from unalike.losses import muscle_loss, muscle_sampled
from unalike.losses.muscle import muscle_literal
from unalike.methods import anchored_contrast, public_alignment
from unalike.methods.anchored_contrast import AnchoredContrast
from unalike.models import build_encoder
from unalike.models.encoders import MLP
from unalike.report import Run
from unalike.scenarios import load_mapping
from unalike.tasks import Classification, MultiLabel
from unalike.tasks.task import Task, label_names
from unalike.training.cuda_graphs import (
    SINGLE_TENSOR,
    GraphedForward,
    GraphedFunction,
    input_signature,
)
from unalike.training.loop import Training

# muscle-vision: methods compared; the tables of this file are built here, too

PRINTED = "algorithm={name: fedmuscle}"
BASELINES = ("sage", "fedhenn", "cofed", "feddf", "fedrcl", "simclr", "pseudolabel")
SLOWER = ("feddf", "cofed", "pseudolabel")
METHODS: dict[str, list[str]] = {
    "muscle": [],
    "pairwise": ["algorithm.loss=pairwise"],
    "gramian": ["algorithm.loss=gramian"],
    # Common initialisation, shared heads and distillation, without the Muscle loss.
    "nobody aligned": ["algorithm.align_lr=1e-12"],
    "own start": ["algorithm.projection_init=random"],
    "own opinions": ["algorithm.distill_public=never"],
    "absent wrong": ["algorithm.mask_absent_classes=false"],
    # Every client contrasts with itself only.
    "no company": ["algorithm.name=benchmarks.variants:SelfOnly"],
    "heads shared": [
        "algorithm={name: fedmuscleplus, average_heads: round, align_lr: 0.0003, decay: true, distill_public: never}"
    ],
    "own heads": [
        "algorithm={name: fedmuscleplus, align_lr: 0.0003, decay: true, distill_public: never}"
    ],
    "as printed": [PRINTED],
    # Alone in other forms: unit vectors to the head as printed, a head on the encoder, the head
    # alone, the nearest class mean.
    "alone, unit head": ["algorithm={name: benchmarks.variants:Alone, head_input: unit}"],
    "alone, head on the encoder": ["algorithm={name: local}"],
    "alone, probe": ["algorithm={name: benchmarks.variants:Alone, backbone_lr_scale: 0}"],
    "alone, class means": ["algorithm={name: benchmarks.variants:ClassMeans}"],
    **{name: [f"algorithm={{name: {name}}}"] for name in BASELINES},
    # Their rate is that of local epochs, 1e-3, unless it says otherwise.
    **{f"{name} at 1e-4": [f"algorithm={{name: {name}, public_lr: 0.0001}}"] for name in SLOWER},
}
QUICK = ("rounds=2", "epochs=1", "public.size=64")
BARS = {"delta_bar": 10.0, "lead_on_pairwise_bar": 0.0, "lead_on_gramian_bar": 0.0}


@benchmark("muscle-vision")
def bench_muscle_vision(study: Study) -> dict:
    """FedMuscle, its losses and its baselines on `muscle-vision` (Table 1 and Figure 2).

    One row per method, three seeds: gains over local training. `lead_on_...` is the mean gain
    with the Muscle loss minus that with another loss, on the same seeds.
    """
    result = table(study, rows_of(study, METHODS))
    rows = result["rows"]
    for loss in ("pairwise", "gramian"):
        if not {"muscle", loss} <= rows.keys():
            continue
        deltas = rows["muscle"]["seeds"]
        leads = [delta - rows[loss]["seeds"][seed] for seed, delta in deltas.items()]
        result[f"lead_on_{loss}"] = round(mean(leads), 3)
        result[f"lead_on_{loss}_spread"] = round(stdev(leads), 3) if len(leads) > 1 else None
    return result | BARS


def scenario(study: Study, name: str = "muscle-vision") -> str:
    """The scenario of that name, or `digits` in a quick benchmark."""
    return "digits" if study.quick else name


def rows_of(
    study: Study, settings: Mapping[str, Sequence[str]], name: str = "muscle-vision"
) -> dict[str, Row]:
    """Rows of one scenario, by the settings of each."""
    return {row: (scenario(study, name), values) for row, values in settings.items()}


def with_printed(settings: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    """The rows, then each once more with FedMuscle as printed."""
    printed = {f"as printed, {row}": [PRINTED, *values] for row, values in settings.items()}
    return {**settings, **printed}


def both_lines(line: Mapping[Any, str]) -> dict[str, Mapping[Any, str]]:
    """Curves of a study by `with_printed`: FedMusclePlus, and FedMuscle as printed."""
    printed = {x: f"as printed, {row}" for x, row in line.items()}
    return {"as shipped": line, "as printed": printed}


def table(study: Study, rows: Mapping[str, Row]) -> dict[str, Any]:
    """Run the rows with three seeds and compare them with local training.

    The local baseline is that of the first row. A row with other models or labelled data has
    `alone=true` in its settings, and its own local baseline.
    """
    selected = [name for name in rows if study.selects(name)]
    configured = {}
    for name, (scenario_name, settings) in rows.items():
        alone = "alone=true" if name in selected[:1] else "alone=false"
        configured[name] = (scenario_name, ["evaluations=1", alone, *settings])
    runs = study.runs(configured, QUICK, range(3))
    shared = {run.seed: local_values(run) for run in runs.get(selected[0], [])}
    summaries = {}
    for name, row_runs in runs.items():
        if "alone=true" in rows[name][1]:
            summaries[name] = summarize(row_runs, [local_values(run) for run in row_runs])
            continue
        # A seed of the first row may have been left out for lack of time.
        compared = [run for run in row_runs if run.seed in shared]
        if compared:
            summaries[name] = summarize(compared, [shared[run.seed] for run in compared])
    return {"rows": summaries}


def curves(
    result: dict[str, Any], across: str, lines: Mapping[str, Mapping[Any, str]]
) -> dict[str, Any]:
    """Add curves of the mean gain to a table.

    Args:
        across: label of the horizontal axis.
        lines: for each curve, the name of the row at each point; rows that did not run are skipped.
    """
    rows = result["rows"]
    points = {}
    for name, line in lines.items():
        deltas = {str(x): rows[row]["delta"] for x, row in sorted(line.items()) if row in rows}
        if deltas:
            points[name] = deltas
    return result | {"curves": {"across": across, "up": "Delta, %", "lines": points}}


def final_values(run: Run) -> dict[str, float]:
    """Metric of each client's final model, which the safeguard may have chosen."""
    return {
        client: metrics.get("safeguarded", metrics["value"])
        for client, metrics in run.clients.items()
    }


def local_values(run: Run) -> dict[str, float]:
    """Metric of each client trained alone."""
    return {client: metrics["alone"] for client, metrics in run.clients.items()}


def summarize(runs: Sequence[Run], baselines: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Figures of a row over its seeds, and how many clients lose beyond noise.

    A client loses beyond noise if its mean gain is negative by more than two standard errors,
    with three seeds or more.

    Args:
        baselines: metric of each client trained alone, for each run.
    """
    run_gains = [
        relative_gains(final_values(run), local) for run, local in zip(runs, baselines, strict=True)
    ]
    gains_by_run = {id(run): gains for run, gains in zip(runs, run_gains, strict=True)}

    def run_figures(run: Run) -> dict[str, float]:
        gains = gains_by_run[id(run)].values()
        return {
            "delta": mean(gains),
            "worst_gain": min(gains),
            "losers": sum(gain < 0 for gain in gains),
            "megabytes": megabytes(run),
            **final_values(run),
        }

    client_gains = {
        client: [gains[client] for gains in run_gains if client in gains] for client in run_gains[0]
    }
    return averages(runs, run_figures) | {
        "losers_beyond_noise": sum(loses_beyond_noise(gains) for gains in client_gains.values()),
        "gains": {client: round(mean(gains), 2) for client, gains in client_gains.items()},
    }


def relative_gains(values: dict[str, float], local: dict[str, float]) -> dict[str, float]:
    """Gain of each client over local training, in percent; clients with a local 0 are left out."""
    return {
        client: 100 * (value - local[client]) / local[client]
        for client, value in values.items()
        if local[client]
    }


def loses_beyond_noise(gains: Sequence[float]) -> bool:
    """Whether the mean gain is more than two standard errors below zero."""
    return len(gains) > 2 and mean(gains) + 2 * stdev(gains) / len(gains) ** 0.5 < 0


# muscle: the loss alone, without a federation

BATCH, WIDTH = 32, 256
MUSCLE_BARS = {3: 25.0, 4: 300.0}  # times faster than the literal form
LITERAL_GIB = 5.0  # memory that the literal form and its gradients need at M=4


@benchmark("muscle")
def bench_muscle(quick: bool = False) -> dict:
    """The Muscle loss against the paper's literal sum: time, memory and accuracy.

    Times are of loss and gradient at B=32, d=256 in float32, t=0.2, t_low=0.15, on one thread.
    The two implementations take turns; the fastest turn counts, and a turn of `muscle_loss` is
    the median of 9 calls. The literal form is timed whole: all similarities are in memory, 32 MiB
    at M=3 and 1 GiB at M=4. `anchor` is the gradient with respect to z, which is all that
    FedMuscle needs; `all` adds the gradients of the peers.

    Returns: a flat dict of numbers, with their bars; None for what was not measured. `quick`
        skips the literal form at M=4.

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
    """Milliseconds of loss and gradient, ours and literal, and their ratio."""
    result: dict[str, float | None] = {}
    for which in ("anchor", "all"):
        source = torch.Generator().manual_seed(0)
        z, *peer_views = torch.randn(1 + peers, BATCH, WIDTH, generator=source).unbind()
        inputs = [z, *peer_views] if which == "all" else [z]
        for tensor in inputs:
            tensor.requires_grad_()
        fast_times, literal_times = [], []
        _seconds(muscle_loss, z, peer_views, inputs)
        for _ in range(turns):
            calls = [_seconds(muscle_loss, z, peer_views, inputs) for _ in range(9)]
            fast_times.append(median(calls))
            if literal:
                literal_times.append(_seconds(muscle_literal, z, peer_views, inputs))
        name = f"m{peers}_{which}"
        fastest = min(fast_times)
        result[f"{name}_ms"] = 1e3 * fastest
        result[f"{name}_literal_ms"] = 1e3 * min(literal_times) if literal else None
        result[f"{name}_times_faster"] = min(literal_times) / fastest if literal else None
        result[f"{name}_times_faster_bar"] = MUSCLE_BARS[peers]
    return result


def five_peers() -> dict:
    """Seconds and additional resident memory of the loss with M=5 and all gradients.

    Run it in a fresh process: the peak memory of a process never falls.
    """
    torch.set_num_threads(1)
    source = torch.Generator().manual_seed(0)
    z, *peer_views = torch.randn(6, BATCH, WIDTH, generator=source).unbind()
    inputs = [tensor.requires_grad_() for tensor in (z, *peer_views)]
    # A first call, so that what torch loads on first use does not count.
    _seconds(muscle_loss, z, peer_views[:2], inputs[:3])
    before = _peak_mb()
    fastest = min(_seconds(muscle_loss, z, peer_views, inputs) for _ in range(3))
    return {
        "m5_all_s": fastest,
        "m5_all_s_bar": 2.0,
        "m5_extra_mb": _peak_mb() - before,
        "m5_extra_mb_bar": 500.0,
    }


def accuracy(cases: int) -> dict:
    """Largest differences from the literal sum in float64 over random cases.

    The error of the loss is relative where the loss is above 1, else absolute.
    """
    source = torch.Generator().manual_seed(0)
    loss_errors, gradient_errors = [], []

    def draw(low: float, high: float) -> float:
        return low + (high - low) * torch.rand((), generator=source).item()

    for case in range(cases):
        peers, batch, width = 1 + case % 4, int(draw(2, 8)), int(draw(2, 40))
        inputs = torch.randn(1 + peers, batch, width, generator=source).double().unbind()
        for tensor in inputs:
            tensor.requires_grad_()
        z, *peer_views = inputs
        temperatures = draw(0.05, 1), draw(0.02, 1)
        loss = muscle_loss(z, peer_views, *temperatures)
        expected = muscle_literal(z, peer_views, *temperatures)
        loss_errors.append((loss - expected).abs().item() / max(1.0, expected.item()))
        gradients = torch.autograd.grad(loss, inputs)
        expected_gradients = torch.autograd.grad(expected, inputs)
        pairs = zip(gradients, expected_gradients, strict=True)
        gradient_errors.append(max((a - b).abs().max().item() for a, b in pairs))
    return {
        "accuracy_cases": cases,
        "loss_error": max(loss_errors),
        "loss_error_bar": 1e-9,
        "gradient_error": max(gradient_errors),
        "gradient_error_bar": 1e-8,
    }


def _seconds(
    loss: Callable[..., Tensor], z: Tensor, peer_views: list[Tensor], inputs: list[Tensor]
) -> float:
    """Seconds of the loss and its gradient with respect to `inputs`."""
    start = time.perf_counter()
    torch.autograd.grad(loss(z, peer_views), inputs)
    return time.perf_counter() - start


def _peak_mb() -> float:
    """Peak resident memory of this process in MiB.

    Not ru_maxrss on Linux, where a child process starts with the peak of its parent.
    """
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split("VmHWM:")[1].split()[0]) / 2**10
    import resource  # does not exist on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def _free_gib() -> float:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def _in_fresh_process(function: str) -> dict:
    """Call a function of this module without arguments in a new Python process."""
    code = f"import json; from benchmarks.fedmuscle import {function} as f; print(json.dumps(f()))"
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    process = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(process.stdout)


# muscle-batch: batch size of the alignment

BATCHES = (32, 8, 16, 64, 128)


@benchmark("muscle-batch")
def bench_muscle_batch(study: Study) -> dict:
    """FedMuscle by the batch size of its public set (Figure 5), as shipped and as printed."""
    settings = {f"B={batch}": [f"algorithm.batch={batch}"] for batch in BATCHES}
    result = table(study, rows_of(study, with_printed(settings)))
    return curves(result, "B", both_lines({batch: f"B={batch}" for batch in BATCHES}))


# muscle-cross-temperature: temperatures by pair of clients

SEGMENTATION, NEWS = (6, 7), (8, 9)  # indices of these clients in the scenario
LARGE = 100.0


@benchmark("muscle-cross-temperature")
def bench_muscle_cross_temperature(study: Study) -> dict:
    """A large temperature between segmentation and text clients of `muscle-multimodal` (Table 9).

    Both temperatures of such a pair are large, in the same proportion as for other pairs.
    """
    if study.quick:
        clients, first, second = 6, (0, 1), (2, 3)
    else:
        clients, first, second = 10, SEGMENTATION, NEWS
    upper = temperature_matrix(clients, first, second, usual=0.2, large=LARGE)
    lower = temperature_matrix(clients, first, second, usual=0.15, large=0.75 * LARGE)
    settings = {
        "0.2 for all": [FREE],
        "100 between pixels and news": [FREE, f"temperature={upper}", f"lower_temperature={lower}"],
    }
    return table(study, rows_of(study, settings, "muscle-multimodal"))


def temperature_matrix(
    clients: int, first: tuple[int, ...], second: tuple[int, ...], usual: float, large: float
) -> list[list[float]]:
    """Temperature of every pair of clients: `large` between the two groups, else `usual`."""
    matrix = [[usual] * clients for _ in range(clients)]
    for a in first:
        for b in second:
            matrix[a][b] = matrix[b][a] = large
    return matrix


# muscle-d-temperature: width of the representations and temperatures

TEMPERATURES = ((0.1, 0.075), (0.3, 0.225), (0.5, 0.375))
WIDTHS = (64, 128, 512)
SHIPPED = "d=256, 0.2 and 0.15"


@benchmark("muscle-d-temperature")
def bench_muscle_d_temperature(study: Study) -> dict:
    """Width of FedMuscle's representations and its two temperatures (Figure 11), shipped and printed.

    Another width is another model, so these rows have their own local baseline: as printed its
    heads are on unit vectors.
    """
    settings: dict[str, list[str]] = {SHIPPED: []}
    for upper, lower in TEMPERATURES:
        name = f"d=256, {upper} and {lower}"
        settings[name] = [f"temperature={upper}", f"lower_temperature={lower}"]
    settings |= {f"d={width}": [f"algorithm.width={width}", "alone=true"] for width in WIDTHS}
    result = table(study, rows_of(study, with_printed(settings)))
    line = {256: SHIPPED} | {width: f"d={width}" for width in WIDTHS}
    return curves(result, "d", both_lines(line))


# muscle-ert: rounds against local epochs

ROUNDS, PASSES = (1, 10, 25), (1, 3, 5)


@benchmark("muscle-ert")
def bench_muscle_ert(study: Study) -> dict:
    """Local epochs, rounds, passes at equal local work, 150 epochs (Table 8), shipped and printed.

    The local baseline trains 150 epochs whatever the rounds, so all rows share that of the first.
    """
    settings = {}
    for rounds in reversed(ROUNDS):
        for passes in PASSES:
            epochs = 150 // rounds
            name = f"R={rounds}, T={passes}"
            settings[name] = [f"rounds={rounds}", f"epochs={epochs}", f"passes={passes}"]
    result = table(study, rows_of(study, with_printed(settings)))
    lines: dict[str, Mapping[Any, str]] = {}
    for passes in PASSES:
        both = both_lines({rounds: f"R={rounds}, T={passes}" for rounds in ROUNDS})
        lines |= {f"{method}, T={passes}": line for method, line in both.items()}
    return curves(result, "R", lines)


# muscle-flops: operations of a round


@benchmark("muscle-flops")
def bench_muscle_flops(study: Study) -> dict:
    """Operations of a round of `muscle-vision` by method, of each client and the server (Table 1).

    Megaflops, counted as in `rivals-flops`, in this process.
    """
    name = scenario(study)
    methods = {"local": ["algorithm={name: local}"], **METHODS}
    selected = [method for method in methods if study.selects(method)]
    if study.quick:
        selected = selected[:2]
    rows = {}
    for method in selected:
        settings = [*methods[method], f"device={study.device}", *study.settings]
        rows[method] = round_of(name, settings, study.data_dir)
    return {"scenario": name, "rows": rows}


# muscle-map: when FedMuscle helps

CLIENTS = range(6)
ENCODERS = {  # for all clients; from weak to strong when trained alone
    "from scratch": "{name: cnn, channels: [32, 64, 128, 128], width: 128, norm: group}",
    "random weights, whole": "{name: efficientnet, weights: none, size: 96}",
    "lite0 to stage 5": "{name: efficientnet, stage: 5, size: 96, adapters: 16, adapted: 5}",
    "lite0": "{name: efficientnet, size: 96, adapters: 16, adapted: 8}",
    "lite0 at 192 pixels": "{name: efficientnet, size: 192, adapters: 16, adapted: 8}",
}
LEARNING = {  # parts of lite0 that are trained, from few to all
    "last stages learn": "{name: efficientnet, size: 96, adapters: 16, adapted: 6}",
    "every stage learns": "{name: efficientnet, size: 96, adapters: 16, adapted: 1}",
    "all learns": "{name: efficientnet, size: 96}",
}
LABELS = {
    "a quarter of the labels": (50, 50, 50, 25, 25, 12),
    "four times the labels": (800, 800, 800, 400, 400, 200),
}
REMAINING = 3300  # public images of VOC when its clients have four times the labels
NEAR = {
    "public Flickr8k": ["public.data=flickr8k", "public.size=4000"],
    "public Caltech-101": ["public.data=caltech101", "public.size=3000"],
    "public VOC and Caltech-101": ["public.data=[voc2012, caltech101]", "public.size=4000"],
    "Flickr8k, guarded": ["public.data=flickr8k", "public.size=4000", "safeguard=true"],
    "4000 of VOC, 4000 of Caltech-101": ["public.data=[voc2012, caltech101]", "public.size=8000"],
    "public images of a program": ["public.data=generated", "public.size=5000"],
    "300 images of a program": ["public.data=generated", "public.size=300"],
    "some of every client's kind": [
        "public.data=[voc2012, caltech101, cifar10]",
        "public.size=4000",
    ],
}
ALIGNED = {  # stronger and weaker alignment than shipped
    "align_rate 1e-3": ["align_lr=0.001"],
    "align_rate 3e-5": ["align_lr=0.00003"],
    "temperature 0.5": ["temperature=0.5", "lower_temperature=0.4"],
    "temperature 0.07": ["temperature=0.07", "lower_temperature=0.05"],
    "local epochs teach all": ["backbone_lr_scale=1.0"],
    "local epochs teach heads": ["backbone_lr_scale=0.0"],
    "left as aligned": ["final_model=aligned"],
    "heads shared, one optimizer": [
        "algorithm={name: benchmarks.variants:OneOptimizer, average_heads: round, distill_public: never}"
    ],
}


@benchmark("muscle-map")
def bench_muscle_map(study: Study) -> dict:
    """When FedMuscle helps: encoders, number of labels, public set, what is trained, alignment.

    The scenario as shipped, then one change at a time. Rows with other models, labels or labelled
    data have their own local baseline.
    """
    settings: dict[str, list[str]] = {"as shipped": []}
    if study.quick:
        return table(study, rows_of(study, settings | ALIGNED))
    for name, model in (ENCODERS | LEARNING).items():
        models = [f"clients.{index}.model={model}" for index in CLIENTS]
        settings[name] = [*models, "alone=true"]
    for name, counts in LABELS.items():
        rows = [f"clients.{index}.train={count}" for index, count in enumerate(counts)]
        settings[name] = [*rows, "alone=true"]
        if counts[0] > 200:
            settings[name].append(f"public.size={REMAINING}")
    for name, public in NEAR.items():
        settings[name] = [*public, "alone=true"]
    settings |= ALIGNED
    return table(study, rows_of(study, settings))


# muscle-multimodal: clients with other tasks and modalities

FREE = "safeguard=false"
ROWS: dict[str, list[str]] = {
    # M=3; the safeguard may keep a client that shares its head with no other on its local model.
    "as shipped": [],
    "muscle, M=3": [FREE],
    "pairwise, M=3": [FREE, "algorithm.loss=pairwise"],
    "own heads, M=3": [FREE, "algorithm.average_heads=never"],
    # Of 32^9 combinations, 64 are sampled for each row and batch.
    "muscle, M=9": [FREE, "algorithm.peers=9"],
    "as printed": [FREE, PRINTED],
    # The safeguard cannot judge clients that distil.
    "distilled": [FREE, "algorithm.distill_public=all"],
}


@benchmark("muscle-multimodal")
def bench_muscle_multimodal(study: Study) -> dict:
    """FedMuscle with classification, segmentation and text clients (the paper's Table 2), and M=9.

    Gains over local training on `muscle-multimodal`.
    """
    return table(study, rows_of(study, ROWS, "muscle-multimodal")) | {"delta_bar": 0.0}


# muscle-noniid: label skew and number of clients


@benchmark("muscle-noniid")
def bench_muscle_noniid(study: Study) -> dict:
    """FedMuscle with label skew between clients of one task, 4, 8 and 12 clients (Table 4).

    A client has the same data and initial weights in a smaller federation, so all rows share the
    local baseline of the largest one.
    """
    name = scenario(study, "muscle-noniid")
    counts = (6, 5, 4) if study.quick else (12, 8, 4)
    clients = load_mapping(name)["clients"]
    first_clients = {count: f"clients={json.dumps(clients[:count])}" for count in counts}
    rows: dict[str, Row] = {}
    for count, setting in first_clients.items():
        rows[f"heads shared, N={count}"] = (name, [setting])
    guarded = load_mapping(name)["algorithm"] | {"name": "benchmarks.variants:MultilabelHeads"}
    for count, setting in first_clients.items():
        rows[f"multi-label heads shared, safeguard, N={count}"] = (
            name,
            [setting, f"algorithm={json.dumps(guarded)}", "safeguard=true"],
        )
    for count, setting in first_clients.items():
        rows[f"as printed, N={count}"] = (name, [setting, PRINTED])
    for count, setting in first_clients.items():
        rows[f"distilled, N={count}"] = (name, [setting, "algorithm.distill_public=all"])
    lines = {}
    for variant in (
        "heads shared",
        "multi-label heads shared, safeguard",
        "as printed",
        "distilled",
    ):
        lines[variant] = {count: f"{variant}, N={count}" for count in counts}
    return curves(table(study, rows), "clients", lines)


# muscle-peers: number of peers

# At M=5, 64 of the 32^5 combinations are sampled.
PEERS: dict[int, list[str]] = {3: [], 1: [], 2: [], 4: [], 5: ["algorithm.samples=64"]}


@benchmark("muscle-peers")
def bench_muscle_peers(study: Study) -> dict:
    """FedMuscle by the number of peers M, and its traffic (Table 5), as shipped and as printed.

    The benchmark `bytes` also measures the traffic of the paper's own exchange.
    """
    settings = {f"M={m}": [f"algorithm.peers={m}", *more] for m, more in PEERS.items()}
    result = table(study, rows_of(study, with_printed(settings)))
    return curves(result, "M", both_lines({m: f"M={m}" for m in PEERS}))


# muscle-public: size and source of the public set

SIZES, PUBLIC_PASSES = (5000, 2500, 1000, 300), (1, 3)


@benchmark("muscle-public")
def bench_muscle_public(study: Study) -> dict:
    """FedMuscle by the size of its public set, against traffic (Figure 4), and by its source.

    As shipped and as printed.
    A public set cut from a client's dataset changes the labelled data of that client, so these
    rows have their own local baseline.
    """
    settings = {}
    for size in SIZES:
        for passes in PUBLIC_PASSES:
            public = ["public.data=flickr8k", f"public.size={size}"]
            settings[f"|D|={size}, T={passes}"] = [*public, f"passes={passes}"]
    settings["VOC, |D|=4000"] = ["public.data=voc2012", "public.size=4000", "alone=true"]
    settings["Caltech-101, |D|=4000"] = ["public.data=caltech101", "public.size=4000", "alone=true"]
    result = table(study, rows_of(study, with_printed(settings)))
    rows = result["rows"]
    lines = {}
    for passes in PUBLIC_PASSES:
        for method, line in both_lines({size: f"|D|={size}, T={passes}" for size in SIZES}).items():
            names = [name for name in line.values() if name in rows]
            points = {rows[name]["megabytes"]: name for name in names}
            lines[f"{method}, T={passes}"] = points
    return curves(result, "megabytes of a client and round", lines)


# muscle-sampled: the sampled loss against the exact one

SAMPLED_WIDTH, TRIES = 256, 40
# Weight of what the views of one row have in common.
LIKENESS = {"apart": 0.0, "somewhat alike": 1.0, "alike": 2.0}
SAMPLED_SIZES = ((3, 32), (9, 4), (9, 32))  # peers, rows; the first two can be summed exactly
REFERENCE = 8192  # combinations sampled as the reference where the exact sum is too long


@benchmark("muscle-sampled")
def bench_muscle_sampled(quick: bool = False) -> dict:
    """The sampled Muscle loss and its gradient against the exact ones: bias, spread, direction.

    By the number of sampled combinations. Of the gradient with respect to the anchor: the norm
    of its mean error and of its spread, relative to the exact norm, and the cosine.
    """
    rows = {}
    for peers, batch in SAMPLED_SIZES[: 2 if quick else None]:
        for name, share in LIKENESS.items():
            z, *peer_views = random_views(peers, batch, share)
            loss, gradient = exact(z, peer_views)
            for count in (16, 64, 256)[: 1 if quick else None]:
                rows[f"M={peers}, B={batch}, {name}, {count} drawn"] = sampling_errors(
                    z, peer_views, loss, gradient, count=count, tries=5 if quick else TRIES
                )
    return {"width": SAMPLED_WIDTH, "rows": rows}


def random_views(peers: int, batch: int, share: float) -> list[Tensor]:
    """Random features of the anchor and its peers, (batch, SAMPLED_WIDTH) each.

    All rows have a direction in common, as features of real models do. `share` weighs what the
    views of one row have in common.
    """
    source = torch.Generator().manual_seed(0)
    common = torch.randn(batch, SAMPLED_WIDTH, generator=source)
    offset = torch.randn(SAMPLED_WIDTH, generator=source)
    views = []
    for _ in range(peers + 1):
        own = torch.randn(batch, SAMPLED_WIDTH, generator=source)
        views.append((share * common + own + offset / 2).double())
    return views


def exact(z: Tensor, peer_views: list[Tensor]) -> tuple[float, Tensor]:
    """Loss and gradient over all combinations, or over very many samples where it is too long."""
    if len(z) ** len(peer_views) <= 2**20:
        return loss_and_gradient(z, lambda anchor: muscle_loss(anchor, peer_views))
    losses, gradients = sample_losses(z, peer_views, REFERENCE, tries=4, seed=1)
    return mean(losses), gradients.mean(0)


def sample_losses(
    z: Tensor, peer_views: list[Tensor], count: int, tries: int, seed: int
) -> tuple[list[float], Tensor]:
    """Repeat the sampled loss with `count` combinations.

    Returns: the losses, and the gradients, (tries, batch, SAMPLED_WIDTH).
    """
    source = torch.Generator().manual_seed(seed)
    losses, gradients = [], []
    for _ in range(tries):
        uniform = torch.rand(len(peer_views), len(z), count, generator=source)
        loss, gradient = loss_and_gradient(z, partial(sampled_loss, peer_views, uniform))
        losses.append(loss)
        gradients.append(gradient)
    return losses, torch.stack(gradients)


def sampled_loss(peer_views: list[Tensor], uniform: Tensor, anchor: Tensor) -> Tensor:
    """`muscle_sampled` with the anchor as its last argument."""
    return muscle_sampled(anchor, peer_views, uniform)


def loss_and_gradient(z: Tensor, loss: Callable[[Tensor], Tensor]) -> tuple[float, Tensor]:
    """Value of the loss at `z`, and its gradient."""
    anchor = z.clone().requires_grad_()
    value = loss(anchor)
    return float(value.detach()), torch.autograd.grad(value, anchor)[0]


def sampling_errors(
    z: Tensor, peer_views: list[Tensor], loss: float, gradient: Tensor, *, count: int, tries: int
) -> dict[str, float]:
    """Errors of the sampled loss and gradient, given the exact ones."""
    start = time.perf_counter()
    losses, gradients = sample_losses(z, peer_views, count, tries, seed=2)
    seconds_per_try = (time.perf_counter() - start) / tries
    center = gradients.mean(0)
    cosines = torch.cosine_similarity(gradients.flatten(1), gradient.flatten()[None])
    gradient_bias = (center - gradient).norm() / gradient.norm()
    gradient_noise = (gradients - center).flatten(1).norm(dim=1).mean() / gradient.norm()
    return {
        "loss": loss,
        "bias": mean(losses) - loss,
        "deviation": stdev(losses),
        "gradient_bias": float(gradient_bias),
        "gradient_noise": float(gradient_noise),
        "cosine": float(cosines.mean()),
        "milliseconds": 1e3 * seconds_per_try,
    }


# muscle-speed: seconds of a round

LABELLED = (200, 200, 200, 100, 100, 50)  # as in muscle-vision
LITE = (1, 0, 2, 1, 0, 0)
# Rounds not timed: features are cached in the first, and the last, smaller batch is captured as a
# CUDA graph when it comes for the third time.
SKIPPED = 3


@benchmark("muscle-speed")
def bench_muscle_speed(study: Study) -> dict:
    """Seconds of a FedMuscle round at full size and of its parts: six clients, 5000 public images.

    "python": CPU time that the alignment takes of Python alone, see `time_python`; on any machine.
    "as shipped" has the encoders and the method of `muscle-vision`, the other rows have adapters
    from stage 6 on, at all clients, and no part that is not in the paper. All data are random. Parts are timed in runs of their own, which wait for the GPU before and
    after every part. `..._played` counts the shapes captured as CUDA graphs, of the loss and of
    all clients' passes.
    """
    rows: dict[str, Any] = {}
    if not study.only or "python" in study.only:
        rows["python"] = {"microseconds_a_batch_and_client": time_python(study)}
    for mode in ("recorded", "as written", "as shipped"):
        if study.only and mode not in study.only:
            continue
        whole, _, graphs = time_round(study, mode)
        whole_with_waits, parts, graphs_with_waits = time_round(study, mode, parts_apart=True)
        contrast = anchored_contrast.stacked("muscle", temperature=0.2, lower_temperature=0.15)
        rows[mode] = {
            "seconds_a_round": whole,
            "seconds_waited": whole_with_waits,
            "loss_share": parts["loss"] / whole_with_waits,
            "loss_played": sum(map(bool, contrast.graphs.values())),
            "passes_played": min(graphs, graphs_with_waits),
            **{f"{name}_seconds": seconds for name, seconds in parts.items()},
        }
    return {"rows": rows, "seconds_a_round_bar": 4.0, "loss_share_bar": 0.03}


def time_round(
    study: Study, mode: str, parts_apart: bool = False
) -> tuple[float, dict[str, float], int]:
    """Train FedMuscle on random images and time its rounds.

    Returns: seconds of a round, seconds of its operations and of the loss (empty unless
        `parts_apart`), and how many shapes of passes were captured as CUDA graphs.
    """
    skipped, rounds = (1, 2) if study.quick else (SKIPPED, SKIPPED + 3)
    shipped = load_mapping("muscle-vision") if mode == "as shipped" else {}
    clients = random_clients(study, shipped.get("clients"))
    settings = {k: v for k, v in shipped.get("algorithm", {}).items() if k != "name"}
    algorithm = ALGORITHMS["fedmuscleplus"](**settings)
    training = Training(rounds=rounds, epochs=6)
    gradients = AnchoredContrast.gradients
    parts: dict[str, float] = defaultdict(float)
    moments: list[tuple[float, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        build = partial(build_runtime, algorithm=algorithm, training=training, seed=0)
        engine = LocalEngine(clients, build, Path(folder))
        fed: Any = Federation(engine, training, FederationConfig(evaluations=1), 0)
        if parts_apart:
            fed.call = timed(fed.call, parts)
            AnchoredContrast.gradients = timed(  # type: ignore[method-assign]
                gradients, parts, "loss"
            )
        try:
            use_cuda_graphs(mode != "as written")
            for number in algorithm.serve(fed):
                fed.finished = number
                wait()
                moments.append((time.perf_counter(), dict(parts)))
            assert engine.host is not None
            graphs = 0
            for program in engine.host.programs.values():
                graphs += sum(map(bool, program.graphed_forward.graphs.values()))
        finally:
            use_cuda_graphs(True)
            AnchoredContrast.gradients = gradients  # type: ignore[method-assign]
            engine.close()
    (start, before), (end, after) = moments[skipped - 1], moments[-1]
    count = rounds - skipped
    part_seconds = {name: (after[name] - before.get(name, 0.0)) / count for name in after}
    return (end - start) / count, part_seconds, graphs


def time_python(study: Study) -> float:
    """CPU microseconds of the alignment per public batch and client that a GPU leaves to Python.

    Six clients with tiny models; a pass and the loss are "replayed" by graphs that do nothing, so
    that gradients stay as they were at first. The median over rounds.
    """
    rounds, batches = (2, 4) if study.quick else (12, 100)
    source = torch.Generator().manual_seed(0)
    public = torch.randn(8 * batches, 8, generator=source)
    clients = [
        Client(
            f"c{index}",
            partial(MLP, (8,), hidden=[12 + index], width=16),
            Classification(3),
            (torch.randn(16, 8, generator=source), torch.arange(16) % 3),
            public=public,
        )
        for index in range(6)
    ]
    algorithm: Any = ALGORITHMS["fedmuscleplus"](width=16, batch=8, distill_public="never")
    training = Training(rounds=rounds, batch_size=16)
    align = algorithm.align
    times = []

    def timed_align(fed: Federation, round: int, epoch: int) -> dict[str, float]:
        start = time.process_time()
        losses = align(fed, round, epoch)
        times.append(time.process_time() - start)
        return losses

    algorithm.align = timed_align
    graphed: Any = GraphedFunction
    usual_call = graphed.__call__
    with tempfile.TemporaryDirectory() as folder:
        build = partial(build_runtime, algorithm=algorithm, training=training, seed=0)
        engine = LocalEngine(clients, build, Path(folder))
        fed = Federation(engine, training, FederationConfig(evaluations=1), 0, algorithm=algorithm)
        try:
            graphed.__call__ = replay_nothing
            for number in algorithm.serve(fed):
                fed.finished = number
        finally:
            graphed.__call__ = usual_call
            anchored_contrast.stacked.cache_clear()
            engine.close()
    return 1e6 * median(times[1:]) / batches / len(clients)


class NothingToReplay:
    """A CUDA graph of nothing."""

    def replay(self) -> None:
        pass


def replay_nothing(function: GraphedFunction, *inputs: Any) -> Any:
    """Call a captured function as a GPU does, but with graphs that do nothing."""
    single = len(inputs) == 1 and isinstance(inputs[0], Tensor)
    leaves, tree = ([inputs[0]], SINGLE_TENSOR) if single else tree_flatten(inputs)
    key = input_signature(leaves, tree)
    captured: Any = function.graphs.get(key)
    if captured is None:
        outputs = function.function(*inputs)
        captured = (NothingToReplay(), [leaf.detach().clone() for leaf in leaves], outputs)
        if isinstance(function, GraphedForward):
            grad_output = torch.zeros_like(outputs)
            grads = function._gradients(outputs, grad_output)
            captured = (*captured[:2], outputs.detach(), NothingToReplay(), grad_output, grads)
        function.graphs[key] = captured
    return function._replay(captured, leaves)


def random_clients(study: Study, shipped: list[dict[str, Any]] | None = None) -> list[Client]:
    """Six clients as in `muscle-vision`, with random weights and images.

    Args:
        shipped: the scenario's clients: their encoders and tasks are taken. None: adapters from
            stage 6 on, and ten classes, for all.
    """
    size, public_rows = (32, 64) if study.quick else (96, 5000)
    source = torch.Generator().manual_seed(0)

    def random_images(count: int) -> Tensor:
        return torch.randint(256, (count, 3, size, size), dtype=torch.uint8, generator=source)

    public = Tensors(random_images(public_rows))
    clients = []
    for index, (labelled, lite) in enumerate(zip(LABELLED, LITE, strict=True)):
        rows = labelled // 10 if study.quick else labelled
        options = {"lite": lite, "weights": "none", "adapters": 16}
        task: Task = Classification(label_names(10))
        labels = torch.arange(rows) % 10
        if shipped is not None:
            known = {key: v for key, v in shipped[index]["model"].items() if key != "name"}
            options = {**known, "weights": "none"}
            if "data" not in shipped[index]:  # VOC, as the scenario
                task = MultiLabel(label_names(20))
                labels = (torch.rand(rows, 20, generator=source) < 0.1).float()
        client = Client(
            f"c{index}",
            partial(build_encoder, "efficientnet", (3, size, size), options),
            task,
            Tensors(random_images(rows), labels),
            public=public,
            device=study.device,
        )
        clients.append(client)
    return clients


def use_cuda_graphs(enabled: bool) -> None:
    """Set whether a GPU replays captured passes of clients and the server's losses."""
    anchored_contrast.USE_CUDA_GRAPHS = public_alignment.USE_CUDA_GRAPHS = enabled
    anchored_contrast.stacked.cache_clear()


def timed(function: Callable, parts: dict[str, float], name: str | None = None) -> Callable:
    """Wrap a function to add its seconds to `parts[name]`; the name may be its first argument."""

    def call(*args: Any, **kwargs: Any) -> Any:
        wait()
        start = time.perf_counter()
        result = function(*args, **kwargs)
        wait()
        parts[name or args[0]] += time.perf_counter() - start
        return result

    return call


def wait() -> None:
    """Wait until the GPU has finished, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
