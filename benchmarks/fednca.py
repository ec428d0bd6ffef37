"""Benchmarks of FedNCA."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import mean, median

import torch

from benchmarks.study import Row, Study, averages, benchmark
from unalike.algorithms.fedavg import FedAvg
from unalike.algorithms.fednca import FedNCA
from unalike.core.algorithm import Algorithm
from unalike.core.client import Client
from unalike.core.program import ClientProgram
from unalike.data import Tensors
from unalike.models import build_encoder
from unalike.report import Run
from unalike.scenarios import load
from unalike.tasks import MultiLabel
from unalike.tasks.task import label_names
from unalike.training.loop import Training

# fednca

ASL = "clients.0.task.criterion=asymmetric"
THRESHOLDS = "thresholds=training"
SEVEN = "clients.0.model.size=224"
# Label queries need a text encoder, so this row has another encoder than the others, a frozen one.
FEDLGT = ("fedlgt", ["clients.0.model={name: vlm-small}"])
AS_AUTHORS = ["attention_init=xavier", "decay_vectors=false"]
METHODS: dict[str, tuple[str, list[str]]] = {
    "fednca": ("fednca", []),
    "fedavg, BCE": ("fedavg", []),
    "fednca, thresholds": ("fednca", [THRESHOLDS]),
    "fedavg, BCE, thresholds": ("fedavg", [THRESHOLDS]),
    "fednca, as its authors begin": ("fednca", AS_AUTHORS),
    "ETF alone": ("fednca", ["disentangle=false", "rejection=0", "prototype=0"]),
    "without disentanglement": ("fednca", ["disentangle=false"]),
    "without rejection": ("fednca", ["rejection=0"]),
    "without prototypes' contrast": ("fednca", ["prototype=0"]),
    "fednca, 7x7 places": ("fednca", [SEVEN]),
    "fedavg, BCE, 7x7 places": ("fedavg", [SEVEN]),
    "fedavg, BCE, authors' head": ("fedavg", ["clients.0.task.wide_head=true"]),
    "fedavg, ASL": ("fedavg", [ASL]),
    "fedprox, BCE": ("fedprox", []),
    "fedprox, ASL": ("fedprox", [ASL]),
    "local, BCE": ("local", []),
}
ALPHAS = (0.1, 0.5)
SCENARIOS = {"": "fednca-voc", "chest: ": "fednca-chest", "lesions: ": "fednca-derma"}
QUICK = ("rounds=2", "epochs=1", "data.options={train: 240, test: 100, most: 2}")
SHOWN = ("macro_f1", "macro_auc", "micro_f1", "micro_auc", "mAP", "CF1", "OF1")
BARS = {  # how far ahead at alpha 0.1: of whom, in what, by how much at least
    "macro_f1_lead": ("fedavg, BCE", "macro_f1", 3.0),
    "macro_auc_lead": ("fedavg, BCE", "macro_auc", 1.5),
    "macro_f1_lead_on_etf": ("ETF alone", "macro_f1", 0.0),
}


LR_FACTORS = (1 / 3, 1, 3)  # learning rates tried, of the scenario's
CHOOSING = (100,)  # seeds on which they are tried
HELD_OUT = ("fednca-voc", "fednca-chest")  # whose rates are chosen on held-out training images


@benchmark("fednca")
def bench_fednca(study: Study) -> dict:
    """FedNCA against its rivals: photographs, radiographs, lesions at two skews over three seeds.

    A row for each scenario, method and skew, and one for everyone's rows together; all average
    clients uniformly. FedNCA's and FedAvg's learning rates are the better of three on another seed
    at the stronger skew with half the rounds, by macro F1; FedNCA's variants take its, all others
    FedAvg's. Leads on photographs, and what the skew costs, where their rows were run. Quick:
    canvases of digits.
    """
    rows: dict[str, Row] = {}
    for prefix, scenario in SCENARIOS.items():
        where = "fednca-digits" if study.quick else scenario
        for alpha in ALPHAS:
            for name in METHODS:
                rows[prefix + row(name, alpha)] = (where, settings_of(name, alpha))
            if not prefix and not study.quick:
                method, settings = FEDLGT
                skew = f"data.partition.alpha={alpha}"
                rows[row("fedlgt", alpha)] = (where, [*plain(method), skew, *settings])
        together = ["clients.0.count=1", "data.partition={name: iid}"]
        rows[f"{prefix}centralised, BCE"] = (where, [*plain("fedavg"), *together])
    return compare_methods(study, rows)


PAIR = ("fednca", "fedavg, BCE")  # alphas 0.1, then 0.5; the parts at alpha 0.5
PARTS_OF_RANK = (
    "fedavg, BCE, authors' head",
    "without prototypes' contrast",
    "without disentanglement",
    "fednca, as its authors begin",
    "ETF alone",
)


@benchmark("fednca-bars")
def bench_fednca_bars(study: Study) -> dict:
    """The rows of `fednca` that its bars are about, the most important first; for `--minutes`.

    FedNCA and FedAvg on radiographs and photographs, and what ranks labels at the milder skew.
    """
    names = [(name, alpha) for alpha in ALPHAS for name in PAIR]
    names += [(name, ALPHAS[1]) for name in PARTS_OF_RANK]
    rows: dict[str, Row] = {}
    for name, alpha in names:
        for prefix in ("chest: ", ""):
            where = "fednca-digits" if study.quick else SCENARIOS[prefix]
            rows[prefix + row(name, alpha)] = (where, settings_of(name, alpha))
    return compare_methods(study, rows)


def settings_of(name: str, alpha: float) -> list[str]:
    """Settings of a method of the table at a skew."""
    method, settings = METHODS[name]
    return [*plain(method), f"data.partition.alpha={alpha}", *settings]


def compare_methods(study: Study, rows: Mapping[str, Row]) -> dict:
    """The table of these rows, with learning rates chosen on another seed."""
    rates: dict[str, float] = {}
    if not study.quick:
        rows, rates = with_rates(study, rows)
    # nothing to run where no search was finished in time
    measured = study.runs(rows, QUICK, range(3)) if rows else {}
    summaries = {
        name: averages(runs, figures) | {"by_label": label_table(runs)}
        for name, runs in measured.items()
    }
    return {"rates": rates, "rows": summaries, **leads(summaries)}


def rate_from(name: str) -> str:
    """The row whose learning rate a row takes: FedNCA's or FedAvg's on the same scenario."""
    prefix = next((p for p in SCENARIOS if p and name.startswith(p)), "")
    ours = name.startswith((f"{prefix}fednca", f"{prefix}ETF", f"{prefix}without"))
    return f"{prefix}{PAIR[0] if ours else PAIR[1]}"


def with_rates(study: Study, rows: Mapping[str, Row]) -> tuple[dict[str, Row], dict[str, float]]:
    """The selected rows, each with the learning rate that is best on another seed.

    Returns: the rows, and the macro F1 of each rate that was tried.
    """
    selected = {name: row for name, row in rows.items() if study.selects(name)}
    tried: dict[str, Row] = {}
    for base in dict.fromkeys(map(rate_from, selected)):
        scenario_name, settings = rows[row(base, ALPHAS[0])]
        training = load(scenario_name)[0].training
        search = [*settings, f"rounds={max(1, training.rounds // 2)}"]
        if scenario_name in HELD_OUT:
            search.append("data.options.choosing=true")
        for factor in LR_FACTORS:
            rate = f"training.lr={training.lr * factor:.3g}"
            tried[f"{base}; {rate}"] = (scenario_name, [*search, rate])
    means: dict[str, float] = {}
    for name, runs in replace(study, only=(), seeds=CHOOSING).runs(tried).items():
        means[name] = round(mean(figures(run)["macro_f1"] for run in runs), 3)
    chosen: dict[str, Row] = {}
    for name, (scenario_name, settings) in selected.items():
        known = [key for key in means if key.startswith(f"{rate_from(name)}; ")]
        if known:
            best = max(known, key=means.__getitem__).partition("; ")[2]
            chosen[name] = (scenario_name, [*settings, best])
        else:
            study.left_out.append(f"{name}: no learning rate")
    return chosen, means


def label_table(runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """F1, AUC and average precision of each label, means over seeds where defined."""
    tables = [(run.results or {}).get("by_label", {}) for run in runs]
    labels = dict.fromkeys(label for table in tables for label in table)
    found: dict[str, dict[str, float]] = {}
    for label in labels:
        for name in ("f1", "auc", "average_precision"):
            values = [table[label][name] for table in tables if name in table.get(label, {})]
            if values:
                found.setdefault(label, {})[name] = round(mean(values), 2)
    return found


def leads(rows: dict[str, dict]) -> dict[str, float]:
    """FedNCA's leads on photographs at the stronger skew, and what it loses by it."""
    result: dict[str, float] = {}
    for key, (rival, metric, bar) in BARS.items():
        ours, theirs = rows.get(row("fednca", ALPHAS[0])), rows.get(row(rival, ALPHAS[0]))
        if ours and theirs:
            result |= {key: round(ours[metric] - theirs[metric], 3), f"{key}_bar": bar}
    for key, name in (("macro_f1_drop", "fednca"), ("macro_f1_drop_bar", "fedavg, BCE")):
        skewed, even = (rows.get(row(name, alpha)) for alpha in ALPHAS)
        if skewed and even:
            result[key] = round(even["macro_f1"] - skewed["macro_f1"], 3)
    return result


