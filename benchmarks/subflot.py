"""Benchmarks of SubFLOT."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from statistics import mean, stdev
from typing import Any

import torch
from torch import nn

from benchmarks.fednca import wait
from benchmarks.study import Row, Study, averages, benchmark, megabytes
from unalike.algorithms.subflot import SubFLOT
from unalike.base.types import Parameters
from unalike.matching import Matcher
from unalike.methods.robust import Upload
from unalike.methods.submodels import masked_mean
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
from unalike.scenarios import load
from unalike.training.loop import Training, build_optimizer, step

# subflot: methods compared; the tables of this file are built here, too

DATASETS = ("cifar10", "pacs", "agnews", "hapt")
SMALL = ("cifar10", "agnews")  # datasets of benchmarks with many rows
OWN_NETS = ("cifar10", "pacs", "hapt", "digits")  # where clients begin with nets of their own
GROUPS = {"hapt": 3}  # groups of clients by capacity in the scenario of a dataset, if not 4
PENALTY_OF = {
    "agnews": 0.001,
    "hapt": 0.01,
    "digits": 0.01,
}  # lambda, if not 1: Adam's larger steps
LR_FACTORS = (1 / 3, 1, 3)  # learning rates tried, of the scenario's
OTHER_FACTORS = {"hapt": (1, 3, 9), "agnews": (1, 3)}  # Adam; the lowest was never best on HAPT
CHOOSING = (100,)  # seeds on which a row's rate is chosen, with half the rounds
RATE_OF = {  # variants of a method take its rate
    "subflot, spread plans": "subflot",
    "subflot, masked": "subflot",
    "heterofl": "heterofl, unmasked",
    "fedavg, full width, masked": "fedavg, full width",
}
HETEROFL = "algorithm={name: heterofl}"
UNMASKED = "algorithm={name: heterofl, masked: false}"
SUBFLOT = "algorithm={name: subflot}"
ALONE = "alone=true"  # the run's baseline: training alone at a client's own width
FULL_WIDTH, SMALLEST_WIDTH, FINETUNE = "full width", "smallest width", "finetune"  # `settings_of`
# Methods whose clients are measured with what was merged end with a round of own epochs instead of
# a merge, so that all rows are measured with what clients trained last.
UNMERGED = "unmerged"
SAFEGUARD = "safeguard=true"
LOCAL = "local, own width"
FINETUNED, SAFEGUARDED = ", finetune", ", safeguard"  # ends of names; such rows keep the rate
PLAIN_METHODS: dict[str, list[str]] = {
    "subflot": [SUBFLOT],
    "subflot, spread plans": [SUBFLOT, "solver=auto"],
    "subflot, masked": [SUBFLOT, "algorithm.masked=true"],
    "heterofl": [HETEROFL],
    "heterofl, unmasked": [UNMASKED, ALONE],
    "fedavg, full width": [UNMASKED, FULL_WIDTH],
    "fedavg, full width, masked": [HETEROFL, FULL_WIDTH],
    "fedrolex": ["algorithm={name: fedrolex}"],
    "feddropout": ["algorithm={name: feddropout}"],
    "feddse": ["algorithm={name: feddse}"],
    "flexfl": ["algorithm={name: flexfl}"],
    "depthfl": ["algorithm={name: depthfl}", UNMERGED],
    "scalefl": ["algorithm={name: scalefl}", UNMERGED],
    "fedavg, smallest width": [
        "algorithm={name: heterofl, masked: false, scaler: false}",
        SMALLEST_WIDTH,
    ],
}
METHODS: dict[str, list[str]] = {
    **PLAIN_METHODS,
    LOCAL: [UNMASKED, ALONE],  # what its clients reach alone, see `figures_alone`
    **{
        f"{name}{FINETUNED}": [*(s for s in row if s not in (ALONE, UNMERGED)), FINETUNE]
        for name, row in PLAIN_METHODS.items()
    },
    f"subflot{FINETUNED}{SAFEGUARDED}": [SUBFLOT, FINETUNE, ALONE, SAFEGUARD],
    f"heterofl, unmasked{FINETUNED}{SAFEGUARDED}": [UNMASKED, FINETUNE, ALONE, SAFEGUARD],
    "local, full width": ["algorithm={name: local}"],
}
EARLY_EXITS = ("depthfl", "scalefl")
RIVALS = ("fedrolex", "flexfl", *EARLY_EXITS, "feddse")
MASKED = ("heterofl", "subflot, masked", "fedavg, full width, masked")
CORE = (
    LOCAL,
    "heterofl, unmasked",
    "subflot",
    f"subflot{FINETUNED}",
    "fedavg, full width",
    f"heterofl, unmasked{FINETUNED}",
    f"fedavg, full width{FINETUNED}",
)
SPREAD = ("subflot, spread plans", f"subflot, spread plans{FINETUNED}")
GUARDED = (
    f"subflot{FINETUNED}{SAFEGUARDED}",
    f"heterofl, unmasked{FINETUNED}{SAFEGUARDED}",
)
# Rows that say whether the method is worth having, in order of importance. On PACS everyone has
# all labels, so that nothing is masked; fastText has too few layers for early exits.
BARS = {
    "pacs": (*CORE, *SPREAD, *GUARDED),
    "cifar10": (*CORE[:5], "heterofl", *CORE[5:], "subflot, masked", *SPREAD, *GUARDED),
    "hapt": (
        *CORE,
        *RIVALS,
        *(f"{name}{FINETUNED}" for name in RIVALS),
        *GUARDED,
        "local, full width",
        "heterofl",
        f"heterofl{FINETUNED}",
    ),
    "agnews": (*CORE, *GUARDED, "heterofl", "subflot, masked", *SPREAD),
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
TARGET = 80.0  # accuracy; the paper reports the time until it is reached


@benchmark("subflot")
def bench_subflot(study: Study) -> dict:
    """SubFLOT against other methods with submodels, on four datasets: mean client accuracy.

    Accuracy of the clients' own models on their own test sets. One row per dataset and method,
    three seeds; clients, data and budget are the same for all: rows with own epochs at the end
    have a quarter fewer rounds. Each method's learning rate is the best of three on another
    seed with half the rounds; without own epochs, and kept with them. `degraded` are clients below the same client
    trained alone at its own width, in the mean over seeds, `beyond_noise` by more than two standard
    errors of that mean.
    """
    return compare_methods(study, rows_of(study, DATASETS, METHODS))


@benchmark("subflot-bars")
def bench_subflot_bars(study: Study) -> dict:
    """The rows of `subflot` that its bars are about, the most important first; for `--minutes`."""
    rows: dict[str, Row] = {}
    for dataset, names in BARS.items():
        rows |= rows_of(study, (dataset,), {name: METHODS[name] for name in names})
    return compare_methods(study, rows)


def compare_methods(study: Study, rows: dict[str, Row]) -> dict:
    """The table of these rows, with a learning rate chosen for each method and dataset."""
    rates: dict[str, float] = {}
    if not study.quick:
        # A study's settings would come last, and undo the rounds of rows with own epochs.
        rounds = [setting for setting in study.settings if setting.startswith("rounds=")]
        others = [setting for setting in study.settings if setting not in rounds]
        study = replace(study, settings=tuple(others))
        rows = {
            name: (where, [*rounds, *settings])
            for name, (where, settings) in rows.items()
            if runs_on(name)
        }
        rows, rates = with_rates(study, rows)
    # nothing to run where no search was finished in time
    return {"rates": rates, **(table(study, rows, PAPER) if rows else {"rows": {}})}


def runs_on(name: str) -> bool:
    """Whether a row is for a dataset.

    fastText has too few layers for early exits; on PACS everyone has all labels, and masks nothing.
    """
    dataset, _, method = name.partition(" ")
    plain = method.removesuffix(SAFEGUARDED).removesuffix(FINETUNED)
    if dataset == "agnews":
        return plain not in EARLY_EXITS
    return dataset != "pacs" or plain not in MASKED


def rate_from(name: str) -> str:
    """The row whose learning rate a row takes: that of its method, without own epochs."""
    dataset, _, method = name.partition(" ")
    plain = method.removesuffix(SAFEGUARDED).removesuffix(FINETUNED)
    return f"{dataset} {RATE_OF.get(plain, plain)}"


def with_rates(study: Study, rows: Mapping[str, Row]) -> tuple[dict[str, Row], dict[str, float]]:
    """The selected rows, each with the learning rate that is best on another seed.

    Rows are left out for whose method no run of the search was finished.

    Returns: the rows, and the accuracy of each rate that was tried.
    """
    selected = {name: row for name, row in rows.items() if study.selects(name)}
    tried: dict[str, Row] = {}
    for name in dict.fromkeys(map(rate_from, selected)):
        scenario_name, settings = rows[name]
        training = load(scenario_name, settings=list(settings))[0].training
        half = f"rounds={max(1, training.rounds // 2)}"
        for factor in OTHER_FACTORS.get(name.partition(" ")[0], LR_FACTORS):
            setting = f"training.lr={training.lr * factor:.3g}"
            tried[f"{name}; {setting}"] = (scenario_name, [*PLAIN, *settings, half, setting])
    means: dict[str, float] = {}
    search_study = replace(study, only=(), seeds=CHOOSING)
    for name, runs in search_study.runs(tried).items():
        means[name] = round(mean(figures_of(name)(run)["accuracy"] for run in runs), 3)
    chosen: dict[str, Row] = {}
    for name, (scenario_name, settings) in selected.items():
        known = [key for key in means if key.startswith(f"{rate_from(name)}; ")]
        if known:
            best = max(known, key=means.__getitem__).partition("; ")[2]
            chosen[name] = (scenario_name, [*settings, best])
        else:
            study.left_out.append(f"{name}: no learning rate")
    for name, (scenario_name, settings) in chosen.items():
        # training alone at another rate than HeteroFL's has runs of its own
        local = chosen.get(f"{name.partition(' ')[0]} {LOCAL}")
        if name.endswith(" heterofl, unmasked") and local and local[1] != settings:
            chosen[name] = (scenario_name, [s for s in settings if s != ALONE])
    return chosen, means


def scenario(study: Study, dataset: str = "cifar10") -> str:
    """The scenario of a dataset, or `subflot-digits` in a quick benchmark."""
    if study.quick:
        return "subflot-digits"
    return "hapt-recordings" if dataset == "hapt" else f"subflot-{dataset}"


def settings_of(study: Study, dataset: str, values: Sequence[str]) -> list[str]:
    """Settings of a row on a dataset, with words such as FULL_WIDTH spelt out."""
    settings = []
    for value in values:
        if value in (FULL_WIDTH, SMALLEST_WIDTH):
            share = 1.0 if value == FULL_WIDTH else 0.25
            settings += capacities([share] * GROUPS.get(dataset, 4))
        elif value in (FINETUNE, UNMERGED):
            rounds, epochs = rounds_and_epochs(study, dataset)
            own = rounds // 4 if value == FINETUNE else 1
            settings += [f"rounds={rounds - own}", f"finetune={own * epochs}"]
        else:
            settings.append(value)
        if value == SUBFLOT and dataset in PENALTY_OF:
            settings.append(f"penalty={PENALTY_OF[dataset]}")
    return settings


def rounds_and_epochs(study: Study, dataset: str) -> tuple[int, int]:
    """Rounds and epochs of a dataset's rows: the scenario's, or those that the study sets."""
    budget = [s for s in study.settings if s.startswith(("rounds=", "epochs="))]
    training = load(scenario(study, dataset), settings=budget)[0].training
    return training.rounds, training.epochs


def capacities(shares: Sequence[float]) -> list[str]:
    """Settings of the capacity of every group of clients."""
    return [f"clients.{group}.capacity={share}" for group, share in enumerate(shares)]


def rows_of(
    study: Study, datasets: Sequence[str], settings: Mapping[str, Sequence[str]]
) -> dict[str, Row]:
    """A row for every dataset and every named list of settings."""
    rows: dict[str, Row] = {}
    for dataset in datasets:
        for name, values in settings.items():
            spelt_out = settings_of(study, "digits" if study.quick else dataset, values)
            rows[f"{dataset} {name}"] = (scenario(study, dataset), spelt_out)
    return rows


def table(
    study: Study, rows: Mapping[str, Row], paper: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Run the rows with three seeds; figures of each, beside the paper's accuracy if known."""
    configured = {name: (where, [*PLAIN, *settings]) for name, (where, settings) in rows.items()}
    summaries = {}
    measured = study.runs(configured, QUICK, range(3))
    for name, runs in measured.items():
        summaries[name] = averages(runs, figures_of(name))
        local = measured.get(f"{name.partition(' ')[0]} {LOCAL}", runs)
        summaries[name] |= compare_with_alone(name, runs, local)
        summaries[name]["to_80"] = mean_if_all([time_to_target(run) for run in runs])
        if paper and name in paper:
            summaries[name]["paper"] = paper[name]
    return {"rows": summaries}


