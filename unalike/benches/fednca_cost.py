"""What FedNCA's head and losses cost: forward and backward of the whole model over that with the plain head, batch 32."""

import time
from functools import partial
from statistics import median

import torch

from unalike.algorithms.fedavg import FedAvg
from unalike.algorithms.fednca import FedNCA
from unalike.benches import Study
from unalike.core.algorithm import Algorithm, ClientProgram
from unalike.core.client import Client
from unalike.data import Tensors
from unalike.models import build_encoder
from unalike.tasks import MultiLabel
from unalike.tasks.task import label_names
from unalike.training.loop import Training

BATCH, LABELS, SHAPE = 32, 20, (3, 96, 96)
ENCODER = (
    "efficientnet",
    {"stage": 7, "size": 192, "weights": "none"},
)  # that of fednca-voc; what weights hold costs nothing


def run(study: Study) -> dict:
    """Milliseconds of a step without the optimizer, medians of interleaved turns, and the median ratio."""
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