def row(name: str, alpha: float) -> str:
    return f"{name}, alpha {alpha}"


def plain(method: str) -> list[str]:
    """A method with every client counting the same, as FedNCA's authors have all of them."""
    uniform = "" if method == "local" else ", mean: uniform"
    return ["alone=false", "evaluations=1", f"algorithm={{name: {method}{uniform}}}"]


def figures(run: Run) -> dict[str, float]:
    told = (run.results or {})["metrics"]
    return {name: told[name] for name in SHOWN}


# fednca-cost

BATCH, LABELS, SHAPE = 32, 20, (3, 96, 96)
ENCODER = (
    "efficientnet",
    {"stage": 7, "size": 192, "weights": "none"},
)  # that of fednca-voc; what weights hold costs nothing


@benchmark("fednca-cost")
def bench_fednca_cost(study: Study) -> dict:
    """What FedNCA's head and losses cost: forward and backward of the whole model over that with the plain head, batch 32.

    Milliseconds of a step without the optimizer, medians of interleaved turns, and the median ratio.
    """
    device = study.device
    name, options, shape = (
        ("cnn", {"channels": [32, 64, 64], "width": 64}, (3, 16, 16))
        if study.quick
        else (*ENCODER, SHAPE)
    )
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(256, (BATCH, *shape), dtype=torch.uint8, generator=draw)
    y = (torch.rand(BATCH, LABELS, generator=draw) < 0.1).float()
    model = partial(build_encoder, name, shape, options)
    client = Client(
        "bench", model, MultiLabel(label_names(LABELS)), train=Tensors(x, y), device=device
    )
    methods: list[Algorithm] = [FedAvg(), FedNCA()]
    programs = [method.Program(client, method, Training(), 0) for method in methods]
    x, y = client.to_device(x), client.to_device(y)

    def seconds(program: ClientProgram) -> float:
        for p in program.model.parameters():
            p.grad = None
        wait(device)
        begun = time.perf_counter()
        program.loss(x, y).backward()
        wait(device)
        return time.perf_counter() - begun

    turns = 5 if study.quick else 30
    for _ in range(3):
        [seconds(program) for program in programs]  # warm up
    plain, ours = zip(*([seconds(program) for program in programs] for _ in range(turns)))
    return {
        "batch": BATCH,
        "plain_ms": 1e3 * median(plain),
        "fednca_ms": 1e3 * median(ours),
        "ratio": median(b / a for a, b in zip(plain, ours, strict=True)),
        "ratio_bar": 1.25,
    }


def wait(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