def mean_if_all(times: list[float | None]) -> float | None:
    """The mean, or None if one of them is None."""
    known = [seconds for seconds in times if seconds is not None]
    return round(mean(known), 2) if len(known) == len(times) else None


def figures(run: Run) -> dict[str, float]:
    """Mean and worst accuracy, traffic and operations of a client and round, simulated time.

    With the safeguard accuracies are of the models that clients keep. Where clients trained alone,
    too, `alone` is the mean accuracy of these models.
    """
    results = run.results or {}
    clients = list(run.clients.values())
    flops = sum(client["round_flops"] for client in clients)
    kept = client_values(run, "value").values()
    guarded = "safeguarded" in clients[0]
    summary = {
        "accuracy": mean(kept) if guarded else results["metrics"]["accuracy"],
        "worst": min(kept),
        "megabytes": megabytes(run),
        "gigaflops": flops / len(clients) / 1e9,
        "clock": results["clock"],
    }
    if all(client.get("alone") is not None for client in clients):
        summary["alone"] = mean(client["alone"] for client in clients)
    return summary


def figures_of(name: str) -> Callable[[Run], dict[str, float]]:
    """What is reported of a row's runs."""
    if name.partition(";")[0].endswith(LOCAL):
        return figures_alone
    return figures


def figures_alone(run: Run) -> dict[str, float]:
    """Mean and worst accuracy of the same clients trained alone at their own width."""
    values = client_values(run, "alone")
    return {"accuracy": mean(values.values()), "worst": min(values.values())}


