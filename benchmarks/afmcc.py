"""Benchmarks of AFMCC."""

import tempfile
import time
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.study import Row, Study, averages, benchmark
from unalike.algorithms import afmcc
from unalike.core.federation import Federation
from unalike.core.privacy import epsilon as epsilon_of
from unalike.core.privacy import noise_for
from unalike.data import Table
from unalike.data.multiview import multiview_table
from unalike.report import Run, history
from unalike.runs import prepare, run_scenario
from unalike.runs.run_folder import Folder
from unalike.scenarios import load

# afmcc: datasets and client ratios; the tables of this file are built here, too

PAPER = {  # ACC, NMI, ARI by dataset and client ratio, F/S or F/M/S
    "bdgp 2:1": (95.7, 87.2, 89.7),
    "bdgp 1:1": (93.9, 82.3, 85.4),
    "bdgp 1:2": (90.7, 75.3, 78.3),
    "mnist-usps 2:1": (98.0, 94.5, 95.5),
    "mnist-usps 1:1": (96.5, 91.2, 92.3),
    "mnist-usps 1:2": (94.3, 86.9, 87.8),
    "multi-fashion 2:1": (93.4, 87.7, 86.5),
    "multi-fashion 1:1": (91.8, 84.5, 83.5),
    "multi-fashion 1:2": (87.8, 79.3, 76.5),
    "multi-fashion 1:1:1": (91.8, 85.1, 83.6),
    "multi-fashion 0:1:1": (87.1, 80.5, 75.6),
    "multi-fashion 1:1:0": (96.2, 92.4, 92.0),
    "nuswide 2:1": (58.5, 28.7, 27.6),
    "nuswide 1:1": (54.5, 23.6, 22.3),
    "nuswide 1:2": (51.7, 20.3, 18.9),
}
QUICK = ("rounds=2", "starts=1", "pretraining=2", "steps=1", "checkpoint=1000")
PLAIN = ("alone=false", "evaluations=1")


@benchmark("afmcc")
def bench_afmcc(study: Study) -> dict:
    """AFMCC's clustering by dataset and ratio of full, multi- and single-modality clients.

    The paper's Tables 2 and 3a, a row for each line. We built our own Multi-Fashion, so its
    numbers are not comparable with the paper's.
    """
    rows = {}
    for name in PAPER:
        dataset, ratio = name.split()
        rows[name] = (scenario(study, dataset), mixed(ratio))
    return table(study, rows, {name: acc for name, (acc, _, _) in PAPER.items()})


def scenario(study: Study, dataset: str = "bdgp") -> str:
    """AFMCC's scenario of a dataset, or of `digits` in a quick benchmark."""
    return "afmcc-digits" if study.quick else f"afmcc-{dataset}"


def mixed(ratio: str) -> list[str]:
    """Settings of a ratio of clients, F/S or F/M/S."""
    parts = ratio.split(":")
    kinds = ("full", "single") if len(parts) == 2 else ("full", "multi", "single")
    mix = ", ".join(f"{kind}: {part}" for kind, part in zip(kinds, parts, strict=True))
    return [f"clients.0.mix={{{mix}}}"]


def table(
    study: Study,
    rows: Mapping[str, Row],
    paper: Mapping[str, float] | None = None,
    quick: Sequence[str] = QUICK,
) -> dict[str, Any]:
    """Mean and spread of both protocols for each row, beside the paper's ACC where it has one.

    Rows measured at several visits (`--set evaluations=20`) tell what happened on the way, too.
    """
    configured = {name: (where, [*PLAIN, *settings]) for name, (where, settings) in rows.items()}
    summaries = {}
    for name, runs in study.runs(configured, quick).items():
        summaries[name] = averages(runs, figures)
        if paper and name in paper:
            summaries[name]["paper_acc"] = paper[name]
        on_the_way = {str(run.seed): visit_figures(run) for run in runs}
        if all(on_the_way.values()):
            summaries[name]["visits"] = on_the_way
            worst = {key: max(own[key] for own in on_the_way.values()) for key in BY_VISIT}
            summaries[name] |= {f"worst_{key}": value for key, value in worst.items()}
    return {"rows": summaries}


BY_VISIT = ("behind_joint", "below_peak", "stop_below_peak")


