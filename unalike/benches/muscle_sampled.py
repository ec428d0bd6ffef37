"""How far the estimated Muscle loss and its gradient are from the exact ones: bias, spread, and direction, by the combinations drawn."""

import time
from statistics import mean, stdev

import torch
from torch import Tensor

from unalike.losses import muscle_loss, muscle_sampled

WIDTH, TRIES = 256, 40
LIKENESS = {
    "apart": 0.0,
    "somewhat alike": 1.0,
    "alike": 2.0,
}  # how much of the same is in every model's view of a row
SIZES = ((3, 32), (9, 4), (9, 32))  # peers, rows; the first two can be summed up whole
REFERENCE = 8192  # combinations where they cannot


def run(quick: bool = False) -> dict:
    """Of the gradient with respect to the anchor: the length of its mean error and of its spread, in parts of its own, and its cosine."""
    rows = {}
    for peers, batch in SIZES[: 2 if quick else None]:
        for name, share in LIKENESS.items():
            z, *others = views(peers, batch, share)
            truth, way = exact(z, others)
            for count in (16, 64, 256)[: 1 if quick else None]:
                rows[f"M={peers}, B={batch}, {name}, {count} drawn"] = figures(
                    z, others, truth, way, count, 5 if quick else TRIES
                )
    return {"width": WIDTH, "rows": rows}


def views(peers: int, batch: int, share: float) -> list[Tensor]:
    """Of the anchor and its peers, (batch, WIDTH) each; all have a direction in common, as features have."""
    draw = torch.Generator().manual_seed(0)
    common, offset = torch.randn(batch, WIDTH, generator=draw), torch.randn(WIDTH, generator=draw)
    return [
        (share * common + torch.randn(batch, WIDTH, generator=draw) + offset / 2).double()
        for _ in range(peers + 1)
    ]


def exact(z: Tensor, others: list[Tensor]) -> tuple[float, Tensor]:
    """Loss and gradient by all combinations, or by very many where there are too many."""
    if len(z) ** len(others) <= 2**20:
        return graded(z, lambda anchor: muscle_loss(anchor, others))
    draw = torch.Generator().manual_seed(1)
    found = [
        graded(
            z,
            lambda anchor: muscle_sampled(
                anchor, others, torch.rand(len(others), len(z), REFERENCE, generator=draw)
            ),
        )
        for _ in range(4)
    ]
    return mean(loss for loss, _ in found), torch.stack([way for _, way in found]).mean(0)


def graded(z: Tensor, loss) -> tuple[float, Tensor]:
    anchor = z.clone().requires_grad_()
    value = loss(anchor)
    return float(value.detach()), torch.autograd.grad(value, anchor)[0]


def figures(
    z: Tensor, others: list[Tensor], truth: float, way: Tensor, count: int, tries: int
) -> dict[str, float]:
    draw, begun = torch.Generator().manual_seed(2), time.perf_counter()
    found = [
        graded(
            z,
            lambda anchor: muscle_sampled(
                anchor, others, torch.rand(len(others), len(z), count, generator=draw)
            ),
        )
        for _ in range(tries)
    ]
    took = (time.perf_counter() - begun) / tries
    losses, ways = [loss for loss, _ in found], torch.stack([each for _, each in found])
    middle = ways.mean(0)
    cosines = torch.cosine_similarity(ways.flatten(1), way.flatten()[None])
    off, noise = (
        (middle - way).norm() / way.norm(),
        (ways - middle).flatten(1).norm(dim=1).mean() / way.norm(),
    )
    return {
        "loss": truth,
        "bias": mean(losses) - truth,
        "deviation": stdev(losses),
        "gradient_bias": float(off),
        "gradient_noise": float(noise),
        "cosine": float(cosines.mean()),
        "milliseconds": 1e3 * took,
    }