def client_values(run: Run, column: str) -> dict[str, float]:
    """A column of the run's table by client; where there is a safeguard, of what clients keep."""
    return {
        name: client.get("safeguarded", client[column]) if column == "value" else client[column]
        for name, client in run.clients.items()
    }


def compare_with_alone(name: str, runs: Sequence[Run], local: Sequence[Run]) -> dict[str, Any]:
    """Clients that are worse than alone at their own width in the mean, and beyond noise.

    Those of a row with the safeguard are compared with their own run's local baseline, which is
    what it decides between.
    """
    if SAFEGUARDED in name:
        local = runs
    if name.endswith(LOCAL) or any(
        c.get("alone") is None for run in local for c in run.clients.values()
    ):
        return {}
    gains: dict[str, list[float]] = {}
    by_seed = {run.seed: run for run in local}  # some may be left out
    for run in runs:
        other = by_seed.get(run.seed)
        if other is None:
            continue
        values, alone = client_values(run, "value"), client_values(other, "alone")
        for client in values:
            gains.setdefault(client, []).append(values[client] - alone[client])
    degraded = [client for client, gain in gains.items() if mean(gain) < 0]
    beyond = [
        client for client in degraded if mean(gains[client]) < -2 * standard_error(gains[client])
    ]
    return {"degraded": len(degraded), "beyond_noise": len(beyond)}


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean; 0 of one value."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def time_to_target(run: Run) -> float | None:
    """Simulated time when the mean accuracy first reached 80 %, or None if it never did."""
    clock = {event["round"]: event["clock"] for event in run.events if event["event"] == "round"}
    for event in run.events:
        if event["event"] != "evaluation" or event.get("who") == "alone":
            continue
        if event["figures"].get("accuracy", 0) >= TARGET:
            return clock[event["round"]]
    return None


