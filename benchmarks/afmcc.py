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
from unalike.core.privacy import noise_for
from unalike.report import Run, history
from unalike.runs import prepare, run_scenario
from unalike.runs.run_folder import Folder
from unalike.scenarios import load

# afmcc

PAPER = {  # ACC, NMI, ARI; F/S, or F/M/S
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
}
QUICK = ("rounds=2", "starts=1", "pretraining=2", "steps=1", "checkpoint=1000")
PLAIN = ("alone=false", "evaluations=1")


@benchmark("afmcc")
def bench_afmcc(study: Study) -> dict:
    """AFMCC's clustering by dataset and ratio of full, multi- and single-modality clients: the paper's Tables 2 and 3a.

    A row for each line of the tables. The Multi-Fashion here was built by us: its numbers are not comparable with the paper's.
    """
    rows = {}
    for name in PAPER:
        dataset, ratio = name.split()
        rows[name] = (scenario(study, dataset), mixed(ratio))
    return table(study, rows, {name: acc for name, (acc, _, _) in PAPER.items()})


def scenario(study: Study, dataset: str = "bdgp") -> str:
    return "afmcc-digits" if study.quick else f"afmcc-{dataset}"


def mixed(ratio: str) -> list[str]:
    """The setting for clients F/S or F/M/S."""
    mix = zip(
        ("full", "single") if ratio.count(":") == 1 else ("full", "multi", "single"),
        ratio.split(":"),
        strict=True,
    )
    return [f"clients.0.mix={{{', '.join(f'{kind}: {part}' for kind, part in mix)}}}"]


def table(
    study: Study,
    rows: Mapping[str, Row],
    paper: Mapping[str, float] | None = None,
    quick: Sequence[str] = QUICK,
) -> dict[str, Any]:
    """Mean and spread of both protocols for each row, beside the paper's ACC where it has one."""
    made = study.runs(
        {name: (scenario, [*PLAIN, *settings]) for name, (scenario, settings) in rows.items()},
        quick,
    )
    return {
        "rows": {
            name: averages(runs, figures)
            | ({"paper_acc": paper[name]} if paper and name in paper else {})
            for name, runs in made.items()
        }
    }


def figures(run: Run) -> dict[str, float]:
    """ACC, NMI and ARI by the federated protocol and by k-means on everyone's features together."""
    told = (run.results or {})["metrics"]
    return {name: told[name] for name in ("acc", "nmi", "ari")} | {
        f"joint_{name}": told["joint"][name] for name in ("acc", "nmi", "ari")
    }


# afmcc-ablation

WITHOUT = {
    "all parts": [],
    "without A": ["alpha=0"],
    "without B": ["beta=0"],
    "without C": ["weights=uniform"],
}
ABLATION_PAPER = {"all parts": 93.9, "without A": 55.5, "without B": 93.0, "without C": 83.4}


@benchmark("afmcc-ablation")
def bench_afmcc_ablation(study: Study) -> dict:
    """AFMCC without its parts: the contrast (A), the constraint (B), the client's own weights (C); the paper's Table 3b.

    BDGP, F/S 1:1.
    """
    return table(
        study,
        {name: (scenario(study), settings) for name, settings in WITHOUT.items()},
        ABLATION_PAPER,
    )


# afmcc-degeneration

LENGTH, SUBSETS, MARKS = (
    800,
    3,
    (200, 400, 600, 800),
)  # gradient steps of a client with both modalities
EPOCHS = 10  # of FMCSC in a round on BDGP, a step each: a batch holds a whole client
DEGENERATION_PAPER = {
    "200": {"without": 90.58, "with": 91.06},
    "800": {"without": 81.65, "with": 90.01},
}  # of FMCSC, with and without it
DEGENERATION_QUICK = ("rounds=2", "pretraining=2", "checkpoint=1000")


