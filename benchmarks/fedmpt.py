"""Benchmarks of FedMPT."""

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.fednca import wait
from benchmarks.study import Row, Study, averages, benchmark
from unalike.algorithms.fedmpt import FedMPT
from unalike.core.client import Client
from unalike.data import Tensors
from unalike.models import build_encoder
from unalike.models.prompts import INITIAL_WORDS
from unalike.report import Run
from unalike.tasks import MultiLabel
from unalike.training.loop import Training, apply_gradients, step

# fedmpt: methods compared; the tables of this file are built here, too

RATES = {  # best learning rate of each method on the split `choosing`, seed 100 (LOG.md)
    "fedmpt": 0.008,
    "promptfl": 0.008,
    "feddualcoop": 0.03,
    "fedtpg": 0.002,
    "fedmvp": 0.002,
    "fedram": 0.004,
    "linearprobe": 0.008,
    "zeroshot": 0.002,
}
METHODS = {name: [f"algorithm={{name: {name}}}", f"lr={rate}"] for name, rate in RATES.items()}
CLASSES = 20
SHOWN = ("mAP", "CF1", "OF1")
PLAIN = ("alone=false", "evaluations=1", "checkpoint=1000")
QUICK = ("rounds=2", "data.options={train: 240, test: 100}", "clients.0.count=3")


@benchmark("fedmpt")
def bench_fedmpt(study: Study) -> dict:
    """FedMPT against its baselines on VOC 2012, twelve clusters of images as clients (t = 60 %).

    One row per method, three seeds. `mAP_lead` is the mAP of FedMPT minus that of the best
    baseline. A quick benchmark uses scenes of digits.
    """
    result = table(study, {name: [] for name in METHODS})
    rows = result["rows"]
    baselines = [row["mAP"] for name, row in rows.items() if name != "fedmpt"]
    if "fedmpt" in rows and baselines:
        result["mAP_lead"] = round(rows["fedmpt"]["mAP"] - max(baselines), 3)
        result["mAP_lead_bar"] = 2.0
    return result