# subflot-ablation: parts of the method

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
PARTS = ("all parts", "without OTP", "without SAR", "without OTA")
OWN_START = {f"own start, {name}": [SUBFLOT, *WITHOUT[name], "start=own"] for name in PARTS}
OWN_START["own start, heterofl"] = [UNMASKED, "start=own"]
ABLATION_PAPER = {
    "cifar10 all parts": 83.78,
    "cifar10 without OTP": 83.21,
    "cifar10 without SAR": 82.77,
    "cifar10 without OTA": 81.41,
}


@benchmark("subflot-ablation")
def bench_subflot_ablation(study: Study) -> dict:
    """SubFLOT without transport in extraction (OTP) or merging (OTA), or the penalty (SAR).

    The paper's ablation: CIFAR-10 with Dirichlet 0.1, and AG News as shipped, Dirichlet 0.5. Rows
    called "own start" are CIFAR-10, with Dirichlet as well, PACS, HAPT and digits, whose clients
    begin with nets of their own: only then is there something to match.
    """
    rows = rows_of(study, SMALL, WITHOUT) | rows_of(study, OWN_NETS, OWN_START)
    if not study.quick:
        for name, (scenario_name, settings) in rows.items():
            if name.startswith("cifar10"):
                rows[name] = (scenario_name, [SKEWED, *settings])
    return table(study, rows, ABLATION_PAPER)


