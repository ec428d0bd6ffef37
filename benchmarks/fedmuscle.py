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
from unalike.report import Run
from unalike.scenarios import load_mapping
from unalike.tasks import Classification
from unalike.tasks.task import label_names
from unalike.training.loop import Training

# muscle-vision

RIVALS = ("sage", "fedhenn", "cofed", "feddf", "fedrcl", "simclr", "pseudolabel")
METHODS: dict[str, list[str]] = {
    "muscle": [],
    "pairwise": ["algorithm.loss=pairwise"],
    "gramian": ["algorithm.loss=gramian"],
    "nobody aligned": [
        "algorithm.align_lr=1e-12"
    ],  # what a joint start, heads and opinions do without the Muscle loss
    "own start": ["algorithm.projection_init=random"],
    "own opinions": ["algorithm.distill_public=never"],
    "absent wrong": ["algorithm.mask_absent_classes=false"],
    "no company": ["algorithm.self_peers=3"],  # each contrasts with itself
    "heads shared": [
        "algorithm={name: fedmuscle, average_heads: round, align_lr: 0.0003, decay: true}"
    ],
    "own heads": ["algorithm={name: fedmuscle, align_lr: 0.0003, decay: true}"],
    "as printed": ["algorithm={name: fedmuscle}"],
    **{name: [f"algorithm={{name: {name}}}"] for name in RIVALS if name in ALGORITHMS},
}
QUICK = ("rounds=2", "epochs=1", "public.size=64")
BARS = {"delta_bar": 10.0, "lead_on_pairwise_bar": 0.0, "lead_on_gramian_bar": 0.0}


@benchmark("muscle-vision")
def bench_muscle_vision(study: Study) -> dict:
    """FedMuscle, its losses and its rivals on `muscle-vision`: gains over training alone (the paper's Table 1 and Figure 2).

    A row for each method, three seeds, and how far the Muscle loss is ahead of the two others on the same seeds.
    """
    told = table(study, {name: (scenario(study), settings) for name, settings in METHODS.items()})
    rows = told["rows"]
    for other in ("pairwise", "gramian"):
        if {"muscle", other} <= rows.keys():
            leads = [
                delta - rows[other]["seeds"][seed]
                for seed, delta in rows["muscle"]["seeds"].items()
            ]
            spread = round(stdev(leads), 3) if len(leads) > 1 else None
            told |= {f"lead_on_{other}": round(mean(leads), 3), f"lead_on_{other}_spread": spread}
    return told | BARS


def scenario(study: Study, name: str = "muscle-vision") -> str:
    return "digits" if study.quick else name


def table(study: Study, rows: Mapping[str, Row]) -> dict[str, Any]:
    """Every row against clients alone: its own where it says alone=true (other models or labelled rows), else those of the first row."""
    chosen = [name for name in rows if not study.only or any(word in name for word in study.only)]
    asked = {
        name: (
            which,
            ["evaluations=1", "alone=true" if name in chosen[:1] else "alone=false", *settings],
        )
        for name, (which, settings) in rows.items()
    }
    runs = study.runs(asked, QUICK, range(3))
    shared = {made.seed: values(made, "alone") for made in runs[chosen[0]]} if chosen else {}
    own = {name for name, (_, settings) in rows.items() if "alone=true" in settings}
    return {
        "rows": {
            name: summary(
                made,
                [values(run, "alone") if name in own else shared[run.seed] for run in made],
            )
            for name, made in runs.items()
        }
    }


def curves(
    told: dict[str, Any], across: str, lines: Mapping[str, Mapping[Any, str]]
) -> dict[str, Any]:
    """A table with Delta drawn over numbers, by the row of each; rows that were not run are left out."""
    rows = told["rows"]
    found = {
        name: {str(at): rows[row]["delta"] for at, row in sorted(line.items()) if row in rows}
        for name, line in lines.items()
    }
    return told | {
        "curves": {
            "across": across,
            "up": "Delta, %",
            "lines": {name: line for name, line in found.items() if line},
        }
    }


def values(run: Run, key: str = "value") -> dict[str, float]:
    """What clients leave with, which the safeguard may have chosen, or what they have `alone`."""
    return {
        client: its.get("safeguarded", its[key]) if key == "value" else its[key]
        for client, its in run.clients.items()
    }