def table(study: Study, rows: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Run rows by name with their settings; a row's name starts with its method."""
    scenario = "fedmpt-digits" if study.quick else "fedmpt-voc"
    configured: dict[str, Row] = {}
    for name, settings in rows.items():
        method = name.split(",")[0]
        configured[name] = (scenario, [*PLAIN, *METHODS[method], *settings])
    runs = study.runs(configured, QUICK, range(3))
    summaries = {name: averages(row_runs, figures) for name, row_runs in runs.items()}
    return {"scenario": scenario, "rows": summaries}


def sweep(study: Study, across: str, percentages: Mapping[int, Sequence[str]]) -> dict[str, Any]:
    """Run every method at every percentage, with mAP as curves.

    Args:
        across: label of the horizontal axis.
        percentages: settings of each percentage.
    """
    settings: dict[str, Sequence[str]] = {}
    for percent, values in percentages.items():
        settings |= {f"{method}, {percent} %": values for method in METHODS}
    result = table(study, settings)
    rows = result["rows"]
    lines = {}
    for method in METHODS:
        names = {str(percent): f"{method}, {percent} %" for percent in percentages}
        line = {percent: rows[name]["mAP"] for percent, name in names.items() if name in rows}
        if line:
            lines[method] = line
    return result | {"curves": {"across": across, "up": "mAP", "lines": lines}}


def figures(run: Run) -> dict[str, float]:
    """Metrics of a run and the number of trainable parameters of a client."""
    metrics = (run.results or {})["metrics"]
    client = next(iter(run.clients.values()))
    return {name: metrics[name] for name in SHOWN} | {"trainable": client.get("trainable", 0)}


# fedmpt-ablation: parts of the method

PARTS = ("prompts", "adapters", "transport", "gate")
ENABLED = {  # parts in use, and the paper's mAP on VOC 2007 with CLIP
    ("prompts",): 87.08,
    ("adapters",): 84.40,
    ("prompts", "adapters"): 87.62,
    ("prompts", "transport"): 89.35,
    ("prompts", "adapters", "transport"): 89.64,
    ("prompts", "adapters", "gate"): 87.89,
    PARTS: 90.10,
}


@benchmark("fedmpt-ablation")
def bench_fedmpt_ablation(study: Study) -> dict:
    """FedMPT without condition prompts, adapters, transport or gate (the paper's Table 4).

    One row for each set of parts in use.
    """
    names = {f"fedmpt, {' '.join(enabled)}": enabled for enabled in ENABLED}
    settings = {}
    for name, enabled in names.items():
        settings[name] = [f"algorithm.{part}=false" for part in PARTS if part not in enabled]
    result = table(study, settings)
    for name, row in result["rows"].items():
        row["paper"] = ENABLED[names[name]]
    return result


# fedmpt-readings: other readings of the paper, one at a time

READINGS = {
    "as shipped": [],
    "standardized per condition": ["algorithm.standardize=each"],
    "conditions by spread": ["algorithm.gate=spread"],
    "plan without gradient": ["algorithm.plan_gradient=false"],
    "sure patches first": ["algorithm.certain=true"],
    "as published": [
        "algorithm.standardize=each",
        "algorithm.gate=spread",
        "algorithm.plan_gradient=false",
        "algorithm.certain=true",
    ],
}


@benchmark("fedmpt-readings")
def bench_fedmpt_readings(study: Study) -> dict:
    """FedMPT where the paper and its published program differ, one choice at a time.

    The order of standardisation and mixing, weights of conditions, gradient of the plan, the sign
    of eq. 8; the last row has all four of the program's.
    """
    return table(study, {f"fedmpt, {name}": settings for name, settings in READINGS.items()})


# fedmpt-settings: rank, temperature and number of tokens

SETTINGS: dict[str, tuple[list[str], Sequence[float]]] = {
    "rank": (["rank"], (8, 16, 32, 64)),
    "temperature": (["temperature"], (0.5, 1, 2, 4, 8)),
    "tokens": (["condition_tokens", "class_tokens"], (1, 2, 4, 5, 7, 8)),
}


@benchmark("fedmpt-settings")
def bench_fedmpt_settings(study: Study) -> dict:
    """FedMPT by rank of the adapters, temperature and number of learnt tokens, one at a time."""
    rows: dict[str, Sequence[str]] = {}
    for name, (fields, values) in SETTINGS.items():
        for value in values:
            rows[f"fedmpt, {name} {value:g}"] = [f"algorithm.{field}={value}" for field in fields]
    return table(study, rows)


# fedmpt-labels: clusters of labels, as the published program makes clients

LABEL_CLUSTERS = ("data.partition={name: by_cluster, of: labels}", "algorithm.mean=uniform")
ALSO = {  # Fed-RAM with the parts that FedMPT was given, DualCoOp with one context
    "fedram with dropout": ("fedram", ["algorithm.dropout=0.3", "algorithm.whole=true"]),
    "feddualcoop, one context": (
        "feddualcoop",
        ["algorithm.own=false", "algorithm.compare=true", "lr=0.008"],
    ),
    "fedmvp, learnt texts": ("fedmvp", ["algorithm.text_tokens=4"]),
    "poscoop": ("poscoop", ["lr=0.008"]),
    "fedpgp": ("fedpgp", ["lr=0.008"]),
    "fedlgt": ("fedlgt", ["lr=0.002"]),
}

TOLD: dict[str, list[str]] = {
    "all told": [],
    "90 % unknown": ["clients.0.masked=0.9", "clients.0.masked_as=unknown"],
    "90 % absent": ["clients.0.masked=0.9", "clients.0.masked_as=absent"],
}
SEARCHED = (0.5, 1.0, 2.0)  # times a row's learning rate
CHOOSING = ("data.options={choosing: true}", "rounds=10")
CHOOSING_SEEDS = (100,)
LEAD_BARS = {"all told": 3.0, "90 % unknown": 0.0, "90 % absent": 0.0}


@benchmark("fedmpt-labels")
def bench_fedmpt_labels(study: Study) -> dict:
    """FedMPT against its baselines with clusters of labels as clients, all averaged evenly.

    One row per method with all labels told, with 90 % of them unknown, and absent: `--only "all
    told"`, `"90 % unknown"` or `"90 % absent"` is one of the three tables. `best_macro_f1` is at the
    threshold that is best on the test set, as the published program reports F1. `mAP_lead` is the
    mAP of FedMPT minus that of the best baseline of a table.
    """
    return label_tables(study, {})


@benchmark("fedmpt-labels-searched")
def bench_fedmpt_labels_searched(study: Study) -> dict:
    """As fedmpt-labels, each method at the best of three learning rates on held-out photographs.

    The rates are half, once and twice the one of the other tables; the split is `choosing`, seed
    100, ten rounds, all labels told. Rates and their mAP are in the result.
    """
    searched = search_rates(study)
    best = {
        name: max(by_rate, key=lambda rate: by_rate[rate]) for name, by_rate in searched.items()
    }
    return label_tables(study, best) | {"searched": searched, "rates": best}


def label_settings(name: str) -> list[str]:
    """Settings of a row of `fedmpt-labels`, without those of hidden labels."""
    method, settings = ALSO.get(name, (name, []))
    own = METHODS.get(method, [f"algorithm={{name: {method}}}"])
    return [*PLAIN, *own, *LABEL_CLUSTERS, *settings]


def own_rate(name: str) -> float:
    """The learning rate of a row of `fedmpt-labels`."""
    return next(
        float(setting.removeprefix("lr="))
        for setting in reversed(label_settings(name))
        if setting.startswith("lr=")
    )


def search_rates(study: Study) -> dict[str, dict[float, float]]:
    """The mAP of each row of `fedmpt-labels` at half, once and twice its learning rate."""
    scenario = "fedmpt-digits" if study.quick else "fedmpt-voc"
    rows: dict[str, Row] = {}
    for name in (*METHODS, *ALSO):
        if study.only and not any(study.selects(f"{name}, {told}") for told in TOLD):
            continue
        for factor in SEARCHED:
            rate = factor * own_rate(name)
            settings = [*label_settings(name), *CHOOSING, f"lr={rate:g}"]
            rows[f"{name}, rate {rate:g}"] = (scenario, settings)
    runs = replace(study, seeds=CHOOSING_SEEDS, only=()).runs(rows, QUICK)
    searched: dict[str, dict[float, float]] = {}
    for row, own in runs.items():
        name, _, ending = row.rpartition(", rate ")
        searched.setdefault(name, {})[float(ending)] = round(figures(own[0])["mAP"], 3)
    return searched


def label_tables(study: Study, rates: Mapping[str, float]) -> dict:
    """The three tables of `fedmpt-labels`, rows at these learning rates or at their own."""
    scenario = "fedmpt-digits" if study.quick else "fedmpt-voc"
    configured: dict[str, Row] = {}
    for told, hidden in TOLD.items():
        for name in (*METHODS, *ALSO):
            values = [*label_settings(name), *hidden]
            if rates.get(name, own_rate(name)) != own_rate(name):
                values.append(f"lr={rates[name]:g}")
            configured[f"{name}, {told}"] = (scenario, values)
    runs = study.runs(configured, QUICK, range(3))
    rows = {name: averages(own, label_figures) for name, own in runs.items()}
    leads = {}
    for told in TOLD:
        scores = {name: row["mAP"] for name, row in rows.items() if name.endswith(told)}
        fedmpt = scores.pop(f"fedmpt, {told}", None)
        if fedmpt is not None and scores:
            leads[told] = round(fedmpt - max(scores.values()), 3)
    return {"rows": rows, "mAP_lead": leads, "mAP_lead_bar": LEAD_BARS}


def label_figures(run: Run) -> dict[str, float]:
    """Metrics of a run, and F1 at the threshold chosen on the test set."""
    return figures(run) | {"best_macro_f1": (run.results or {})["metrics"]["best_macro_f1"]}


# fedmpt-label-parts: what transport, conditions and gate are worth there

LABEL_PARTS: dict[str, list[str]] = {
    "all parts": [],
    "without transport": ["algorithm.transport=false"],
    "without gate": ["algorithm.gate=false"],
    "one condition": ["algorithm.conditions=[background]"],
    "without prompts": ["algorithm.prompts=false"],
    "without adapters": ["algorithm.adapters=false"],
}


@benchmark("fedmpt-label-parts")
def bench_fedmpt_label_parts(study: Study) -> dict:
    """FedMPT without one of its parts, with clusters of labels as clients.

    `mAP_worth` is the mAP with all parts minus that without a part, of each seed.
    """
    scenario = "fedmpt-digits" if study.quick else "fedmpt-voc"
    configured: dict[str, Row] = {}
    for name, settings in LABEL_PARTS.items():
        configured[name] = (scenario, [*label_settings("fedmpt"), *settings])
    runs = study.runs(configured, QUICK, range(3))
    rows = {name: averages(own, figures) for name, own in runs.items()}
    whole = rows.get("all parts", {}).get("seeds", {})
    worth = {
        name: {seed: round(whole[seed] - mAP, 3) for seed, mAP in row["seeds"].items()}
        for name, row in rows.items()
        if name != "all parts" and row["seeds"].keys() <= whole.keys()
    }
    return {"scenario": scenario, "rows": rows, "mAP_worth": worth}


# fedmpt-annotation: missing labels

SHARES = (10, 30, 50, 70, 90)


@benchmark("fedmpt-annotation")
def bench_fedmpt_annotation(study: Study) -> dict:
    """FedMPT and its baselines with 10 to 90 % of the labels missing (the paper's Table 2).

    One row per method and share, curves of mAP, and the lead over PromptFL at the last share.
    """
    settings = {share: [f"clients.0.masked={share / 100}"] for share in SHARES}
    result = sweep(study, "labels that are not told, %", settings)
    fedmpt = result["rows"].get(f"fedmpt, {SHARES[-1]} %")
    promptfl = result["rows"].get(f"promptfl, {SHARES[-1]} %")
    if fedmpt and promptfl:
        result["mAP_lead_on_promptfl"] = round(fedmpt["mAP"] - promptfl["mAP"], 3)
        result["mAP_lead_on_promptfl_bar"] = 5.0
    return result


# fedmpt-heterogeneity: number of clusters

HETEROGENEITY_SHARES = (10, 20, 40, 60, 80, 100)


@benchmark("fedmpt-heterogeneity")
def bench_fedmpt_heterogeneity(study: Study) -> dict:
    """FedMPT and its baselines by the number of clusters, t = 10 to 100 % of the labels (Table 1).

    Every cluster of images is a client. One row per method and share, curves of mAP, and the drop
    of each method from the first share to the last.
    """
    settings = {t: [f"clients.0.count={t * CLASSES // 100}"] for t in HETEROGENEITY_SHARES}
    result = sweep(study, "clients, % of the number of labels", settings)
    first, last = str(HETEROGENEITY_SHARES[0]), str(HETEROGENEITY_SHARES[-1])
    result["mAP_drop"] = {
        method: round(line[first] - line[last], 3)
        for method, line in result["curves"]["lines"].items()
        if first in line and last in line
    }
    return result


# fedmpt-participation: clients in a round

PARTICIPATION_SHARES = (10, 30, 50, 70, 90)


@benchmark("fedmpt-participation")
def bench_fedmpt_participation(study: Study) -> dict:
    """FedMPT and its baselines with 10 to 90 % of the clients in a round (Figure 6b).

    One row per method and share, and curves of mAP.
    """
    shares = PARTICIPATION_SHARES
    settings = {share: [f"federation.participation={share / 100}"] for share in shares}
    return sweep(study, "clients in a round, %", settings)


# fedmpt-step: milliseconds of a training step

BATCH = 32
LABELS = (
    "aeroplane",
    "bicycle",
    "bird",
    "boat",
    "bottle",
    "bus",
    "car",
    "cat",
    "chair",
    "cow",
    "table",
    "dog",
    "horse",
    "motorbike",
    "person",
    "plant",
    "sheep",
    "sofa",
    "train",
    "television",
)


@benchmark("fedmpt-step")
def bench_fedmpt_step(study: Study) -> dict:
    """Milliseconds of a training step of FedMPT on a CLIP ViT-B/16 with random weights, batch 32.

    Forward, backward and SGD as in a client; medians. `seen` is with cached image features, which
    clients keep. A GPU replays captured steps, as in training; `called` is without CUDA graphs. A
    quick benchmark uses a small model.
    """
    device = study.device
    with tempfile.TemporaryDirectory() as folder:
        save_random_clip(Path(folder), study.quick)
        size = 32 if study.quick else 224
        source = torch.Generator().manual_seed(0)
        x = torch.randint(256, (BATCH, 3, size, size), dtype=torch.uint8, generator=source)
        y = (torch.rand(BATCH, len(LABELS), generator=source) < 0.1).float()
        client = Client(
            "bench",
            partial(build_encoder, "clip", (3, size, size), {"model": folder}),
            MultiLabel(LABELS, "asymmetric"),
            train=Tensors(x, y),
            device=device,
        )
        method = FedMPT()
        program = method.Program(client, method, Training(optimizer="sgd"), 0)
    x, y, optimizer = client.to_device(x), client.to_device(y), program.optimizer()
    model: Any = program.model
    gradient_step = program.gradient_step(program.loss)

    def graphed_step(inputs: Any) -> None:
        gradient_step(inputs, y)
        apply_gradients(optimizer)

    def plain_step(inputs: Any) -> None:
        step(program.loss(inputs, y), optimizer)

    def milliseconds(train_step: Callable[[Any], None], inputs: Any) -> float:
        wait(device)
        start = time.perf_counter()
        train_step(inputs)
        wait(device)
        return 1e3 * (time.perf_counter() - start)

    repeats, warm_up = 3 if study.quick else 50, 5
    features = model.look(x)
    variants = {
        "step_ms": (graphed_step, x),
        "seen_step_ms": (graphed_step, features),
        "called_step_ms": (plain_step, x),
        "called_seen_step_ms": (plain_step, features),
    }
    medians = {}
    for name, (train_step, inputs) in variants.items():
        times = [milliseconds(train_step, inputs) for _ in range(warm_up + repeats)]
        medians[name] = median(times[warm_up:])
    counts: Any = program.describe()
    return medians | {
        "batch": BATCH,
        "labels": len(LABELS),
        "conditions": len(method.condition_names),
        "step_ms_bar": 40.0,
        "parameters": counts["parameters"],
        "trainable": counts["trainable"],
        "trainable_percent": 100 * counts["trainable"] / counts["parameters"],
    }


def save_random_clip(folder: Path, small: bool) -> None:
    """Save a CLIP with random weights, and a tokenizer with one token per word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import CLIPConfig, CLIPModel, PreTrainedTokenizerFast

    prompt_words = " ".join((INITIAL_WORDS, *LABELS, *FedMPT().condition_names)).split()
    words = ["<|begin|>", "<|end|>", *dict.fromkeys(prompt_words)]
    words += [f"word{i}" for i in range(len(words), 100 if small else 49408)]
    text: dict[str, int] = {}
    vision = {"image_size": 224, "patch_size": 16}
    if small:
        text = {"hidden_size": 64, "intermediate_size": 128}
        text |= {"num_hidden_layers": 2, "num_attention_heads": 2}
        vision = text | {"image_size": 32, "patch_size": 8}
    text |= {"vocab_size": len(words), "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    width = 64 if small else 512
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=width)
    CLIPModel(config).save_pretrained(folder)
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|end|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|end|>", pad_token="<|end|>"
    ).save_pretrained(folder)
    preprocessor = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