# subflot-scale: more clients, partial participation

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
    """SubFLOT with 50 and 100 clients, a tenth in each round, against other submodel methods.

    The widths are spread evenly over the clients.
    """
    participation = [] if study.quick else ["federation.participation=0.1"]
    settings = {}
    for clients in CLIENTS:
        share, remainder = divmod(clients, 4)
        counts = [f"clients.{group}.count={share + (group < remainder)}" for group in range(4)]
        for name in SHOWN:
            settings[f"{clients} clients {name}"] = [*METHODS[name], *counts, *participation]
    return table(study, rows_of(study, SMALL, settings))


# subflot-server: cost of transport at the server

RATIOS = (1.0, 0.75, 0.5, 0.25)
# A client's round in the paper: three quarters of a twentieth of CIFAR-10.
ROWS, EPOCHS, BATCH = 1875, 5, 256
SERVER_CLIENTS = 5  # of each width, as in the scenarios; they are matched together


@benchmark("subflot-server")
def bench_subflot_server(study: Study) -> dict:
    """Server seconds of SubFLOT to extract and to merge a client's submodel of a ResNet-18.

    For each width the best of three, per client of five, with SubFLOT's default solver. `under`
    is the bar for both together. On a GPU also as a share of the client's training time.
    """
    torch.manual_seed(0)
    method, device = SubFLOT(), study.device
    channels, width = (8, 64) if study.quick else (64, 512)
    model = nn.Sequential(ResNet18((3, 32, 32), channels), nn.Linear(width, 10)).to(device)
    groups = find_channel_groups(model, torch.zeros(1, 3, 32, 32, device=device))
    whole = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    rows = {}
    for ratio in RATIOS:
        units = first_units(groups, ratio)
        small_groups = reindex_groups(groups, units)
        submodels = [add_noise(extract(whole, groups, units)) for _ in range(SERVER_CLIENTS)]
        matcher = Matcher(method.inputs, method.solver)
        extraction = partial(
            matcher.transport, [whole] * SERVER_CLIENTS, submodels, groups, small_groups
        )
        merging = partial(merge, matcher, submodels, whole, small_groups, groups)
        otp = best_time(extraction, device) / SERVER_CLIENTS
        ota = best_time(merging, device) / SERVER_CLIENTS
        row = {"otp": round(otp, 4), "ota": round(ota, 4), "both": round(otp + ota, 4)}
        if torch.device(device).type == "cuda":
            training = best_time(partial(train_round, narrow_model(model, groups, units)), device)
            row["training"] = round(training, 4)
            row["percent"] = round(100 * (otp + ota) / training, 2)
        rows[f"width {ratio:g}"] = row
    total = sum(row["both"] for row in rows.values())
    result = {
        "rows": rows,
        "solver": method.solver,
        "seconds_a_client": round(total / len(rows), 4),
        "under": 0.5,
        "threads": torch.get_num_threads(),
    }
    total_training = sum(row.get("training", 0) for row in rows.values())
    if total_training:
        result["percent_of_training"] = round(100 * total / total_training, 2)
        result["percent_of_training_bar"] = 10.0
    return result