@benchmark("afmcc-degeneration")
def bench_afmcc_degeneration(study: Study) -> dict:
    """AFMCC and FMCSC trained long, with the constraint and without it: whether accuracy falls again (AFMCC's Figure 1 and Table 3c).

    BDGP, F/S 1:1: ACC and joint ACC by the number of gradient steps, for AFMCC with 2 steps a subset and visit, as shipped, and with 5,
    and for FMCSC with its own budget of a round.
    """
    rows: dict[str, Row] = {}
    pace: dict[str, int] = {}  # gradient steps a visit or round
    for word, weight in (("with", 0.01), ("without", 0.0)):
        for steps in (2, 5):
            rows[name := f"{word} the constraint, {steps} steps"] = (
                scenario(study),
                [f"beta={weight}", f"steps={steps}"],
            )
            pace[name] = steps * SUBSETS
        rows[name := f"fmcsc {word} the constraint"] = (
            scenario(study),
            [
                f"algorithm={{name: fmcsc, constraint: {weight}}}",
                f"epochs={EPOCHS}",
                "batch_size=256",
            ],
        )
        pace[name] = EPOCHS
    rows = {
        name: (
            where,
            [
                "alone=false",
                "evaluations=20",
                "checkpoint=1000",
                *settings,
                f"rounds={ceil(LENGTH / pace[name])}",
            ],
        )
        for name, (where, settings) in rows.items()
    }
    told = {}
    for name, runs in study.runs(rows, DEGENERATION_QUICK).items():
        steps = pace[name]
        told[name] = averages(runs, figures) | {
            "peak_acc": round(
                mean(max(course(run, "acc").values()) for run in runs),
                3,
            )
        }
        told[name] |= {
            f"acc_at_{mark}": round(
                mean(at(course(run, "acc"), mark / steps) for run in runs),
                3,
            )
            for mark in MARKS
        }
        told[name]["courses"] = {
            str(run.seed): {
                key: {
                    str(steps * visit): round(value, 2) for visit, value in course(run, key).items()
                }
                for key in ("acc", "joint acc")
            }
            for run in runs
        }
    return {"rows": told, "paper_fmcsc": DEGENERATION_PAPER}


def course(run: Run, name: str) -> dict[int, float]:
    return history.federation_curves(run)[name]


def at(values: dict[int, float], visit: float) -> float:
    """What was measured nearest to so many visits."""
    return values[min(values, key=lambda known: abs(known - visit))]


# afmcc-federation

SAMPLES, CLIENTS = (25, 50, 100, 150, 200), (4, 8, 12, 16, 24, 32, 48, 64)


@benchmark("afmcc-federation")
def bench_afmcc_federation(study: Study) -> dict:
    """AFMCC with fewer samples for each client, and with fewer and more clients: the paper's Figure 5.

    BDGP, F/S 1:1, 2500 samples: 12 clients with so many samples each, or all samples dealt to so many clients.
    """
    samples = {
        f"{count} samples": (scenario(study), [f"clients.0.train={count}"]) for count in SAMPLES
    }
    return table(
        study,
        samples
        | {
            f"{count} clients": (scenario(study), [f"clients.0.count={count}"]) for count in CLIENTS
        },
    )


# afmcc-parameters

POWERS = (0.0001, 0.001, 0.01, 0.1, 1.0)
VALUES = {
    "alpha": ("alpha", POWERS),
    "beta": ("beta", POWERS),
    "lambda": ("flexibility", (0.1, 0.2, 0.4, 0.6, 0.8, 1.0)),
}


@benchmark("afmcc-parameters")
def bench_afmcc_parameters(study: Study) -> dict:
    """What alpha, beta and lambda do to AFMCC, one at a time, the others as shipped: the paper's Figure 4.

    BDGP, F/S 1:1.
    """
    return table(
        study,
        {
            f"{name} {value:g}": (scenario(study), [f"{field}={value}"])
            for name, (field, values) in VALUES.items()
            for value in values
        },
    )


# afmcc-privacy

EPSILONS = (5, 10, 20, 40, 80)
BOUNDS = (0.01, 0.1, 1.0)  # an undisturbed visit moves a model by about 1
DELTA = 1e-5


@benchmark("afmcc-privacy")
def bench_afmcc_privacy(study: Study) -> dict:
    """What privacy costs: AFMCC's accuracy against epsilon (the paper's Figure 5c), noise solved for the uploads of the run.

    BDGP, F/S 1:1, all models counting the same. Beside each bound and epsilon: nothing protected, and the first weights untrained.
    """
    name = scenario(study)
    sent = load(name)[0].training.rounds + 1  # by the client that also pretrains
    private = lambda noise, bound: [
        f"privacy.noise={noise}",
        f"privacy.bound={bound}",
        f"privacy.delta={DELTA}",
    ]
    rows = {"without": [], "first weights": private(0, 1e-12)}
    for epsilon in EPSILONS:
        noise = noise_for(epsilon, sent, DELTA)
        rows |= {f"epsilon {epsilon}, bound {bound:g}": private(noise, bound) for bound in BOUNDS}
    made = table(
        study, {row: (name, ["weights=uniform", *settings]) for row, settings in rows.items()}
    )
    return made | {"releases": sent, "delta": DELTA}


