"""What of FedMuscle can be measured without a GPU, on `digits`: messages, one round, newcomers, ceilings."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.fedmuscle import final_values, relative_gains, table
from benchmarks.study import Row, Study, averages, benchmark
from benchmarks.variants import Alone
from unalike.data.samples import merge
from unalike.report import Run, read
from unalike.runs.api import run
from unalike.scenarios import build_clients, load
from unalike.scenarios.rows import dataset_of

VARIANT = "benchmarks.variants"
WIDTH_AND_RATE = "name: fedmuscleplus, width: 32, align_lr: 0.003"
SHIPPED = f"{WIDTH_AND_RATE}, distill_public: never"

# muscle-messages: bytes against Delta

MESSAGES: dict[str, str] = {
    "as shipped": SHIPPED,
    "bfloat16": f"{SHIPPED}, message_dtype: bfloat16",
    "int8": f"{SHIPPED}, message_dtype: int8",
    "int4": f"{SHIPPED}, message_dtype: int4",
    "half the rows, twice the rate": (
        "name: fedmuscleplus, width: 32, align_lr: 0.006, distill_public: never, pass_rows: 400"
    ),
    "int4, half the rows, twice the rate": (
        "name: fedmuscleplus, width: 32, align_lr: 0.006, distill_public: never, message_dtype: int4, "
        "pass_rows: 400"
    ),
    "one exchange a pass": f"{SHIPPED}, sync: epoch",
    "one exchange a pass, int4": f"{SHIPPED}, sync: epoch, message_dtype: int4",
    "one exchange a pass, int4, two peers": (
        f"{SHIPPED}, sync: epoch, message_dtype: int4, peers: 2"
    ),
    "one exchange a pass, int8, one peer": (
        f"{SHIPPED}, sync: epoch, message_dtype: int8, peers: 1"
    ),
}


@benchmark("muscle-messages")
def bench_muscle_messages(study: Study) -> dict:
    """Delta of FedMusclePlus on `digits` by what its messages are rounded to and how many there are.

    `share_of_bytes` is relative to the first row.
    """
    rows: dict[str, Row] = {
        name: ("digits", [f"algorithm={{{fields}}}"]) for name, fields in MESSAGES.items()
    }
    result = table(study, rows)
    measured = result["rows"]
    first = next(iter(measured.values()))
    for row in measured.values():
        if first["megabytes"]:
            row["share_of_bytes"] = round(row["megabytes"] / first["megabytes"], 3)
    return result | {"share_of_bytes_bar": 0.25, "delta_within_bar": 1.0}


# muscle-one-round: what a client has after a single round

ONE_ROUND = ("rounds=1", "epochs=100")
AFTER: dict[str, str] = {
    "alone": f"{VARIANT}:Alone, head_input: unit",
    "alone, head refitted": f"{VARIANT}:Alone, head_input: unit, refit: 50",
    **{f"as printed, T={passes}": f"passes: {passes}" for passes in (1, 3, 5)},
    **{f"head refitted, T={passes}": f"passes: {passes}, refit: 50" for passes in (1, 3, 5)},
    **{
        f"alignment before local epochs, T={passes}": f"passes: {passes}, order: alignment"
        for passes in (1, 3, 5)
    },
    "own optimizer, T=5": "passes: 5, own_optimizer: true",
    "own peers, T=5": "passes: 5, own_peers: true",
    "own peers, head refitted, T=5": "passes: 5, own_peers: true, refit: 50",
    "alone, raw head": f"{VARIANT}:Alone",
    "raw head, T=5": "passes: 5, head_input: raw",
    "raw head, head refitted, T=5": "passes: 5, head_input: raw, refit: 50",
}


@benchmark("muscle-one-round")
def bench_muscle_one_round(study: Study) -> dict:
    """Why one round of FedMuscle as printed loses, on `digits`: one round of 100 local epochs.

    After it the head may be trained anew on the client's own labels, the rest kept as aligned: if
    the representation is worse, that does not help; if only the head no longer fits, it does.
    Gains are over clients alone with unit vectors to the head (first row).
    """
    rows: dict[str, Row] = {}
    for name, fields in AFTER.items():
        method = fields if fields.startswith(VARIANT) else f"{VARIANT}:OneRound, {fields}"
        first, *rest = method.split(", ")
        settings = ", ".join([f'name: "{first}"', "width: 32", *rest])
        rows[name] = ("digits", [*ONE_ROUND, f"algorithm={{{settings}}}"])
    return table(study, rows)


# muscle-newcomer: a client that joins late

NEWCOMERS = ("ada", "dora", "emil")
ARRIVES, ROUNDS = 11, 20


@benchmark("muscle-newcomer")
def bench_muscle_newcomer(study: Study) -> dict:
    """One client of `digits` joins in round 11 of 20; and rounds with two thirds of the clients.

    `newcomer` is its score after 10 rounds with the others, `alone` after 10 rounds alone, `fresh`
    after the first 10 rounds of a federation of all six; `others` and `others_before` are mean
    scores of the other five at the end, with it and in a federation that it is in from the start.
    """
    short = [f"rounds={ROUNDS - ARRIVES + 1}", "alone=false", "evaluations=1"]
    whole = ["alone=false", "evaluations=1"]
    rows: dict[str, Row] = {
        "alone": ("digits", [*short, f'algorithm={{name: "{VARIANT}:Alone", width: 32}}']),
        "fresh": ("digits", short),
        "from the start": ("digits", whole),
    }
    for client in NEWCOMERS:
        fields = f'name: "{VARIANT}:Newcomer", width: 32, align_lr: 0.003, distill_public: never'
        fields += f", newcomer: {client}, arrives: {ARRIVES}"
        rows[f"{client} joins late"] = ("digits", [*whole, f"algorithm={{{fields}}}"])
    quick = ("rounds=2", "epochs=1", "public.size=64")
    runs = study.runs(rows, quick, range(3))
    summaries = {}
    for client in NEWCOMERS:
        late = runs.get(f"{client} joins late", [])
        if late and {"alone", "fresh", "from the start"} <= runs.keys():
            summaries[f"{client} joins late"] = newcomer_summary(client, late, runs)
    return {"rows": summaries or {name: {"runs": len(made)} for name, made in runs.items()}}


def newcomer_summary(
    client: str, late: Sequence[Run], runs: dict[str, list[Run]]
) -> dict[str, Any]:
    """Scores of a newcomer and of the others, over seeds."""
    by_seed = {
        name: {run.seed: final_values(run) for run in runs[name]}
        for name in ("alone", "fresh", "from the start")
    }

    def figures(run: Run) -> dict[str, float]:
        values = final_values(run)
        alone = by_seed["alone"][run.seed][client]
        start = by_seed["from the start"][run.seed]
        return {
            "gain": 100 * (values[client] - alone) / alone if alone else 0.0,
            "newcomer": values[client],
            "alone": alone,
            "fresh": by_seed["fresh"][run.seed][client],
            "others": mean(value for id, value in values.items() if id != client),
            "others_before": mean(value for id, value in start.items() if id != client),
        }

    return averages(late, figures)


# muscle-ceilings: what there is to gain


@benchmark("muscle-ceilings")
def bench_muscle_ceilings(study: Study) -> dict:
    """Clients alone with all labels of their task: what there is to gain, beside every Delta.

    Each client trains as long as alone, but on the labelled rows of all clients with its dataset
    and target. Whole scenarios are the rows: `--only muscle-vision --data-dir FOLDER`; without
    `--only` it is `digits`.
    """
    names = study.only or ("digits",)
    rows = {}
    seeds = [0] if study.quick else study.seeds or range(3)
    for name in names:
        gains = [ceiling_of(study, name, seed) for seed in seeds]
        clients = gains[0]
        rows[name] = {
            "delta": round(mean(mean(one.values()) for one in gains), 2),
            "seeds": [round(mean(one.values()), 2) for one in gains],
            "gains": {id: round(mean(one[id] for one in gains), 1) for id in clients},
        }
    return {"rows": rows}


def ceiling_of(study: Study, name: str, seed: int) -> dict[str, float]:
    """Gain in percent of each client of a scenario with all labels of its task."""
    settings = list(study.settings)
    if study.quick:
        settings += ["rounds=2", "epochs=1"]
    scenario, algorithm = load(name, settings=settings, seed=seed, device=study.device)
    clients = build_clients(scenario, study.data_dir)
    groups = [group for group in scenario.clients for _ in group.ids]
    kinds = [f"{dataset_of(scenario, group)} {group.target}" for group in groups]
    pooled = []
    for client, kind in zip(clients, kinds, strict=True):
        alike = [other.train for other, its in zip(clients, kinds, strict=True) if its == kind]
        pooled.append(replace(client, train=merge(alike)))
    method = Alone(width=getattr(algorithm, "width", 256))
    values = []
    for group in (clients, pooled):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            run(method, group, training=scenario.training, seed=seed, out=out, alone=False)
            values.append(final_values(read(out)))
    return relative_gains(values[1], values[0])


# muscle-parts: the parts of FedMusclePlus one by one, and for rivals

PARTS: dict[str, str] = {
    "as shipped": SHIPPED,
    "no alignment": "name: fedmuscleplus, width: 32, align_lr: 1.0e-12, distill_public: never",
    "shared start": f"{SHIPPED}, projection_init: shared",
    "shared start, slower backbone": f"{SHIPPED}, projection_init: shared, backbone_lr_scale: 0.1",
    "slower backbone": f"{SHIPPED}, backbone_lr_scale: 0.1",
    "averaged heads": f"{SHIPPED}, average_heads: round",
    "distillation": f"{WIDTH_AND_RATE}, distill_public: all",
    "decay": f"{SHIPPED}, decay: true",
    "distillation, averaged heads, shared start": (
        f"{WIDTH_AND_RATE}, distill_public: all, average_heads: round, projection_init: shared"
    ),
    "distillation, no alignment": (
        "name: fedmuscleplus, width: 32, align_lr: 1.0e-12, distill_lr: 0.003, distill_public: all"
    ),
}
# By rival: its name here, and its fields.
RIVALS_WITH_PARTS = {
    "feddf": (f"{VARIANT}:FedDFWithParts", "public_lr: 0.0003"),
    "cofed": (f"{VARIANT}:CoFEDWithParts", "public_lr: 0.0003"),
    "fedproto": (f"{VARIANT}:FedProtoWithParts", "lam: 1.0"),
}
RIVAL_PARTS = {
    "": "",
    ", shared start": ", joint_start: true",
    ", averaged heads": ", average_heads: true",
    ", both": ", joint_start: true, average_heads: true",
}


@benchmark("muscle-parts")
def bench_muscle_parts(study: Study) -> dict:
    """Parts of FedMusclePlus added one by one on `digits`, and two of them for three rivals.

    `feddf` and so on have their heads on a projection to 32 numbers, as FedMusclePlus; `feddf,
    head on the encoder` is as the method comes.
    """
    methods = dict(PARTS)
    for rival, (name, fields) in RIVALS_WITH_PARTS.items():
        for part, more in RIVAL_PARTS.items():
            methods[rival + part] = f'name: "{name}", width: 32, {fields}{more}'
        if rival != "fedproto":
            methods[f"{rival}, head on the encoder"] = f"name: {rival}, {fields}"
    rows: dict[str, Row] = {
        name: ("digits", [f"algorithm={{{fields}}}"]) for name, fields in methods.items()
    }
    return table(study, rows)


# muscle-factorial: why the printed method gains or loses


@benchmark("muscle-factorial")
def bench_muscle_factorial(study: Study) -> dict:
    """Head input, optimizers, the model that clients end with and the rate of FedMuscle on `digits`.

    All combinations of unit vectors or raw features to the head, one optimizer or two, and the
    model as aligned or after local epochs; the rate of the alignment's own optimizer is that of
    local epochs or three times it. Gains are over clients alone with raw features (first row),
    who are ahead of those with unit vectors (second row).
    """
    fields = {
        "alone, raw head": f'name: "{VARIANT}:Alone", width: 32',
        "alone, unit head": f'name: "{VARIANT}:Alone", width: 32, head_input: unit',
    }
    optimizers = {
        "one optimizer": f'name: "{VARIANT}:OneOptimizer", distill_public: never',
        "two optimizers": "name: fedmuscleplus, distill_public: never",
        "two optimizers, 3e-3": "name: fedmuscleplus, distill_public: never, align_lr: 0.003",
    }
    for head in ("unit", "raw"):
        for optimizer, method in optimizers.items():
            for final in ("aligned", "local"):
                fields[f"{head} head, {optimizer}, {final}"] = (
                    f"{method}, width: 32, head_input: {head}, final_model: {final}"
                )
    fields["as printed"] = "name: fedmuscle, width: 32"
    rows: dict[str, Row] = {
        name: ("digits", [f"algorithm={{{its}}}"]) for name, its in fields.items()
    }
    return table(study, rows)
