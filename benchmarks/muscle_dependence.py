"""Where the Muscle loss keeps what pairwise alignment loses: made views whose dependence is known.

Every view is a vector that mixes a few latent classes with private noise. Encoders of all views are
trained together by one loss, without labels; then it is measured how much of each representation a
latent explains.
"""

from collections.abc import Mapping, Sequence
from statistics import mean, stdev

import torch
from torch import Tensor, nn

from benchmarks.study import benchmark
from unalike.losses import anchored_loss
from unalike.methods.anchored_contrast import LossName

CLASSES, NOISE, WIDTH, BATCH, STEPS = 5, 12, 8, 32, 400
# By name: the loss and its temperature; that of the Muscle loss without the anchor is 0.15.
LOSSES: dict[str, tuple[LossName, float]] = {
    "muscle": ("muscle", 0.2),
    "pairwise": ("pairwise", 0.2),
    "pairwise at 0.1": ("pairwise", 0.1),
    "pairwise at 0.5": ("pairwise", 0.5),
    "gramian": ("gramian", 0.2),
}
# By setting: the latents that each view shows. `sum` is a + b modulo CLASSES: it depends on a and b
# together and on neither of them alone.
SETTINGS: dict[str, tuple[tuple[str, ...], ...]] = {
    "one cause of all": (("a",), ("a",), ("a",)),
    "a sum, which no pair shows": (("a",), ("b",), ("sum",)),
    "a sum beside a common cause": (("a", "c"), ("b", "c"), ("sum", "c")),
    "two peers alike, one other": (("a", "b"), ("a",), ("a",), ("b",)),
    "peers that share more than the anchor has": (("a",), ("a", "b"), ("a", "b")),
}


@benchmark("muscle-dependence")
def bench_muscle_dependence(quick: bool = False) -> dict:
    """Muscle, pairwise and Gramian loss on made views: what of each latent the first view keeps.

    Share of the variance of the first view's representation that a latent explains, in percent,
    mean and standard deviation of three seeds, on views that were not trained on. `untrained` is
    what random encoders keep.
    """
    seeds = range(1 if quick else 3)
    rows = {}
    for name, views in SETTINGS.items():
        for loss in ("untrained", *LOSSES):
            steps = 0 if loss == "untrained" else 20 if quick else STEPS
            kept = [explained(views, LOSSES.get(loss), seed, steps) for seed in seeds]
            rows[f"{name}, {loss}"] = summarize(kept)
    return {"rows": rows, "classes": CLASSES, "batch": BATCH, "width": WIDTH, "steps": STEPS}


def summarize(kept: list[dict[str, float]]) -> dict[str, float | None]:
    """Mean and spread of each latent's share over the seeds."""
    row: dict[str, float | None] = {}
    for latent in kept[0]:
        values = [shares[latent] for shares in kept]
        row[latent] = round(mean(values), 1)
        row[f"{latent}_spread"] = round(stdev(values), 1) if len(values) > 1 else None
    return row


def explained(
    views: tuple[tuple[str, ...], ...], loss: tuple[LossName, float] | None, seed: int, steps: int
) -> dict[str, float]:
    """Train encoders of the views with a loss and its temperature. Returns the share of the first representation's
    variance, in percent, that each latent of the setting explains."""
    torch.manual_seed(seed)
    mixing = [torch.randn(len(shown) * CLASSES + NOISE, 32) for shown in views]
    encoders = [nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, WIDTH)) for _ in views]
    parameters = [p for encoder in encoders for p in encoder.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.003)
    for _ in range(steps):
        assert loss is not None
        z = represent(encoders, mixing, views, draw_latents(BATCH))
        name, temperature = loss
        losses = [
            anchored_loss(name, z[n], peers_of(z, n), temperature, 0.15) for n in range(len(z))
        ]
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()
    latents = draw_latents(4000)
    with torch.no_grad():
        first = represent(encoders, mixing, views, latents)[0]
    names = sorted({name for shown in views for name in shown})
    return {name: 100 * variance_between(first, latents[name]) for name in names}


def draw_latents(rows: int) -> dict[str, Tensor]:
    """Classes a, b, c (rows,), independent and equally likely, and the sum of a and b."""
    a, b, c = torch.randint(CLASSES, (3, rows)).unbind()
    return {"a": a, "b": b, "c": c, "sum": (a + b) % CLASSES}


def represent(
    encoders: Sequence[nn.Module],
    mixing: list[Tensor],
    views: tuple[tuple[str, ...], ...],
    latents: Mapping[str, Tensor],
) -> list[Tensor]:
    """Unit vectors (rows, WIDTH) of each view: latents and private noise, mixed and encoded."""
    z = []
    for encoder, matrix, shown in zip(encoders, mixing, views, strict=True):
        parts = [2 * nn.functional.one_hot(latents[name], CLASSES).float() for name in shown]
        noise = torch.randn(len(parts[0]), NOISE)
        x = torch.cat([*parts, noise], 1) @ matrix / matrix.shape[0] ** 0.5
        z.append(nn.functional.normalize(encoder(x), dim=1))
    return z


def peers_of(z: list[Tensor], anchor: int) -> list[Tensor]:
    """All representations but the anchor's; they learn from their own losses alone."""
    return [other.detach() for n, other in enumerate(z) if n != anchor]


def variance_between(z: Tensor, classes: Tensor) -> float:
    """The share of the variance of z (rows, width) that lies between the classes (rows,)."""
    center = z.mean(0)
    between = 0.0
    for label in range(CLASSES):
        rows = z[classes == label]
        between += float(len(rows) * (rows.mean(0) - center).square().sum())
    return between / float((z - center).square().sum())