# afmcc-rivals

DATASETS = (
    "bdgp 1:1",
    "mnist-usps 1:1",
    "multi-fashion 1:1",
    "multi-fashion 1:1:1",
    "multi-fashion 0:1:1",
)


@benchmark("afmcc-rivals")
def bench_afmcc_rivals(study: Study) -> dict:
    """AFMCC against FMCSC, an averaged autoencoder, everyone alone and everyone's rows together, by dataset and ratio of clients.

    FMCSC by its own budget (pretraining, then 5 rounds), the others by AFMCC's visits and steps.
    """
    rows = {}
    for name in DATASETS:
        dataset, ratio = name.split()
        for method, settings in methods(dataset).items():
            rows[f"{name} {method}"] = (scenario(study, dataset), [*mixed(ratio), *settings])
    return table(study, rows, quick=("rounds=2", "epochs=1", "checkpoint=1000"))


def methods(dataset: str) -> dict[str, Sequence[str]]:
    budget = ("rounds=5", f"epochs={10 if dataset == 'bdgp' else 25}", "batch_size=256")
    return {
        "afmcc": (),
        "fmcsc": ("algorithm={name: fmcsc}", *budget),
        "fedavg": ("algorithm={name: fedavg}",),
        "local": ("algorithm={name: local}",),
        "centralised": ("pooled=true",),
    }


# afmcc-speeds

SPEEDS_PAPER = {2: 93.3, 3: 91.9}
COMMON = (
    "alone=false",
    "exchange=paper",
    "checkpoint=1000",
)  # one message a visit, so that a tick can hold a whole one


@benchmark("afmcc-speeds")
def bench_afmcc_speeds(study: Study) -> dict:
    """AFMCC where every other client is two or three times as fast: accuracy and simulated time, against waiting for the slowest (Table 3d).

    BDGP, F/S 1:1, until the slowest client has had 10 visits. `waiting` does as many visits in all, each round as long as the slowest;
    how much longer it takes is `times_less_to_same_visits`, and to the best ACC that both reach, `times_less_to_same_acc`.
    """
    going = study.runs(
        {
            f"E/O {ratio}:1": (scenario(study), [*COMMON, *settings(study, ratio)])
            for ratio in SPEEDS_PAPER
        },
        QUICK,
    )
    told: dict[str, Any] = {}
    for name, runs in going.items():
        ratio = int(name[4])
        count = len(runs[0].clients)
        tick = 1.0001 * max(
            end - begin
            for run in runs
            for spans in history.visits(run).values()
            for begin, end in spans[1:]
        )
        rounds = round(mean(visits(run) for run in runs) / count)
        rows = {
            f"{name} waiting": (
                scenario(study),
                [
                    *COMMON,
                    *settings(study, ratio),
                    "rest=true",
                    f"tick={tick}",
                    f"rounds={rounds}",
                    f"evaluations={rounds}",
                ],
            )
        }
        waiting = study.runs(rows, QUICK)[f"{name} waiting"]
        pairs = list(zip(runs, waiting, strict=True))
        told[name] = averages(runs, figures) | {
            "paper_acc": SPEEDS_PAPER[ratio],
            "waiting_acc": round(mean(figures(run)["acc"] for run in waiting), 3),
            "clock": round(mean(lasted(run) for run in runs), 2),
            "visits": round(mean(visits(run) for run in runs), 1),
            "waiting_clock": round(mean(lasted(run) for run in waiting), 2),
            "waiting_visits": mean(visits(run) for run in waiting),
            "times_less_to_same_visits": round(
                mean(
                    lasted(slow) / visits(slow) * visits(run) / lasted(run) for run, slow in pairs
                ),
                2,
            ),
            "bar_times_less_to_same_visits": {2: None, 3: 1.7}[ratio],
            "times_less_to_same_acc": round(mean(same_acc(run, slow) for run, slow in pairs), 2),
        }
    return {"rows": told}


def settings(study: Study, ratio: int) -> list[str]:
    """Two groups of clients instead of one: even ones `ratio` times as fast as odd ones."""
    group = "count: 6, model: {name: autoencoder}, mix: {full: 1, single: 1}, link: 1.0e+9"
    return [
        f"clients=[{{id: even, speed: {1000.0 * ratio}, {group}}}, {{id: odd, speed: 1000.0, {group}}}]",
        "rounds=10",
        "rest=false",
        "tick=0.01",
        "evaluations=10",
    ]


