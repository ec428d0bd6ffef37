"""Benchmarks of the methods that FedMuscle is compared with."""

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.study import Row, Study, averages, benchmark, megabytes
from unalike.core.operations import list_measurements
from unalike.report import Run
from unalike.scenarios import build_clients, load

# rivals

METHODS: dict[str, str] = {
    "fedmuscleplus": "{name: fedmuscleplus, width: 32, align_lr: 0.003, distill_public: never}",
    "fedmuscleplus, pairwise": "{name: fedmuscleplus, width: 32, align_lr: 0.003, distill_public: never, loss: pairwise}",
    "fedmuscleplus, gramian": "{name: fedmuscleplus, width: 32, align_lr: 0.003, distill_public: never, loss: gramian}",
    "fedmuscleplus, opinions": "{name: fedmuscleplus, width: 32, align_lr: 0.003, distill_public: all}",  # chosen on seeds 100 to 104 (LOG.md)
    "fedmuscleplus, no company": "{name: benchmarks.variants:SelfOnly, width: 32, align_lr: 0.003, distill_public: never}",
    "sage": "{name: sage, flips: false, public_lr: 0.0003}",
    "fedhenn": "{name: fedhenn, eta: 0.1}",
    "cofed": "{name: cofed, public_lr: 0.0003}",
    "feddf": "{name: feddf, public_lr: 0.0003}",
    "fedrcl": "{name: fedrcl, weight: 0.03}",
    "simclr": "{name: simclr, flips: false, public_lr: 0.003}",
    "pseudolabel": "{name: pseudolabel, public_lr: 0.0001}",
}
PLAIN = ("evaluations=1", "checkpoint=1000")


@benchmark("rivals")
def bench_rivals(study: Study) -> dict:
    """FedMuscle against its rivals on `digits`: the same clients, first weights, labelled rows, public set and local epochs, three seeds.

    Each rival's rate or weight is the best of several on other seeds (`rivals-rates`); fields that are not said are the methods' defaults.

        Delta of each method with its losers, and what travels.
    """
    rows: dict[str, Row] = {
        name: ("digits", [*PLAIN, f"algorithm={told}"]) for name, told in METHODS.items()
    }
    made = {
        name: averages(runs, figures) for name, runs in study.runs(rows, seeds=range(3)).items()
    }
    ranked = sorted(made, key=lambda name: -made[name]["delta"])
    return {"rows": {name: made[name] for name in ranked}, "first": ranked[0]}


def figures(run: Run) -> dict[str, float]:
    """Mean gain in percent, how many lose, the worst gain, the mean value, and megabytes of a client and round both ways."""
    told, clients = run.results or {}, list(run.clients.values())
    gains = [c["gain"] for c in clients]
    return {
        "delta": told["delta"],
        "losers": sum(gain < 0 for gain in gains),
        "worst_gain": min(gains),
        "together": sum(c["value"] for c in clients) / len(clients),
        "alone": sum(c["alone"] for c in clients) / len(clients),
        "megabytes": megabytes(run),
    }


# rivals-flops

ROUNDS = 3  # in the first, images go through what is frozen, once; the last has no public part with some; the second is counted


@benchmark("rivals-flops")
def bench_rivals_flops(quick: bool = False) -> dict:
    """What a round costs each client and the server with FedMuscle and its rivals, in floating-point operations as torch counts them.

    The last row of the paper's Table 1, on `digits`. Products of matrices and convolutions count, forward and backward, whatever else does not.

        Megaflops of a round: each client's, their sum, and the server's own.
    """
    rows = {"local": "{name: local}", **METHODS}
    chosen = list(rows)[: 3 if quick else None]
    return {
        "scenario": "digits",
        "rows": {name: round_of("digits", [f"algorithm={rows[name]}"]) for name in chosen},
    }


def round_of(
    scenario: str, settings: Sequence[str], folder: str | None = None, device: str = "cpu"
) -> dict[str, float]:
    """Megaflops of one round of a scenario with these settings, its clients one by one."""
    from torch.utils.flop_counter import FlopCounterMode

    from unalike.core.federation import Federation
    from unalike.core.runtime import ClientRuntime, build_runtime
    from unalike.engines.local import LocalEngine
    from unalike.training.cuda_graphs import GraphedFunction

    told, algorithm = load(
        scenario, settings=[*settings, f"training.rounds={ROUNDS}"], device=device
    )
    found: Counter[str] = Counter()

    def counted(client: str, perform: Callable) -> Callable:
        def count(name: str, *given: Any) -> Any:
            with FlopCounterMode(display=False) as counter:
                reply = perform(name, *given)
            found[client] += (
                counter.get_total_flops() if name not in list_measurements(algorithm.Program) else 0
            )
            return reply

        return count

    def build_counted(client: Any) -> ClientRuntime:
        runtime: Any = build_runtime(client, algorithm, told.training, told.seed)
        runtime.perform = counted(client.id, runtime.perform)
        return runtime

    seen = GraphedFunction.CAPTURE_AT
    with tempfile.TemporaryDirectory() as place:
        engine = LocalEngine(build_clients(told, folder), build_counted, Path(place), stack="never")
        fed = Federation(engine, told.training, told.federation, told.seed)
        rounds = iter(algorithm.serve(fed))
        try:
            GraphedFunction.CAPTURE_AT = (
                sys.maxsize
            )  # what a GPU plays is not counted: nothing is recorded
            fed.finished = next(rounds)
            found.clear()
            with FlopCounterMode(display=False) as everything:
                next(rounds)
        finally:
            GraphedFunction.CAPTURE_AT = seen
    all_of_it = everything.get_total_flops()
    each = {client: round(found[client] / 1e6, 3) for client in fed.infos}
    return {
        "clients": round(sum(found.values()) / 1e6, 3),
        "server": round((all_of_it - sum(found.values())) / 1e6, 3),
        **each,
    }


# rivals-rates

TRIED: dict[str, tuple[str, tuple[float, ...]]] = {
    **dict.fromkeys(
        ("sage", "cofed", "feddf", "simclr", "pseudolabel"),
        ("public_lr", (0.0001, 0.0003, 0.001, 0.003, 0.01)),
    ),
    "fedhenn": ("eta", (0.01, 0.1, 1.0)),
    "fedrcl": ("weight", (0.03, 0.1, 0.3, 1.0)),
}


@benchmark("rivals-rates")
def bench_rivals_rates(study: Study) -> dict:
    """Which learning rate on the public set, or weight of an added loss, suits each rival on `digits`: seeds 100 and 101, none of the reported.

    FedMuscle's rate was chosen in the same way, on seeds 100 to 104 (docs/fedmuscleplus.md).

        Delta of each try, and for each method the best field and value.
    """
    rows: dict[str, Row] = {}
    for name, (field, values) in TRIED.items():
        for value in values:
            rows[f"{name}, {field} {value:g}"] = (
                "digits",
                [*PLAIN, f"algorithm={METHODS[name]}", f"algorithm.{field}={value}"],
            )
    made = {
        name: averages(runs, figures) for name, runs in study.runs(rows, seeds=(100, 101)).items()
    }
    best = lambda name: max(
        (row for row in made if row.startswith(f"{name},")),
        key=lambda row: made[row]["delta"],
        default=None,
    )
    return {"rows": made, "best": {name: best(name) for name in TRIED}}