def visit_figures(run: Run) -> dict[str, float]:
    """How a run measured at several visits went, in points of ACC; {} where one was measured.

    `behind_joint`: by how much k-means over clients was behind joint k-means, at the worst visit;
    `below_peak`: the last visit under the best one; `stop_below_peak`: the visit that
    `keep: stable` would keep under the best one (`log_stability`; without it as the last visit).
    """
    acc, joint = curve(run, "acc"), curve(run, "joint acc")
    if len(acc) < 2:
        return {}
    last, peak = max(acc), max(acc.values())
    by_client = history.logged_metrics(run).get("stability", {})
    stability = next(iter(by_client.values()), {last: 1.0})
    chosen = max(stability, key=lambda visit: stability[visit])
    values = {
        "behind_joint": max(joint[visit] - acc[visit] for visit in acc),
        "below_peak": peak - acc[last],
        "stop_below_peak": peak - acc[chosen],
    }
    return {name: round(value, 3) for name, value in values.items()}


def figures(run: Run) -> dict[str, float]:
    """ACC, NMI and ARI by k-means over clients and by k-means on all clients' features.

    `first_acc` is by the protocol of FMCSC and the paper (`kmeans: first`).
    """
    metrics = (run.results or {})["metrics"]
    names = ("acc", "nmi", "ari")
    joint = {f"joint_{name}": metrics["joint"][name] for name in names}
    first = {"first_acc": metrics.get("first", metrics)["acc"]}
    return {name: metrics[name] for name in names} | joint | first


# afmcc-asynchronous: replies when they are ready


@benchmark("afmcc-asynchronous")
def bench_afmcc_asynchronous(study: Study) -> dict:
    """AFMCC where every client is visited as soon as it has replied, by the ratio of clients.

    In the scenarios replies wait for the next tick of the simulated clock, so that clients are
    trained together and visits are in effect synchronous. Here there is no tick: clients with one
    modality have their visits in a third of the time and then rest, or (`rest: false`) go on until
    the slowest client has had its own.
    """
    rows: dict[str, Row] = {}
    for name in PAPER:
        dataset, ratio = name.split()
        if dataset in ("bdgp", "mnist-usps"):
            for rest in ("true", "false"):
                settings = [*mixed(ratio), "tick=0", f"algorithm.rest={rest}"]
                label = f"{name}, {'rest' if rest == 'true' else 'go on'}"
                rows[label] = (scenario(study, dataset), settings)
    return table(study, rows, {name: PAPER[name.split(",")[0]][0] for name in rows})


# afmcc-ablation: parts of the method

WITHOUT = {
    "all parts": [],
    "without A": ["alpha=0"],
    "without B": ["beta=0"],
    "without C": ["weights=uniform"],
    "near models": ["weights=near"],  # with sharp weights: next to no exchange
}
ABLATION_PAPER = {"all parts": 93.9, "without A": 55.5, "without B": 93.0, "without C": 83.4}


@benchmark("afmcc-ablation")
def bench_afmcc_ablation(study: Study) -> dict:
    """AFMCC without the contrast (A), the constraint (B) or the weights by client (C): Table 3b.

    BDGP, F/S 1:1. "near models" is another reading of "without C": each client keeps to models
    like its own.
    """
    rows = {name: (scenario(study), settings) for name, settings in WITHOUT.items()}
    return table(study, rows, ABLATION_PAPER)


# afmcc-degeneration: long training

LENGTH = 800  # gradient steps of a client with both modalities
SUBSETS = 3  # subsets of modalities of such a client
MARKS = (200, 400, 600, 800)  # gradient steps at which ACC is reported
EPOCHS = 10  # of FMCSC in a round on BDGP, one step per epoch: a batch has all rows of a client
DEGENERATION_PAPER = {  # FMCSC without and with the constraint
    "200": {"without": 90.58, "with": 91.06},
    "800": {"without": 81.65, "with": 90.01},
}
CONSTRAINTS = {  # rows with and without the contrast of a modality with itself
    "no constraint": ["beta=0"],
    "as printed": ["beta=0.01"],
    "acting": ["beta=0.1", "head_lr_scale=30", "constrain=fused"],
    "sharp weights": ["beta=0.01", "sharpness=20"],
    "sharp weights without it": ["beta=0", "sharpness=20"],
}
DEGENERATION_QUICK = ("rounds=2", "pretraining=2", "checkpoint=1000")