def summary(runs: Sequence[Run], alone: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Figures over seeds, and who loses beyond noise: by more than two standard errors of the gain, three seeds or more."""
    gains = [
        {
            client: 100 * (value - before[client]) / before[client]
            for client, value in values(run).items()
            if before[client]
        }
        for run, before in zip(runs, alone, strict=True)
    ]
    of = {id(run): its for run, its in zip(runs, gains, strict=True)}

    def figures(run: Run) -> dict[str, float]:
        its = of[id(run)]
        lost = sum(gain < 0 for gain in its.values())
        return {
            "delta": mean(its.values()),
            "worst_gain": min(its.values()),
            "losers": lost,
            "megabytes": megabytes(run),
            **values(run),
        }

    each = {client: [its[client] for its in gains if client in its] for client in gains[0]}
    lost = [
        client
        for client, its in each.items()
        if len(its) > 2 and mean(its) + 2 * stdev(its) / len(its) ** 0.5 < 0
    ]
    return averages(runs, figures) | {
        "losers_beyond_noise": len(lost),
        "gains": {c: round(mean(its), 2) for c, its in each.items()},
    }


# muscle

BATCH, WIDTH = 32, 256
MUSCLE_BARS = {3: 25.0, 4: 300.0}  # times faster than the literal form
LITERAL_GIB = 5.0  # what the literal form may take at M=4 with its gradients


@benchmark("muscle")
def bench_muscle(quick: bool = False) -> dict:
    """Measures the Muscle loss against the paper's literal sum: time, memory and accuracy. Knows nothing of federations; writes no files.

        python -c "from unalike.benches import muscle; print(muscle.run())"

    Times are of loss and gradient at B=32, d=256 in float32, t=0.2, t_low=0.15, one thread for both sides (a second thread on a shared core
    measures the neighbours), the two sides taking turns, the fastest turn of each; a turn of ours is the median
    of 9, being so short. The literal form is measured whole: S is in memory at
    once, 32 MiB at M=3 and 1 GiB at M=4, and `muscle_literal` alone is timed, nothing chunked and nothing recomputed. `anchor` is the gradient
    with respect to z, all that FedMuscle needs; `all` adds the peers.

        A flat dict of numbers, each with its bar where there is one; None where it was not measured. `quick` skips the literal M=4.

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
        found[f"{name}_times_faster_bar"] = MUSCLE_BARS[peers]
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


# muscle-batch

BATCHES = (32, 8, 16, 64, 128)


@benchmark("muscle-batch")
def bench_muscle_batch(study: Study) -> dict:
    """Rows of the public set at a time in FedMuscle (the paper's Figure 5)."""
    told = table(
        study, {f"B={batch}": (scenario(study), [f"algorithm.batch={batch}"]) for batch in BATCHES}
    )
    return curves(told, "B", {"FedMuscle": {batch: f"B={batch}" for batch in BATCHES}})


# muscle-cross-temperature

PIXELS, NEWS = (6, 7), (8, 9)  # places of these clients in the scenario
LARGE = 100.0


@benchmark("muscle-cross-temperature")
def bench_muscle_cross_temperature(study: Study) -> dict:
    """A large temperature between clients that mark pixels and clients that read, in `muscle-multimodal` (the paper's Table 9).

    Both temperatures of such a pair are large, in the proportion of the others.
    """
    clients, apart = (6, ((0, 1), (2, 3))) if study.quick else (10, (PIXELS, NEWS))
    upper, lower = (
        matrix(clients, apart, usual, large)
        for usual, large in ((0.2, LARGE), (0.15, 0.75 * LARGE))
    )
    settings = {
        "0.2 for all": [FREE],
        "100 between pixels and news": [FREE, f"temperature={upper}", f"lower_temperature={lower}"],
    }
    return table(
        study,
        {name: (scenario(study, "muscle-multimodal"), each) for name, each in settings.items()},
    )


def matrix(
    clients: int, apart: tuple[tuple[int, ...], tuple[int, ...]], usual: float, large: float
) -> list[list[float]]:
    """One per pair of clients, large between the two groups."""
    far = {pair for a in apart[0] for b in apart[1] for pair in ((a, b), (b, a))}
    return [[large if (a, b) in far else usual for b in range(clients)] for a in range(clients)]


# muscle-d-temperature

TEMPERATURES, WIDTHS = ((0.1, 0.075), (0.3, 0.225), (0.5, 0.375)), (64, 128, 512)
SHIPPED = "d=256, 0.2 and 0.15"


@benchmark("muscle-d-temperature")
def bench_muscle_d_temperature(study: Study) -> dict:
    """Width of FedMuscle's representations and its two temperatures (the paper's Figure 11).

    Another width is another model alone as well: such rows are trained alone too.
    """
    settings: dict[str, list[str]] = {SHIPPED: []}
    for upper, lower in TEMPERATURES:
        settings[f"d=256, {upper} and {lower}"] = [
            f"temperature={upper}",
            f"lower_temperature={lower}",
        ]
    settings |= {f"d={width}": [f"algorithm.width={width}", "alone=true"] for width in WIDTHS}
    told = table(study, {name: (scenario(study), each) for name, each in settings.items()})
    return curves(
        told, "d", {"FedMuscle": {256: SHIPPED} | {width: f"d={width}" for width in WIDTHS}}
    )


# muscle-ert

ROUNDS, PASSES = (1, 10, 25), (1, 3, 5)


@benchmark("muscle-ert")
def bench_muscle_ert(study: Study) -> dict:
    """Local epochs, rounds and passes of FedMuscle at equal local work, 150 epochs (the paper's Table 8).

    Clients alone do the same 150 epochs whatever the rounds, so that one row's clients alone serve all.
    """
    settings = {
        f"R={rounds}, T={passes}": [
            f"rounds={rounds}",
            f"epochs={150 // rounds}",
            f"passes={passes}",
        ]
        for rounds in reversed(ROUNDS)
        for passes in PASSES
    }
    told = table(study, {name: (scenario(study), each) for name, each in settings.items()})
    return curves(
        told,
        "R",
        {
            f"T={passes}": {rounds: f"R={rounds}, T={passes}" for rounds in ROUNDS}
            for passes in PASSES
        },
    )


# muscle-flops


@benchmark("muscle-flops")
def bench_muscle_flops(study: Study) -> dict:
    """Operations of a round of `muscle-vision` for each client and the server, by method: the last row of the paper's Table 1.

    Megaflops, counted as in `rivals-flops`, in this process.
    """
    which, rows = scenario(study), {"local": ["algorithm={name: local}"], **METHODS}
    chosen = [name for name in rows if not study.only or any(word in name for word in study.only)][
        : 2 if study.quick else None
    ]
    told = {
        name: round_of(
            which, [*rows[name], f"device={study.device}", *study.settings], study.data_dir
        )
        for name in chosen
    }
    return {"scenario": which, "rows": told}


# muscle-map

CLIENTS = range(6)
ENCODERS = {  # weak to strong, alone; each for every client
    "from scratch": "{name: cnn, channels: [32, 64, 128, 128], width: 128, norm: group}",
    "random weights, whole": "{name: efficientnet, weights: none, size: 96}",
    "lite0 to stage 5": "{name: efficientnet, stage: 5, size: 96, adapters: 16, adapted: 5}",
    "lite0": "{name: efficientnet, size: 96, adapters: 16, adapted: 8}",
    "lite0 at 192 pixels": "{name: efficientnet, size: 192, adapters: 16, adapted: 8}",
}
LEARNING = {  # of lite0, little to all
    "last stages learn": "{name: efficientnet, size: 96, adapters: 16, adapted: 6}",
    "every stage learns": "{name: efficientnet, size: 96, adapters: 16, adapted: 1}",
    "all learns": "{name: efficientnet, size: 96}",
}
LABELS = {
    "a quarter of the labels": (50, 50, 50, 25, 25, 12),
    "four times the labels": (800, 800, 800, 400, 400, 200),
}
LEFT = 3300  # public photographs of VOC where its clients have four times the labels
NEAR = {
    "public Flickr8k": ["public.data=flickr8k", "public.size=4000"],
    "public Caltech-101": ["public.data=caltech101", "public.size=3000"],
    "public VOC and Caltech-101": ["public.data=[voc2012, caltech101]", "public.size=4000"],
    "Flickr8k, guarded": ["public.data=flickr8k", "public.size=4000", "safeguard=true"],
    "4000 of VOC, 4000 of Caltech-101": ["public.data=[voc2012, caltech101]", "public.size=8000"],
    "public images of a program": ["public.data=generated", "public.size=5000"],
    "some of every client's kind": [
        "public.data=[voc2012, caltech101, cifar10]",
        "public.size=4000",
    ],
}
ALIGNED = {  # harder and gentler than shipped
    "align_rate 1e-3": ["align_lr=0.001"],
    "align_rate 3e-5": ["align_lr=0.00003"],
    "temperature 0.5": ["temperature=0.5", "lower_temperature=0.4"],
    "temperature 0.07": ["temperature=0.07", "lower_temperature=0.05"],
    "local epochs teach all": ["backbone_lr_scale=1.0"],
    "local epochs teach heads": ["backbone_lr_scale=0.0"],
    "left as aligned": ["final_model=aligned"],
    "heads shared, one optimizer": [
        "algorithm={name: fedmuscle, average_heads: round, optimizers: one}"
    ],
}


@benchmark("muscle-map")
def bench_muscle_map(study: Study) -> dict:
    """When FedMuscle helps: strength of the encoders, number of labels, nearness of the public set, what learns, and how hard it is aligned.

    The scenario as it is, then one thing changed at a time; rows with other models, labels or labelled rows are trained alone too.
    """
    settings: dict[str, list[str]] = {"as shipped": []}
    if study.quick:
        return table(study, {name: ("digits", each) for name, each in (settings | ALIGNED).items()})
    for name, model in (ENCODERS | LEARNING).items():
        settings[name] = [*(f"clients.{i}.model={model}" for i in CLIENTS), "alone=true"]
    for name, counts in LABELS.items():
        settings[name] = [
            *(f"clients.{i}.train={count}" for i, count in zip(CLIENTS, counts, strict=True)),
            "alone=true",
            *([f"public.size={LEFT}"] if counts[0] > 200 else []),
        ]
    settings |= {name: [*each, "alone=true"] for name, each in NEAR.items()} | ALIGNED
    return table(study, {name: (scenario(study), each) for name, each in settings.items()})


# muscle-multimodal

FREE = "safeguard=false"
ROWS: dict[str, list[str]] = {
    "as shipped": [],  # M=3, and who shares its head with nobody may stay alone
    "muscle, M=3": [FREE],
    "pairwise, M=3": [FREE, "algorithm.loss=pairwise"],
    "own heads, M=3": [FREE, "algorithm.average_heads=never"],
    "muscle, M=9": [
        FREE,
        "algorithm.peers=9",
    ],  # of 32^9 combinations 64 are drawn for each row and batch
}


@benchmark("muscle-multimodal")
def bench_muscle_multimodal(study: Study) -> dict:
    """FedMuscle on `muscle-multimodal`, where clients see, mark pixels or read: gains over training alone (the paper's Table 2), and M = 9."""
    return table(
        study,
        {name: (scenario(study, "muscle-multimodal"), settings) for name, settings in ROWS.items()},
    ) | {"delta_bar": 0.0}


# muscle-noniid


@benchmark("muscle-noniid")
def bench_muscle_noniid(study: Study) -> dict:
    """FedMuscle where clients of one task have unlike labels, with 4, 8 and 12 clients (the paper's Table 4).

    Whoever is left out, the others hold the same rows and begin alike, so that clients alone are those of the whole federation.
    """
    which, counts = scenario(study, "muscle-noniid"), (6, 5, 4) if study.quick else (12, 8, 4)
    everyone = load_mapping(which)["clients"]
    some = {count: [f"clients={json.dumps(everyone[:count])}"] for count in counts}
    rows = {f"heads shared, N={count}": (which, settings) for count, settings in some.items()}
    rows |= {
        f"as printed, N={count}": (which, [*settings, "algorithm={name: fedmuscle}"])
        for count, settings in some.items()
    }
    lines = {
        how: {count: f"{how}, N={count}" for count in counts}
        for how in ("heads shared", "as printed")
    }
    return curves(table(study, rows), "clients", lines)


# muscle-peers

PEERS: dict[int, list[str]] = {
    3: [],
    1: [],
    2: [],
    4: [],
    5: ["algorithm.samples=64"],
}  # of 32^5 combinations 64 are drawn


@benchmark("muscle-peers")
def bench_muscle_peers(study: Study) -> dict:
    """How many peers FedMuscle's clients are drawn to, and what travels (the paper's Table 5; `bytes` tells of its own form, too)."""
    told = table(
        study,
        {f"M={m}": (scenario(study), [f"algorithm.peers={m}", *more]) for m, more in PEERS.items()},
    )
    return curves(told, "M", {"FedMuscle": {m: f"M={m}" for m in PEERS}})


# muscle-public

SIZES, PUBLIC_PASSES = (5000, 2500, 1000, 300), (1, 3)


@benchmark("muscle-public")
def bench_muscle_public(study: Study) -> dict:
    """Size of FedMuscle's public set against what travels (the paper's Figure 4), and which set it is.

    A public set cut from a client's dataset leaves it other labelled rows: such rows are trained alone too.
    """
    settings = {
        f"|D|={size}, T={passes}": [
            "public.data=flickr8k",
            f"public.size={size}",
            f"passes={passes}",
        ]
        for size in SIZES
        for passes in PUBLIC_PASSES
    }
    settings["VOC, |D|=4000"] = ["public.data=voc2012", "public.size=4000", "alone=true"]
    settings["Caltech-101, |D|=4000"] = ["public.data=caltech101", "public.size=4000", "alone=true"]
    told = table(study, {name: (scenario(study), each) for name, each in settings.items()})
    lines = {
        f"T={passes}": [row for size in SIZES if (row := f"|D|={size}, T={passes}") in told["rows"]]
        for passes in PUBLIC_PASSES
    }
    return curves(
        told,
        "megabytes of a client and round",
        {name: {told["rows"][row]["megabytes"]: row for row in its} for name, its in lines.items()},
    )


# muscle-sampled

SAMPLED_WIDTH, TRIES = 256, 40
LIKENESS = {
    "apart": 0.0,
    "somewhat alike": 1.0,
    "alike": 2.0,
}  # how much of the same is in every model's view of a row
SAMPLED_SIZES = ((3, 32), (9, 4), (9, 32))  # peers, rows; the first two can be summed up whole
REFERENCE = 8192  # combinations where they cannot


@benchmark("muscle-sampled")
def bench_muscle_sampled(quick: bool = False) -> dict:
    """How far the estimated Muscle loss and its gradient are from the exact ones: bias, spread, and direction, by the combinations drawn.

    Of the gradient with respect to the anchor: the length of its mean error and of its spread, in parts of its own, and its cosine.
    """
    rows = {}
    for peers, batch in SAMPLED_SIZES[: 2 if quick else None]:
        for name, share in LIKENESS.items():
            z, *others = views(peers, batch, share)
            truth, way = exact(z, others)
            for count in (16, 64, 256)[: 1 if quick else None]:
                rows[f"M={peers}, B={batch}, {name}, {count} drawn"] = figures(
                    z, others, truth, way, count, 5 if quick else TRIES
                )
    return {"width": SAMPLED_WIDTH, "rows": rows}


def views(peers: int, batch: int, share: float) -> list[Tensor]:
    """Of the anchor and its peers, (batch, WIDTH) each; all have a direction in common, as features have."""
    draw = torch.Generator().manual_seed(0)
    common, offset = (
        torch.randn(batch, SAMPLED_WIDTH, generator=draw),
        torch.randn(SAMPLED_WIDTH, generator=draw),
    )
    return [
        (share * common + torch.randn(batch, SAMPLED_WIDTH, generator=draw) + offset / 2).double()
        for _ in range(peers + 1)
    ]


def exact(z: Tensor, others: list[Tensor]) -> tuple[float, Tensor]:
    """Loss and gradient by all combinations, or by very many where there are too many."""
    if len(z) ** len(others) <= 2**20:
        return graded(z, lambda anchor: muscle_loss(anchor, others))
    draw = torch.Generator().manual_seed(1)
    found = [
        graded(
            z,
            lambda anchor: muscle_sampled(
                anchor, others, torch.rand(len(others), len(z), REFERENCE, generator=draw)
            ),
        )
        for _ in range(4)
    ]
    return mean(loss for loss, _ in found), torch.stack([way for _, way in found]).mean(0)


def graded(z: Tensor, loss) -> tuple[float, Tensor]:
    anchor = z.clone().requires_grad_()
    value = loss(anchor)
    return float(value.detach()), torch.autograd.grad(value, anchor)[0]


def figures(
    z: Tensor, others: list[Tensor], truth: float, way: Tensor, count: int, tries: int
) -> dict[str, float]:
    draw, begun = torch.Generator().manual_seed(2), time.perf_counter()
    found = [
        graded(
            z,
            lambda anchor: muscle_sampled(
                anchor, others, torch.rand(len(others), len(z), count, generator=draw)
            ),
        )
        for _ in range(tries)
    ]
    took = (time.perf_counter() - begun) / tries
    losses, ways = [loss for loss, _ in found], torch.stack([each for _, each in found])
    middle = ways.mean(0)
    cosines = torch.cosine_similarity(ways.flatten(1), way.flatten()[None])
    off, noise = (
        (middle - way).norm() / way.norm(),
        (ways - middle).flatten(1).norm(dim=1).mean() / way.norm(),
    )
    return {
        "loss": truth,
        "bias": mean(losses) - truth,
        "deviation": stdev(losses),
        "gradient_bias": float(off),
        "gradient_noise": float(noise),
        "cosine": float(cosines.mean()),
        "milliseconds": 1e3 * took,
    }


# muscle-speed

LABELLED = (200, 200, 200, 100, 100, 50)  # as in muscle-vision
LITE = (1, 0, 2, 1, 0, 0)
SKIPPED = 3  # rounds: images go through the trunk, and the last batch comes for the third time


@benchmark("muscle-speed")
def bench_muscle_speed(study: Study) -> dict:
    """Seconds of a FedMuscle round at full size, six clients and 5000 public images, and of its parts. All is random.

    Parts are timed in runs of their own, which wait for the GPU around each. `..._played`: how many shapes of the loss, and of passes of
    all clients, were recorded.
    """
    told: dict[str, Any] = {}
    for how in ("recorded", "as written"):
        if study.only and how not in study.only:
            continue
        whole, _, played = seconds(study, how)
        waited, parts, too = seconds(study, how, apart=True)
        contrast = anchored_contrast.stacked("muscle", 0, temperature=0.2, lower_temperature=0.15)
        told[how] = {
            "seconds_a_round": whole,
            "seconds_waited": waited,
            "loss_share": parts["loss"] / waited,
            "loss_played": sum(map(bool, contrast.graphs.values())),
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
    algorithm = ALGORITHMS["fedmuscle"]()
    training = Training(rounds=rounds, epochs=6)
    gradients = AnchoredContrast.gradients
    parts: dict[str, float] = defaultdict(float)
    moments: list[tuple[float, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        engine = LocalEngine(
            clients,
            partial(build_runtime, algorithm=algorithm, training=training, seed=0),
            Path(folder),
        )
        fed: Any = Federation(engine, training, FederationConfig(evaluations=1), 0)
        if apart:
            fed.call = timed(fed.call, parts)
            AnchoredContrast.gradients = timed(gradients, parts, "loss")  # type: ignore[method-assign]
        try:
            use_cuda_graphs(how == "recorded")
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
                        for made in program.graphed_forward.graphs.values()
                    ),
                )
            )
        finally:
            use_cuda_graphs(True)
            AnchoredContrast.gradients = gradients  # type: ignore[method-assign]
            engine.close()
    (begun, before), (ended, after), count = moments[skipped - 1], moments[-1], rounds - skipped
    return (
        (ended - begun) / count,
        {name: (after[name] - before.get(name, 0.0)) / count for name in after},
        played,
    )


def use_cuda_graphs(enabled: bool) -> None:
    """Whether a GPU replays captured passes of clients and the server's losses."""
    anchored_contrast.USE_CUDA_GRAPHS = public_alignment.USE_CUDA_GRAPHS = enabled
    anchored_contrast.stacked.cache_clear()


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
