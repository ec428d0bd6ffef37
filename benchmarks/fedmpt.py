"""Benchmarks of FedMPT."""

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
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

# fedmpt

RATES = {  # each method's best of several on `choosing`, seed 100 (LOG.md)
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
    """FedMPT against its rivals on VOC 2012, twelve clusters of images as clients (t = 60 %), three seeds; quick, scenes of digits.

    A row for each method; how far FedMPT is ahead of the best other in mAP, where both were run.
    """
    told = table(study, {name: [] for name in METHODS})
    others = [row["mAP"] for name, row in told["rows"].items() if name != "fedmpt"]
    if "fedmpt" in told["rows"] and others:
        told |= {
            "mAP_lead": round(told["rows"]["fedmpt"]["mAP"] - max(others), 3),
            "mAP_lead_bar": 2.0,
        }
    return told


def table(study: Study, rows: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Rows by name with their settings; a row's method is what its name begins with."""
    scenario = "fedmpt-digits" if study.quick else "fedmpt-voc"
    made: dict[str, Row] = {
        name: (scenario, [*PLAIN, *METHODS[name.split(",")[0]], *settings])
        for name, settings in rows.items()
    }
    return {
        "scenario": scenario,
        "rows": {
            name: averages(runs, figures)
            for name, runs in study.runs(made, QUICK, range(3)).items()
        },
    }


def swept(study: Study, what: str, at: Mapping[int, Sequence[str]]) -> dict[str, Any]:
    """Every method at every percentage, and mAP as curves."""
    told = table(
        study,
        {
            f"{method}, {percent} %": settings
            for percent, settings in at.items()
            for method in METHODS
        },
    )
    lines = {
        method: {
            str(percent): told["rows"][row]["mAP"]
            for percent in at
            if (row := f"{method}, {percent} %") in told["rows"]
        }
        for method in METHODS
    }
    return told | {
        "curves": {
            "across": what,
            "up": "mAP",
            "lines": {method: line for method, line in lines.items() if line},
        }
    }


def figures(run: Run) -> dict[str, float]:
    told = run.results or {}
    client = next(iter(run.clients.values()))
    return {name: told["metrics"][name] for name in SHOWN} | {
        "trainable": client.get("trainable", 0)
    }


# fedmpt-ablation

PARTS = ("prompts", "adapters", "transport", "gate")
KEPT = {  # as in the table, and the paper's mAP on VOC 2007 with CLIP
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

    A row for each set of parts that are kept.
    """
    told = table(
        study,
        {
            f"fedmpt, {' '.join(kept)}": [
                f"algorithm.{part}=false" for part in PARTS if part not in kept
            ]
            for kept in KEPT
        },
    )
    for kept, paper in KEPT.items():
        if row := told["rows"].get(f"fedmpt, {' '.join(kept)}"):
            row["paper"] = paper
    return told


# fedmpt-annotation

SHARES = (10, 30, 50, 70, 90)


@benchmark("fedmpt-annotation")
def bench_fedmpt_annotation(study: Study) -> dict:
    """FedMPT and its rivals where 10 to 90 % of the labels are not told (the paper's Table 2).

    A row for each method and share, curves of mAP, and the lead on PromptFL at the last.
    """
    told = swept(
        study,
        "labels that are not told, %",
        {share: [f"clients.0.masked={share / 100}"] for share in SHARES},
    )
    ours, theirs = (
        told["rows"].get(f"{method}, {SHARES[-1]} %") for method in ("fedmpt", "promptfl")
    )
    if ours and theirs:
        told |= {
            "mAP_lead_on_promptfl": round(ours["mAP"] - theirs["mAP"], 3),
            "mAP_lead_on_promptfl_bar": 5.0,
        }
    return told


# fedmpt-heterogeneity

HETEROGENEITY_SHARES = (10, 20, 40, 60, 80, 100)


@benchmark("fedmpt-heterogeneity")
def bench_fedmpt_heterogeneity(study: Study) -> dict:
    """FedMPT and its rivals with more and more clusters as clients: t = 10 to 100 % of the number of labels (the paper's Table 1).

    A row for each method and share, curves of mAP, and what each method loses from the first share to the last.
    """
    told = swept(
        study,
        "clients, % of the number of labels",
        {t: [f"clients.0.count={t * CLASSES // 100}"] for t in HETEROGENEITY_SHARES},
    )
    first, last = str(HETEROGENEITY_SHARES[0]), str(HETEROGENEITY_SHARES[-1])
    return told | {
        "mAP_drop": {
            method: round(line[first] - line[last], 3)
            for method, line in told["curves"]["lines"].items()
            if first in line and last in line
        }
    }


# fedmpt-participation

PARTICIPATION_SHARES = (10, 30, 50, 70, 90)


@benchmark("fedmpt-participation")
def bench_fedmpt_participation(study: Study) -> dict:
    """FedMPT and its rivals where 10 to 90 % of the clients take part in a round (the paper's Figure 6b).

    A row for each method and share, and curves of mAP.
    """
    return swept(
        study,
        "clients in a round, %",
        {share: [f"federation.participation={share / 100}"] for share in PARTICIPATION_SHARES},
    )


# fedmpt-step

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
    """One training step of FedMPT on a model of the shape of CLIP ViT-B/16, batch 32, as a client makes it; quick, a small one.

    Milliseconds of a step: forward, backward, SGD; medians, with images looked at anew and with what was seen of them, which clients
    keep. A GPU plays steps it has recorded, as in training; `called` is without that.
    """
    device = study.device
    with tempfile.TemporaryDirectory() as folder:
        shaped(Path(folder), study.quick)
        program = 32 if study.quick else 224
        draw = torch.Generator().manual_seed(0)
        x = torch.randint(256, (BATCH, 3, program, program), dtype=torch.uint8, generator=draw)
        y = (torch.rand(BATCH, len(LABELS), generator=draw) < 0.1).float()
        client = Client(
            "bench",
            partial(build_encoder, "clip", (3, program, program), {"model": folder}),
            MultiLabel(LABELS, "asymmetric"),
            train=Tensors(x, y),
            device=device,
        )
        method = FedMPT()
        made = method.Program(client, method, Training(optimizer="sgd"), 0)
    x, y, optimizer = client.to_device(x), client.to_device(y), made.optimizer()
    model: Any = made.model

    tape = made.gradient_step(made.loss)

    def played(given: Any) -> None:
        tape(given, y)
        apply_gradients(optimizer)

    def called(given: Any) -> None:
        step(made.loss(given, y), optimizer)

    def milliseconds(way: Callable[[Any], None], given: Any) -> float:
        wait(device)
        begun = time.perf_counter()
        way(given)
        wait(device)
        return 1e3 * (time.perf_counter() - begun)

    turns, seen = 3 if study.quick else 50, model.look(x)
    ways = {
        "step_ms": (played, x),
        "seen_step_ms": (played, seen),
        "called_step_ms": (called, x),
        "called_seen_step_ms": (called, seen),
    }
    told = {
        name: [milliseconds(way, given) for _ in range(turns + 5)][5:]
        for name, (way, given) in ways.items()
    }
    counts: Any = made.describe()
    return {name: median(times) for name, times in told.items()} | {
        "batch": BATCH,
        "labels": len(LABELS),
        "conditions": len(method.condition_names),
        "step_ms_bar": 40.0,
        "parameters": counts["parameters"],
        "trainable": counts["trainable"],
        "trainable_percent": 100 * counts["trainable"] / counts["parameters"],
    }


def shaped(folder: Path, small: bool) -> None:
    """A random CLIP of that shape, and a tokenizer with a token a word: what weights hold costs nothing."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import CLIPConfig, CLIPModel, PreTrainedTokenizerFast

    known = [
        "<|begin|>",
        "<|end|>",
        *dict.fromkeys(" ".join((INITIAL_WORDS, *LABELS, *FedMPT().condition_names)).split()),
    ]
    words = known + [f"word{i}" for i in range(len(known), 100 if small else 49408)]
    size = (
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        }
        if small
        else {}
    )
    eye = (
        size | {"image_size": 32, "patch_size": 8}
        if small
        else {"image_size": 224, "patch_size": 16}
    )
    text = size | {
        "vocab_size": len(words),
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
    }
    CLIPModel(
        CLIPConfig(text_config=text, vision_config=eye, projection_dim=64 if small else 512)
    ).save_pretrained(folder)
    plain = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<|end|>")
    )
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=plain, bos_token="<|begin|>", eos_token="<|end|>", pad_token="<|end|>"
    ).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3})
    )
