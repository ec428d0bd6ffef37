"""Benchmarks of SubFLOT."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import mean
from typing import Any

import torch
from torch import nn

from benchmarks.fednca import wait
from benchmarks.study import Row, Study, averages, benchmark
from unalike.algorithms.subflot import SubFLOT
from unalike.base.types import Parameters
from unalike.matching import Matcher
from unalike.methods.submodels import Contribution, masked_mean
from unalike.models.channel_groups import ChannelGroup
from unalike.models.classics import ResNet18
from unalike.models.submodels import (
    extract,
    find_channel_groups,
    first_units,
    narrow_model,
    reindex_groups,
)
from unalike.report import Run
from unalike.training.loop import Training, build_optimizer, step

# subflot

DATASETS = ("cifar10", "pacs", "agnews")
SMALL = ("cifar10", "agnews")  # of studies with many rows
GROUPS = range(4)  # of clients in each scenario, by capacity
METHODS: dict[str, list[str]] = {
    "subflot": [],  # as the scenario has it
    "subflot, spread plans": ["solver=auto"],
    "subflot, masked": ["algorithm.masked=true"],
    "heterofl": ["algorithm={name: heterofl}"],
    "heterofl, unmasked": ["algorithm={name: heterofl, masked: false}"],
    "fedrolex": ["algorithm={name: fedrolex}"],
    "feddropout": ["algorithm={name: feddropout}"],
    "feddse": ["algorithm={name: feddse}"],
    "flexfl": ["algorithm={name: flexfl}"],
    "fedavg, full width": [
        "algorithm={name: heterofl, masked: false}",
        *(f"clients.{i}.capacity=1.0" for i in GROUPS),
    ],
    "fedavg, smallest width": [
        "algorithm={name: heterofl, masked: false, scaler: false}",
        *(f"clients.{i}.capacity=0.25" for i in GROUPS),
    ],
    "local, full width": ["algorithm={name: local}"],
}
PAPER = {
    "cifar10 heterofl": 84.54,
    "cifar10 flexfl": 85.13,
    "cifar10 subflot": 86.89,
    "agnews heterofl": 84.12,
    "agnews flexfl": 86.02,
    "agnews subflot": 87.88,
    "pacs heterofl": 19.27,
    "pacs flexfl": 20.17,
    "pacs subflot": 41.58,
}
PLAIN = ("alone=false", "evaluations=10", "checkpoint=1000")
QUICK = ("rounds=2", "epochs=1")
TARGET = 80.0  # accuracy, of which the paper tells the time it takes


@benchmark("subflot")
def bench_subflot(study: Study) -> dict:
    """SubFLOT against methods that send submodels, on each dataset: mean accuracy of the clients' own models on their own test sets.

    A row for each dataset and method, three seeds; the same clients, rows and budget for all.
    """
    rows = {
        f"{dataset} {method}": (scenario(study, dataset), settings)
        for dataset in DATASETS
        for method, settings in METHODS.items()
    }
    return table(study, rows, PAPER)


def scenario(study: Study, dataset: str = "cifar10") -> str:
    return "subflot-digits" if study.quick else f"subflot-{dataset}"


def table(
    study: Study, rows: Mapping[str, Row], paper: Mapping[str, float] | None = None
) -> dict[str, Any]:
    made = study.runs(
        {name: (scenario, [*PLAIN, *settings]) for name, (scenario, settings) in rows.items()},
        QUICK,
        range(3),
    )
    return {
        "rows": {
            name: averages(runs, figures)
            | {"to_80": together([reached(run) for run in runs])}
            | ({"paper": paper[name]} if paper and name in paper else {})
            for name, runs in made.items()
        }
    }


def together(times: list[float | None]) -> float | None:
    """The mean, where all have one."""
    there = [time for time in times if time is not None]
    return round(mean(there), 2) if len(there) == len(times) else None


def figures(run: Run) -> dict[str, float]:
    """Accuracy, that of the worst client, and of a client and round the bytes that travel and the operations, and simulated time."""
    told, clients = run.results or {}, list(run.clients.values())
    visits = told["rounds"] * len(clients)
    return {
        "accuracy": told["metrics"]["accuracy"],
        "worst": min(c["value"] for c in clients),
        "megabytes": (told["bytes"]["up"] + told["bytes"]["down"]) / visits / 1e6,
        "gigaflops": sum(c["round_flops"] for c in clients) / len(clients) / 1e9,
        "clock": told["clock"],
    }


def reached(run: Run) -> float | None:
    """Simulated time when the mean accuracy first was 80 %, if ever it was."""
    clock = {event["round"]: event["clock"] for event in run.events if event["event"] == "round"}
    return next(
        (
            clock[event["round"]]
            for event in run.events
            if event["event"] == "evaluation" and event["figures"].get("accuracy", 0) >= TARGET
        ),
        None,
    )


# subflot-ablation

SKEWED = "data.partition={name: dirichlet, alpha: 0.1, minimum: 20}"
WITHOUT = {
    "all parts": [],
    "without OTP": ["otp=false"],
    "without SAR": ["penalty=0"],
    "without OTA": ["ota=false"],
    "not levelled": ["level=false"],
    "spread plans": ["solver=auto"],
    "spread plans, barycentre": ["solver=auto", "inputs=barycentre"],
    "entropic plans": ["solver=entropic"],
}
ABLATION_PAPER = {
    "cifar10 all parts": 83.78,
    "cifar10 without OTP": 83.21,
    "cifar10 without SAR": 82.77,
    "cifar10 without OTA": 81.41,
}


@benchmark("subflot-ablation")
def bench_subflot_ablation(study: Study) -> dict:
    """SubFLOT without its parts: extraction by transport (OTP), the penalty (SAR), merging by transport (OTA); the paper's ablation.

    CIFAR-10, Dirichlet 0.1, and AG News as it is, Dirichlet 0.5.
    """
    skew = {} if study.quick else {"cifar10": [SKEWED]}
    return table(
        study,
        {
            f"{dataset} {name}": (scenario(study, dataset), [*skew.get(dataset, []), *settings])
            for dataset in SMALL
            for name, settings in WITHOUT.items()
        },
        ABLATION_PAPER,
    )


# subflot-scale

CLIENTS = (50, 100)
SHOWN = (
    "subflot",
    "heterofl",
    "heterofl, unmasked",
    "fedrolex",
    "feddropout",
    "fedavg, full width",
)


@benchmark("subflot-scale")
def bench_subflot_scale(study: Study) -> dict:
    """SubFLOT among 50 and 100 clients of which a tenth takes part in a round, against methods that send submodels.

    As many clients of each width as can be.
    """
    counts = {
        n: [f"clients.{i}.count={n // len(GROUPS) + (i < n % len(GROUPS))}" for i in GROUPS]
        for n in CLIENTS
    }
    some = [] if study.quick else ["federation.participation=0.1"]
    return table(
        study,
        {
            f"{dataset} {n} clients {name}": (
                scenario(study, dataset),
                [*METHODS[name], *counts[n], *some],
            )
            for dataset in SMALL
            for n in CLIENTS
            for name in SHOWN
        },
    )


# subflot-server

RATIOS = (1.0, 0.75, 0.5, 0.25)
ROWS, EPOCHS, BATCH = (
    1875,
    5,
    256,
)  # a client's round in the paper: three quarters of a twentieth of CIFAR-10
SERVER_CLIENTS = 5  # of each width, as in the scenarios; they are matched together


@benchmark("subflot-server")
def bench_subflot_server(study: Study) -> dict:
    """What SubFLOT costs the server: seconds to extract and to merge one client's submodel of a ResNet-18; on a GPU beside a client's round.

    For each width the best of three, for one of five clients, with the plans SubFLOT makes unless told otherwise; `under` is the bar
    for both together. On a GPU also what share of a client's training it is.
    """
    torch.manual_seed(0)
    method, quick, device = SubFLOT(), study.quick, study.device
    model = nn.Sequential(
        ResNet18((3, 32, 32), 8 if quick else 64), nn.Linear(64 if quick else 512, 10)
    ).to(device)
    widths = find_channel_groups(model, torch.zeros(1, 3, 32, 32, device=device))
    whole = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    rows = {}
    for ratio in RATIOS:
        keep = first_units(widths, ratio)
        own = reindex_groups(widths, keep)
        small = [
            {
                name: tensor + 0.1 * tensor.std() * torch.randn_like(tensor)
                if tensor.dim() > 1
                else tensor
                for name, tensor in extract(whole, widths, keep).items()
            }
            for _ in range(SERVER_CLIENTS)
        ]
        matcher = Matcher(method.inputs, method.solver)
        otp = (
            best(partial(matcher.transport, [whole] * SERVER_CLIENTS, small, widths, own), device)
            / SERVER_CLIENTS
        )
        ota = best(partial(merged, matcher, small, whole, own, widths), device) / SERVER_CLIENTS
        rows[f"width {ratio:g}"] = {
            "otp": round(otp, 4),
            "ota": round(ota, 4),
            "both": round(otp + ota, 4),
        }
        if torch.device(device).type == "cuda":
            trained = best(partial(practice, narrow_model(model, widths, keep)), device)
            rows[f"width {ratio:g}"] |= {
                "training": round(trained, 4),
                "percent": round(100 * (otp + ota) / trained, 2),
            }
    mean = sum(row["both"] for row in rows.values()) / len(rows)
    told = {
        "rows": rows,
        "solver": method.solver,
        "seconds_a_client": round(mean, 4),
        "under": 0.5,
        "threads": torch.get_num_threads(),
    }
    if training := sum(row.get("training", 0) for row in rows.values()):
        told |= {
            "percent_of_training": round(100 * mean * len(rows) / training, 2),
            "percent_of_training_bar": 10.0,
        }
    return told


def practice(model: nn.Module) -> None:
    """A client's round on rows that mean nothing."""
    device = next(model.parameters()).device
    x, y = torch.randn(BATCH, 3, 32, 32, device=device), torch.randint(10, (BATCH,), device=device)
    optimizer = build_optimizer(list(model.train().parameters()), Training(optimizer="sgd"))
    for _ in range(EPOCHS * -(-ROWS // BATCH)):
        step(nn.functional.cross_entropy(model(x), y), optimizer)


def merged(
    matcher: Matcher,
    small: list[Parameters],
    whole: Parameters,
    own: list[ChannelGroup],
    widths: list[ChannelGroup],
) -> None:
    """OTA of uploads of one width."""
    matcher.cache.clear()
    keys = [str(n) for n in range(len(small))]
    carried = zip(
        keys, matcher.transport(small, [whole] * len(small), own, widths, keys), strict=True
    )
    masked_mean(
        whole,
        (
            Contribution(key, state, matcher.pop_reached(key, widths, whole))
            for key, state in carried
        ),
        dict.fromkeys(keys, 1.0),
    )


def best(work: Callable[[], object], device: str) -> float:
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        work()
        wait(device)
        times.append(time.perf_counter() - begun)
    return min(times)


# subflot-sweep

ALPHAS, PENALTIES, RATES = (
    (0.0, 0.25, 0.5, 0.75, 1.0),
    (0.0, 0.001, 0.01, 0.1, 1.0),
    (0.0, 0.25, 0.5, 0.75),
)


@benchmark("subflot-sweep")
def bench_subflot_sweep(study: Study) -> dict:
    """SubFLOT by its settings, one at a time: alpha, lambda, and one pruning rate for everybody; the paper's Figures 4 and 5.

    CIFAR-10 and AG News; by rate also HeteroFL.
    """
    rows = {f"alpha {value:g}": [f"alpha={value}"] for value in ALPHAS}
    rows |= {f"lambda {value:g}": [f"penalty={value}"] for value in PENALTIES}
    for rate in RATES:
        narrow = [f"clients.{i}.capacity={1 - rate}" for i in GROUPS]
        rows |= {
            f"rate {rate:g}": narrow,
            f"rate {rate:g} heterofl": ["algorithm={name: heterofl, masked: false}", *narrow],
        }
    return table(
        study,
        {
            f"{dataset} {name}": (scenario(study, dataset), settings)
            for dataset in SMALL
            for name, settings in rows.items()
        },
    )