def begun(run: Run) -> float:
    """When pretraining was over: a client's first visit takes as long as its second."""
    return min(its[0][1] - (its[1][1] - its[1][0]) for its in history.visits(run).values())


def lasted(run: Run) -> float:
    return (run.results or {})["clock"] - begun(run)


def visits(run: Run) -> int:
    return sum((run.results or {})["visits"].values())


def same_acc(run: Run, slow: Run) -> float:
    """How many times sooner `run` has the best ACC that both of them reach."""
    courses = [timed(run), timed(slow)]
    goal = min(max(acc for _, acc in course) for course in courses)
    first, second = (next(at for at, acc in course if acc >= goal) for course in courses)
    return second / first


def timed(run: Run) -> list[tuple[float, float]]:
    """ACC by simulated seconds since the clients went their own ways."""
    clock = {event["round"]: event["clock"] for event in run.events if event["event"] == "round"}
    return [
        (clock[at] - begun(run), acc)
        for at, acc in history.federation_curves(run)["acc"].items()
        if at in clock
    ]


# afmcc-stack


@benchmark("afmcc-stack")
def bench_afmcc_stack(study: Study) -> dict:
    """How much faster AFMCC's alike clients train as one stacked program than one by one: 24 clients, the same visits.

    Seconds of a round of visits, the first two left out: there steps are seen for the first time and, on a GPU, recorded. One by one is
    a client after the other without recordings. Nothing is measured or saved on the way.
    """
    rounds = 3 if study.quick else 8
    times = {
        how: seconds(study, rounds, how)
        for how in ("stacked and recorded", "stacked", "one by one")
    }
    return {
        "clients": 9 if study.quick else 24,
        "rounds": rounds - 2,
        "seconds_a_round": times,
        "times_faster": times["one by one"] / times["stacked and recorded"],
        "bar_times_faster": 8.0,
    }


def seconds(study: Study, rounds: int, how: str) -> float:
    made, algorithm = load(
        scenario(study, "mnist-usps"),
        settings=[f"rounds={rounds}", f"device={study.device}", *study.settings],
    )
    with tempfile.TemporaryDirectory() as folder:
        run = prepare(made, algorithm, Folder(Path(folder)), study.data_dir, made.name)
        threads, records = torch.get_num_threads(), afmcc.MAX_RECORDINGS
        torch.set_num_threads(run.plan.threads)
        engine: Any = run.build_engine(run.folder.clients)
        host = engine.host
        if how == "one by one":
            host.handle_all = lambda messages: {
                client: host.handle(client, message) for client, message in messages.items()
            }
        fed, moments = (
            Federation(
                engine,
                run.plan.training,
                run.plan.federation,
                run.plan.seed,
            ),
            [],
        )
        try:
            afmcc.MAX_RECORDINGS = records if "recorded" in how else 0
            for number in algorithm.serve(fed):
                fed.finished = number
                moments.append(time.perf_counter())
            return (moments[-1] - moments[1]) / (rounds - 2)
        finally:
            engine.close()
            afmcc.MAX_RECORDINGS = records
            torch.set_num_threads(threads)


# afmcc-time

BARS = {
    "bdgp": (52.9, 5.0),
    "mnist-usps": (7.6 * 60, 30.0),
    "multi-fashion": (2.0 * 3600, 180.0),
}  # the paper's seconds, and ours


@benchmark("afmcc-time")
def bench_afmcc_time(study: Study) -> dict:
    """How long AFMCC takes on each dataset: a whole run, measured at the end, in a process that has run before (the paper's Table 5).

    Seconds; the paper's are on another GPU.
    """
    rows = {}
    for name in BARS if not study.quick else ["digits"]:
        if study.only and name not in study.only:
            continue
        once(study, name, ["rounds=3", "starts=2"])  # libraries are loaded, kernels chosen
        paper, bar = BARS.get(name, (None, None))
        results = once(study, name, ["rounds=3"] if study.quick else [])
        rows[name] = {
            "seconds": results["seconds"],
            "bar": bar,
            "paper_seconds": paper,
            "acc": results["metrics"]["acc"],
        }
    return {"rows": rows}


def once(study: Study, name: str, settings: list[str]) -> dict:
    made, algorithm = load(
        scenario(study, name),
        settings=[
            "alone=false",
            "evaluations=1",
            "checkpoint=1000",
            f"device={study.device}",
            *settings,
            *study.settings,
        ],
        seed=(study.seeds or (0,))[0],
    )
    with tempfile.TemporaryDirectory() as folder:
        return run_scenario(made, algorithm, out=Path(folder) / "run", data_dir=study.data_dir)[0]