def add_noise(parameters: Parameters) -> Parameters:
    """Weights with noise of a tenth of their standard deviation; vectors stay as they are."""
    noisy = {}
    for name, tensor in parameters.items():
        if tensor.dim() > 1:
            tensor = tensor + 0.1 * tensor.std() * torch.randn_like(tensor)
        noisy[name] = tensor
    return noisy


def train_round(model: nn.Module) -> None:
    """Train for a client's round on one random batch, repeated."""
    device = next(model.parameters()).device
    x = torch.randn(BATCH, 3, 32, 32, device=device)
    y = torch.randint(10, (BATCH,), device=device)
    optimizer = build_optimizer(list(model.train().parameters()), Training(optimizer="sgd"))
    for _ in range(EPOCHS * ceil(ROWS / BATCH)):
        step(nn.functional.cross_entropy(model(x), y), optimizer)


def merge(
    matcher: Matcher,
    submodels: list[Parameters],
    whole: Parameters,
    small_groups: list[ChannelGroup],
    groups: list[ChannelGroup],
) -> None:
    """Merge uploads of one width into the whole model by transport (OTA)."""
    matcher.cache.clear()
    keys = [str(number) for number in range(len(submodels))]
    targets = [whole] * len(submodels)
    transported = matcher.transport(submodels, targets, small_groups, groups, keys)
    contributions = (
        Upload(key, state, matcher.pop_reached(key, groups, whole))
        for key, state in zip(keys, transported, strict=True)
    )
    masked_mean(whole, contributions, dict.fromkeys(keys, 1.0))


def best_time(work: Callable[[], object], device: str) -> float:
    """Seconds of the fastest of three calls."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        work()
        wait(device)
        times.append(time.perf_counter() - start)
    return min(times)


# subflot-sweep: hyperparameters, one at a time

ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)
PENALTIES = (0.0, 0.001, 0.01, 0.1, 1.0)
RATES = (0.0, 0.25, 0.5, 0.75)


@benchmark("subflot-sweep")
def bench_subflot_sweep(study: Study) -> dict:
    """SubFLOT by alpha, lambda and one pruning rate for all clients (Figures 4 and 5).

    One setting at a time, on CIFAR-10 and AG News; HeteroFL by the pruning rate, too.
    """
    settings = {f"alpha {value:g}": [f"alpha={value}"] for value in ALPHAS}
    settings |= {f"lambda {value:g}": [f"penalty={value}"] for value in PENALTIES}
    for rate in RATES:
        narrow = capacities([1 - rate] * 4)
        heterofl = [UNMASKED, *narrow]
        settings |= {f"rate {rate:g}": narrow, f"rate {rate:g} heterofl": heterofl}
    return table(study, rows_of(study, SMALL, settings))
