"""One training step of FedMPT on a model of the shape of CLIP ViT-B/16, batch 32, as a client makes it; quick, a small one."""

import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from unalike.algorithms.fedmpt import FedMPT
from unalike.benches import Study
from unalike.benches.fednca_cost import wait
from unalike.core.client import Client
from unalike.data import Tensors
from unalike.models import build_encoder
from unalike.models.prompts import START
from unalike.tasks import MultiLabel
from unalike.training.loop import Training, move, step

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


def run(study: Study) -> dict:
    """Milliseconds of a step: forward, backward, SGD; medians, with images looked at anew and with what was seen of them, which clients
    keep. A GPU plays steps it has recorded, as in training; `called` is without that."""
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

    tape = made.tape(made.loss)

    def played(given: Any) -> None:
        tape(given, y)
        move(optimizer)

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
        "conditions": len(method.named),
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
        *dict.fromkeys(" ".join((START, *LABELS, *FedMPT().named)).split()),
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