@benchmark("afmcc-degeneration")
def bench_afmcc_degeneration(study: Study) -> dict:
    """AFMCC and FMCSC trained long, with and without the constraint (Figure 1 and Table 3c).

    Shows whether accuracy falls again. BDGP, F/S 1:1: ACC and joint ACC by the number of gradient
    steps, for AFMCC with 2 steps per subset and visit (as shipped) and with 5, and for FMCSC with
    the epochs of a round that its authors use. Rows "contrast with ..." have 5 steps: is it the
    contrast of a modality with itself that makes accuracy fall, and does a constraint undo it?
    """
    settings: dict[str, list[str]] = {}
    steps_per_round: dict[str, int] = {}
    for word, weight in (("with", 0.01), ("without", 0.0)):
        for steps in (2, 5):
            name = f"{word} the constraint, {steps} steps"
            settings[name] = [f"beta={weight}", f"steps={steps}"]
            steps_per_round[name] = steps * SUBSETS
        name = f"fmcsc {word} the constraint"
        algorithm = f"algorithm={{name: fmcsc, constraint: {weight}}}"
        settings[name] = [algorithm, f"epochs={EPOCHS}", "batch_size=256"]
        steps_per_round[name] = EPOCHS
    for word, constraint in CONSTRAINTS.items():
        for contrast in ("all", "others"):
            name = f"contrast with {contrast}, {word}"
            settings[name] = [f"contrast={contrast}", "steps=5", *constraint]
            steps_per_round[name] = 5 * SUBSETS
    rows: dict[str, Row] = {}
    common = ("alone=false", "evaluations=20", "checkpoint=1000")
    for name, values in settings.items():
        rounds = ceil(LENGTH / steps_per_round[name])
        rows[name] = (scenario(study), [*common, *values, f"rounds={rounds}"])
    summaries = {}
    for name, runs in study.runs(rows, DEGENERATION_QUICK).items():
        steps = steps_per_round[name]
        summary = averages(runs, figures)
        acc_curves = [curve(run, "acc") for run in runs]
        summary["peak_acc"] = round(mean(max(acc.values()) for acc in acc_curves), 3)
        for mark in MARKS:
            nearest = [value_near(acc, mark / steps) for acc in acc_curves]
            summary[f"acc_at_{mark}"] = round(mean(nearest), 3)
        summary["courses"] = {str(run.seed): curves_by_step(run, steps) for run in runs}
        summaries[name] = summary
    return {"rows": summaries, "paper_fmcsc": DEGENERATION_PAPER}


def curve(run: Run, name: str) -> dict[int, float]:
    """A metric of the federation by round (of visits)."""
    return history.federation_curves(run)[name]


def curves_by_step(run: Run, steps: int) -> dict[str, dict[str, float]]:
    """ACC and joint ACC by gradient step, given the steps of a round."""
    result = {}
    for key in ("acc", "joint acc"):
        values = curve(run, key).items()
        result[key] = {str(steps * number): round(value, 2) for number, value in values}
    return result


def value_near(values: dict[int, float], number: float) -> float:
    """The value measured nearest to this round."""
    return values[min(values, key=lambda measured: abs(measured - number))]


# afmcc-stop: when to stop, without labels

STOP_SETS = ("bdgp", "mnist-usps", "scene15", "digits")
STOP_COMMON = ("alone=false", "steps=5", "sharpness=20", "checkpoint=1000")
STOP_ROUNDS = {"bdgp": (26, 13), "mnist-usps": (40, 20), "scene15": (24, 12), "digits": (24, 12)}


@benchmark("afmcc-stop")
def bench_afmcc_stop(study: Study) -> dict:
    """AFMCC trained past its peak: the models of the last visit, and the most stable ones.

    Two rows per dataset, `acc` is that of the models kept. `keep: stable` sees no label; `peak` is
    the ACC of the best measured visit, which nobody could choose without labels.
    """
    rows: dict[str, Row] = {}
    for dataset in STOP_SETS:
        rounds, evaluations = STOP_ROUNDS[dataset]
        common = [*STOP_COMMON, f"rounds={rounds}", f"evaluations={evaluations}", "kmeans=least"]
        for keep in ("last", "stable"):
            settings = [*common, f"algorithm.keep={keep}"]
            rows[f"{dataset}, {keep}"] = (scenario(study, dataset), settings)
    summaries = {}
    for name, runs in study.runs(rows, DEGENERATION_QUICK).items():
        peaks = [max(curve(run, "acc").values()) for run in runs]
        summaries[name] = averages(runs, figures) | {"peak": round(mean(peaks), 3)}
    return {"rows": summaries, "bar_below_peak": 1.5}


