"""FedMusclePlus among its rivals on `muscle-vision`, each method with a rate that one search chose."""

from collections.abc import Mapping
from dataclasses import replace
from statistics import mean
from typing import Any

from benchmarks.fedmuscle import rows_of, table
from benchmarks.study import Study, benchmark

VARIANT = "benchmarks.variants"
CHOOSING_SEEDS = (100,)
# Test on photographs held out of the training sets, of which there are fewer.
HELD_OUT = [
    "data.options.choosing=true",
    *(f"clients.{client}.data.options.choosing=true" for client in (3, 4, 5)),
    *(f"clients.{client}.test=1000" for client in range(6)),
]
# By method: its setting, and two values of it, the first of which it comes with. SAGE and SimCLR keep
# some random views of each public photograph: new ones in every pass take seven times as long.
SEARCHED: dict[str, tuple[str, tuple[str, str]]] = {
    "as shipped": ("algorithm.align_lr={}", ("0.0001", "0.001")),
    "feddf": ("algorithm={{name: feddf, public_lr: {}}}", ("0.001", "0.0001")),
    "cofed": ("algorithm={{name: cofed, public_lr: {}}}", ("0.001", "0.0001")),
    "pseudolabel": ("algorithm={{name: pseudolabel, public_lr: {}}}", ("0.001", "0.0001")),
    "sage": ("algorithm={{name: sage, views: 2, public_lr: {}}}", ("0.001", "0.0001")),
    "simclr": ("algorithm={{name: simclr, views: 4, public_lr: {}}}", ("0.001", "0.0001")),
    "fedhenn": ("algorithm={{name: fedhenn, eta: {}}}", ("0.01", "0.1")),
    "fedrcl": ("algorithm={{name: fedrcl, weight: {}}}", ("1.0", "0.03")),
}
ENCODER_HEAD = "alone, head on the encoder"
# What is compared beside them.
BESIDE: dict[str, list[str]] = {
    ENCODER_HEAD: ["algorithm={name: local}"],
    "as printed": ["algorithm={name: fedmuscle}"],
    "pairwise": ["algorithm.loss=pairwise"],
    "gramian": ["algorithm.loss=gramian"],
    "alone, unit head": [f"algorithm={{name: {VARIANT}:Alone, head_input: unit}}"],
    "alone, probe": [f"algorithm={{name: {VARIANT}:Alone, backbone_lr_scale: 0}}"],
    "alone, class means": [f"algorithm={{name: {VARIANT}:ClassMeans}}"],
}
# What runs first is what there is if the time is short.
FIRST = ("as shipped", "feddf", ENCODER_HEAD, "as printed", "pairwise", "cofed")


@benchmark("muscle-rank")
def bench_muscle_rank(study: Study) -> dict:
    """FedMusclePlus, all its rivals and clients alone on `muscle-vision`, with rates of their own.

    First two values of one rate of every method on a seed set aside (100), tested on photographs
    held out of the training sets, which leave at most 3900 public ones: `--set public.size=2000`.
    Then every method with its better value on three seeds. Gains are over clients alone with
    FedMusclePlus's model; `over_encoder_head` is Delta over clients alone with their head on the
    encoder's whole width.
    """
    search = {} if study.quick else search_rates(study)
    settings = dict(BESIDE)
    for method, (template, values) in SEARCHED.items():
        settings[method] = [template.format(better_value(method, values, search))]
    order = [*FIRST, *(name for name in settings if name not in FIRST)]
    result = table(study, rows_of(study, {name: settings[name] for name in order}))
    rows = result["rows"]
    for row in rows.values():
        if ENCODER_HEAD in rows:
            row["over_encoder_head"] = round(mean(gains_over(row, rows[ENCODER_HEAD])), 3)
    ranked = sorted(rows, key=lambda name: rows[name]["delta"], reverse=True)
    return {"search": search, "rows": {name: rows[name] for name in ranked}}


def search_rates(study: Study) -> dict[str, float]:
    """Delta by method and value, on the seed and the photographs set aside."""
    settings = {}
    for method, (template, values) in SEARCHED.items():
        for value in values:
            settings[f"{method}, {value}"] = [template.format(value), *HELD_OUT]
    result = table(replace(study, seeds=CHOOSING_SEEDS), rows_of(study, settings))
    return {name: row["delta"] for name, row in result["rows"].items()}


def better_value(method: str, values: tuple[str, str], search: Mapping[str, float]) -> str:
    """The value with the better Delta; the one that the method comes with where one is missing."""
    deltas = [search[f"{method}, {v}"] for v in values if f"{method}, {v}" in search]
    return values[deltas.index(max(deltas))] if len(deltas) == len(values) else values[0]


def gains_over(row: Mapping[str, Any], other: Mapping[str, Any]) -> list[float]:
    """Relative gains of clients in percent, of their mean scores over those of another row."""
    return [100 * (row[client] - other[client]) / other[client] for client in row["gains"]]
