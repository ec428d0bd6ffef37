"""Benchmarks of FedNCA."""

import time
from functools import partial
from statistics import median

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
from unalike.tasks import MultiLabel
from unalike.tasks.task import label_names
from unalike.training.loop import Training

# fednca

ASL = "clients.0.task.criterion=asymmetric"
METHODS: dict[str, tuple[str, list[str]]] = {
    "fednca": ("fednca", []),
    "fedavg, BCE": ("fedavg", []),
    "ETF alone": ("fednca", ["disentangle=false", "rejection=0", "prototype=0"]),
    "fedavg, ASL": ("fedavg", [ASL]),
    "fedprox, BCE": ("fedprox", []),
    "fedprox, ASL": ("fedprox", [ASL]),
    "local, BCE": ("local", []),
}
ALPHAS = (0.1, 0.5)
QUICK = ("rounds=2", "epochs=1", "data.options={train: 240, test: 100, most: 2}")
SHOWN = ("macro_f1", "macro_auc", "micro_f1", "micro_auc", "mAP", "CF1", "OF1")
BARS = {  # how far ahead at alpha 0.1: of whom, in what, by how much at least
    "macro_f1_lead": ("fedavg, BCE", "macro_f1", 3.0),
    "macro_auc_lead": ("fedavg, BCE", "macro_auc", 1.5),
    "macro_f1_lead_on_etf": ("ETF alone", "macro_f1", 0.0),
}


@benchmark("fednca")
def bench_fednca(study: Study) -> dict:
    """FedNCA against its rivals: VOC 2012 at two skews over three seeds; quick, canvases of digits.

    A row for each method and skew, and one for everyone's rows together; leads, and what the skew costs, where their rows were run.
    """
    scenario = "fednca-digits" if study.quick else "fednca-voc"
    rows: dict[str, Row] = {}
    for alpha in ALPHAS:
        for name, (method, settings) in METHODS.items():
            rows[row(name, alpha)] = (
                scenario,
                [*plain(method), f"data.partition.alpha={alpha}", *settings],
            )
    rows["centralised, BCE"] = (
        scenario,
        [*plain("fedavg"), "clients.0.count=1", "data.partition={name: iid}"],
    )
    made = {
        name: averages(runs, figures) for name, runs in study.runs(rows, QUICK, range(3)).items()
    }
    told: dict = {"scenario": scenario, "rows": made}
    for key, (rival, metric, bar) in BARS.items():
        ours, theirs = made.get(row("fednca", ALPHAS[0])), made.get(row(rival, ALPHAS[0]))
        if ours and theirs:
            told |= {key: round(ours[metric] - theirs[metric], 3), f"{key}_bar": bar}
    for key, name in (("macro_f1_drop", "fednca"), ("macro_f1_drop_bar", "fedavg, BCE")):
        skewed, even = (made.get(row(name, alpha)) for alpha in ALPHAS)
        if skewed and even:
            told[key] = round(even["macro_f1"] - skewed["macro_f1"], 3)
    return told


def row(name: str, alpha: float) -> str:
    return f"{name}, alpha {alpha}"


def plain(method: str) -> list[str]:
    return ["alone=false", "evaluations=1", f"algorithm={{name: {method}}}"]


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