# afmcc-defaults: one set of defaults for all datasets

MADE_UP_SEED = 96
MADE_UP_NOISE = {"narrow": 1.5, "wide": 4.0}  # so that k-means finds most kinds in a view
DEFAULTS_SETS: dict[str, Sequence[str]] = {  # where a scenario has other data than its own
    "bdgp": [],
    "mnist-usps": [],
    "scene15": [],
    "digits": [],
    "made-up": ["data={name: 'benchmarks.afmcc:made_up_views'}", "alpha=0.1"],
}
DEFAULTS = {
    "all, 2 steps": ["contrast=all", "steps=2", "sharpness=1"],
    "others, 2 steps": ["contrast=others", "steps=2", "sharpness=1"],
    "others, 5 steps, sharp": ["contrast=others", "steps=5", "sharpness=20"],
}


@benchmark("afmcc-defaults")
def bench_afmcc_defaults(study: Study) -> dict:
    """Candidates for AFMCC's defaults on every set at once, on seeds apart from the tables'.

    The default is the row that is best in the mean over sets. `made-up` has the scenario of BDGP
    with other data (`made_up_views`).
    """
    rows: dict[str, Row] = {}
    for name, settings in DEFAULTS.items():
        for dataset, data in DEFAULTS_SETS.items():
            base = scenario(study, "bdgp" if dataset == "made-up" else dataset)
            rows[f"{dataset}, {name}"] = (base, [*PLAIN, "kmeans=least", *data, *settings])
    runs = study.runs(rows, QUICK, seeds=(100, 101))
    return {"rows": {name: averages(found, figures) for name, found in runs.items()}}


def made_up_views(folder: str | None = None) -> Table:
    """1200 samples of six kinds in views of 30 and 200 columns, each mixing up two of the kinds."""
    generator = torch.Generator().manual_seed(MADE_UP_SEED)
    kind = torch.arange(1200) % 6
    views = {}
    for name, width, alike in (("narrow", 30, (0, 1)), ("wide", 200, (2, 3))):
        centres = torch.randn(6, width, generator=generator)
        centres[alike[0]] = centres[alike[1]]
        noise = torch.randn(1200, width, generator=generator)
        views[name] = centres[kind] + MADE_UP_NOISE[name] * noise
    return multiview_table(views, kind, "columns")


# afmcc-federation: size of the federation

SAMPLES = (25, 50, 100, 150, 200)
CLIENTS = (4, 8, 12, 16, 24, 32, 48, 64)


@benchmark("afmcc-federation")
def bench_afmcc_federation(study: Study) -> dict:
    """AFMCC by the number of samples of a client and by the number of clients (Figure 5).

    BDGP, F/S 1:1, 2500 samples: 12 clients with so many samples each, or all samples split among
    so many clients.
    """
    name = scenario(study)
    rows = {f"{count} samples": (name, [f"clients.0.train={count}"]) for count in SAMPLES}
    rows |= {f"{count} clients": (name, [f"clients.0.count={count}"]) for count in CLIENTS}
    return table(study, rows)


# afmcc-parameters: hyperparameters, one at a time

POWERS = (0.0001, 0.001, 0.01, 0.1, 1.0)
VALUES = {  # the paper's symbol: our option, values
    "alpha": ("alpha", POWERS),
    "beta": ("beta", POWERS),
    "lambda": ("flexibility", (0.1, 0.2, 0.4, 0.6, 0.8, 1.0)),
}


@benchmark("afmcc-parameters")
def bench_afmcc_parameters(study: Study) -> dict:
    """AFMCC by alpha, beta and lambda, one at a time (the paper's Figure 4).

    BDGP, F/S 1:1; the two other parameters are as shipped.
    """
    rows = {}
    for symbol, (option, values) in VALUES.items():
        for value in values:
            rows[f"{symbol} {value:g}"] = (scenario(study), [f"{option}={value}"])
    return table(study, rows)


# afmcc-privacy: differential privacy

EPSILONS = (5, 10, 20, 40, 80)
BOUNDS = (0.01, 0.1, 1.0)  # without noise, a visit changes a model by a norm of about 1
DELTA = 1e-5
DEVIATIONS = (0.0005, 0.002, 0.01, 0.05)  # of the noise on one parameter
LOOSE = 100.0  # a bound that no update reaches


@benchmark("afmcc-privacy")
def bench_afmcc_privacy(study: Study) -> dict:
    """Accuracy of AFMCC by epsilon of differential privacy (the paper's Figure 5c).

    The noise is solved for the number of uploads of the run. BDGP, F/S 1:1, uniform weights of
    the models. Two rows to compare with: no privacy (`without`), and the initial weights. Rows
    "noise S a parameter" add noise of that deviation to each parameter and clip nothing, which may
    be what the paper did; `epsilon` is what it guarantees for updates as long as the longest
    bound of the other rows.
    """
    name = scenario(study)
    # The client that also pretrains uploads once more.
    releases = load(name)[0].training.rounds + 1
    rows = {"without": [], "first weights": private(noise=0, bound=1e-12)}
    for epsilon in EPSILONS:
        noise = noise_for(epsilon, releases, DELTA)
        for bound in BOUNDS:
            rows[f"epsilon {epsilon}, bound {bound:g}"] = private(noise, bound)
    for deviation in DEVIATIONS:
        rows[per_parameter(deviation)] = private(deviation / LOOSE, LOOSE)
    uniform = {row: (name, ["weights=uniform", *settings]) for row, settings in rows.items()}
    result = table(study, uniform)
    for deviation in DEVIATIONS:
        if per_parameter(deviation) in result["rows"]:
            spent = epsilon_of(deviation / BOUNDS[-1], releases, DELTA)
            result["rows"][per_parameter(deviation)]["epsilon"] = spent
    return result | {"releases": releases, "delta": DELTA}


def per_parameter(deviation: float) -> str:
    """Name of the row with noise of this deviation on every parameter."""
    return f"noise {deviation:g} a parameter"


def private(noise: float, bound: float) -> list[str]:
    """Settings of differential privacy with this noise and bound on the norm of an update."""
    return [f"privacy.noise={noise}", f"privacy.bound={bound}", f"privacy.delta={DELTA}"]


# afmcc-rivals: baselines

DATASETS = (
    "bdgp 1:1",
    "mnist-usps 1:1",
    "multi-fashion 1:1",
    "multi-fashion 1:1:1",
    "multi-fashion 0:1:1",
)


@benchmark("afmcc-rivals")
def bench_afmcc_rivals(study: Study) -> dict:
    """AFMCC against FMCSC, FedAvg, local and centralised training, by dataset and client ratio.

    FMCSC trains as its authors do (pretraining, then 5 rounds), the others with AFMCC's visits
    and steps; "published fmcsc" has their program's arrangement and encoders, too. FedAvg averages
    an autoencoder.
    """
    rows = {}
    for name in DATASETS:
        dataset, ratio = name.split()
        for method, settings in methods(dataset).items():
            rows[f"{name} {method}"] = (scenario(study, dataset), [*mixed(ratio), *settings])
    return table(study, rows, quick=("rounds=2", "epochs=1", "checkpoint=1000"))


def methods(dataset: str) -> dict[str, Sequence[str]]:
    """Settings of AFMCC and its baselines on a dataset."""
    epochs = 10 if dataset == "bdgp" else 25
    budget = ("rounds=5", f"epochs={epochs}", "batch_size=256")
    program = (
        "algorithm={name: fmcsc, arrangement: program}",
        "clients.0.model.hidden=[500, 500, 2000]",
        *(["data.options={crop: false}"] if dataset == "mnist-usps" else []),
    )
    return {
        "afmcc": (),
        "fmcsc": ("algorithm={name: fmcsc}", *budget),
        "published fmcsc": (*program, *budget),
        "fedavg": ("algorithm={name: fedavg}",),
        "local": ("algorithm={name: local}",),
        "centralised": ("pooled=true",),
    }


# afmcc-speeds: fast and slow clients

SPEEDS_PAPER = {2: 93.3, 3: 91.9}
# One message per visit, so that a tick of the simulated clock can hold a whole visit.
COMMON = ("alone=false", "exchange=paper", "checkpoint=1000")


@benchmark("afmcc-speeds")
def bench_afmcc_speeds(study: Study) -> dict:
    """Asynchronous AFMCC with clients two or three times as fast, against waiting (Table 3d).

    Every second client is faster. BDGP, F/S 1:1, until the slowest client has had 10 visits.
    `waiting` makes as many visits in all, in synchronous rounds as long as the slowest client's
    visit. `times_less_to_same_visits` is how many times longer it takes, and
    `times_less_to_same_acc` how many times longer to the best ACC that both reach.
    """
    rows = {}
    for ratio in SPEEDS_PAPER:
        rows[f"E/O {ratio}:1"] = (scenario(study), [*COMMON, *two_speeds(ratio)])
    summaries: dict[str, Any] = {}
    for name, runs in study.runs(rows, QUICK).items():
        ratio = int(name[4])
        waiting = run_waiting(study, f"{name} waiting", ratio, runs)
        pairs = list(zip(runs, waiting, strict=True))
        same_visits = [visit_seconds(slow) / visit_seconds(run) for run, slow in pairs]
        summaries[name] = averages(runs, figures) | {
            "paper_acc": SPEEDS_PAPER[ratio],
            "waiting_acc": round(mean(figures(run)["acc"] for run in waiting), 3),
            "clock": round(mean(duration(run) for run in runs), 2),
            "visits": round(mean(visits(run) for run in runs), 1),
            "waiting_clock": round(mean(duration(run) for run in waiting), 2),
            "waiting_visits": mean(visits(run) for run in waiting),
            "times_less_to_same_visits": round(mean(same_visits), 2),
            "bar_times_less_to_same_visits": {2: None, 3: 1.7}[ratio],
            "times_less_to_same_acc": round(mean(same_acc(run, slow) for run, slow in pairs), 2),
        }
    return {"rows": summaries}


def run_waiting(study: Study, name: str, ratio: int, runs: Sequence[Run]) -> list[Run]:
    """Run synchronous rounds with as many visits as these asynchronous runs had on average."""
    durations: list[float] = []
    for run in runs:
        for spans in history.visits(run).values():
            durations += [end - start for start, end in spans[1:]]
    rounds = round(mean(visits(run) for run in runs) / len(runs[0].clients))
    synchronous = [
        "rest=true",
        f"tick={1.0001 * max(durations)}",
        f"rounds={rounds}",
        f"evaluations={rounds}",
    ]
    row = (scenario(study), [*COMMON, *two_speeds(ratio), *synchronous])
    return study.runs({name: row}, QUICK)[name]


def two_speeds(ratio: int) -> list[str]:
    """Settings with two groups of clients, `even` being `ratio` times as fast as `odd`."""
    group = "count: 6, model: {name: autoencoder}, mix: {full: 1, single: 1}, link: 1.0e+9"
    even = f"{{id: even, speed: {1000.0 * ratio}, {group}}}"
    odd = f"{{id: odd, speed: 1000.0, {group}}}"
    return [
        f"clients=[{even}, {odd}]",
        "rounds=10",
        "rest=false",
        "tick=0.01",
        "evaluations=10",
    ]


def pretraining_end(run: Run) -> float:
    """Simulated time when pretraining ended: a client's first visit takes as long as its second."""
    starts = []
    for spans in history.visits(run).values():
        (_, first_end), (second_start, second_end) = spans[:2]
        starts.append(first_end - (second_end - second_start))
    return min(starts)


def duration(run: Run) -> float:
    """Simulated seconds of a run after pretraining."""
    return (run.results or {})["clock"] - pretraining_end(run)


def visits(run: Run) -> int:
    """Visits of all clients."""
    return sum((run.results or {})["visits"].values())


def visit_seconds(run: Run) -> float:
    """Simulated seconds of the run per visit."""
    return duration(run) / visits(run)


def same_acc(run: Run, slow: Run) -> float:
    """How many times sooner `run` has the best ACC that both of them reach."""
    points, slow_points = acc_by_time(run), acc_by_time(slow)
    goal = min(max(acc for _, acc in points), max(acc for _, acc in slow_points))
    return first_time(slow_points, goal) / first_time(points, goal)


def first_time(points: list[tuple[float, float]], goal: float) -> float:
    """Time of the first point with this ACC or more."""
    return next(seconds for seconds, acc in points if acc >= goal)


def acc_by_time(run: Run) -> list[tuple[float, float]]:
    """Pairs of simulated seconds since pretraining ended, and ACC."""
    clock = {event["round"]: event["clock"] for event in run.events if event["event"] == "round"}
    start = pretraining_end(run)
    acc = curve(run, "acc").items()
    return [(clock[number] - start, value) for number, value in acc if number in clock]


# afmcc-stack: clients of one architecture trained together


@benchmark("afmcc-stack")
def bench_afmcc_stack(study: Study) -> dict:
    """Speed of AFMCC with clients of one architecture stacked, against one by one: 24 clients.

    Seconds of a round of visits. The first two rounds do not count, because on a GPU their steps
    are captured as CUDA graphs. `one by one` trains a client after the other without CUDA graphs.
    Nothing is evaluated or saved.
    """
    rounds = 3 if study.quick else 8
    modes = ("stacked and recorded", "stacked", "one by one")
    times = {mode: time_round(study, rounds, mode) for mode in modes}
    return {
        "clients": 9 if study.quick else 24,
        "rounds": rounds - 2,
        "seconds_a_round": times,
        "times_faster": times["one by one"] / times["stacked and recorded"],
        "bar_times_faster": 8.0,
    }


def time_round(study: Study, rounds: int, mode: str) -> float:
    """Seconds of a round of visits on MNIST-USPS, without the first two rounds."""
    name = scenario(study, "mnist-usps")
    settings = [f"rounds={rounds}", f"device={study.device}", *study.settings]
    experiment, algorithm = load(name, settings=settings)
    with tempfile.TemporaryDirectory() as folder:
        run = prepare(experiment, algorithm, Folder(Path(folder)), study.data_dir, experiment.name)
        plan = run.plan
        threads, max_recordings = torch.get_num_threads(), afmcc.MAX_RECORDINGS
        torch.set_num_threads(plan.threads)
        engine: Any = run.build_engine(run.folder.clients)
        host = engine.host
        if mode == "one by one":
            host.handle_all = lambda messages: {
                client: host.handle(client, message) for client, message in messages.items()
            }
        fed = Federation(engine, plan.training, plan.federation, plan.seed)
        moments = []
        try:
            afmcc.MAX_RECORDINGS = max_recordings if "recorded" in mode else 0
            for number in algorithm.serve(fed):
                fed.finished = number
                moments.append(time.perf_counter())
            return (moments[-1] - moments[1]) / (rounds - 2)
        finally:
            engine.close()
            afmcc.MAX_RECORDINGS = max_recordings
            torch.set_num_threads(threads)


# afmcc-time: seconds of a whole run

BARS = {  # seconds: the paper's, and our bar
    "bdgp": (52.9, 5.0),
    "mnist-usps": (7.6 * 60, 30.0),
    "multi-fashion": (2.0 * 3600, 180.0),
}


@benchmark("afmcc-time")
def bench_afmcc_time(study: Study) -> dict:
    """Seconds of a whole AFMCC run on each dataset (the paper's Table 5).

    Evaluated once at the end, after a short run in the same process. The paper's seconds are on
    another GPU.
    """
    rows = {}
    for name in BARS if not study.quick else ["digits"]:
        if study.only and name not in study.only:
            continue
        # A short run loads libraries and chooses kernels.
        run_once(study, name, ["rounds=3", "starts=2"])
        paper, bar = BARS.get(name, (None, None))
        results = run_once(study, name, ["rounds=3"] if study.quick else [])
        rows[name] = {
            "seconds": results["seconds"],
            "bar": bar,
            "paper_seconds": paper,
            "acc": results["metrics"]["acc"],
        }
    return {"rows": rows}


def run_once(study: Study, dataset: str, settings: list[str]) -> dict:
    """Run AFMCC on a dataset in this process and return its results."""
    common = ["alone=false", "evaluations=1", "checkpoint=1000", f"device={study.device}"]
    experiment, algorithm = load(
        scenario(study, dataset),
        settings=[*common, *settings, *study.settings],
        seed=(study.seeds or (0,))[0],
    )
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        return run_scenario(experiment, algorithm, out=out, data_dir=study.data_dir)[0]
