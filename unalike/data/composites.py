"""Multi-label images composed of four single-label ones: digits, CIFAR-10, Caltech-101, lesions."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Generator, Tensor
from torch.nn.functional import interpolate

from unalike.base.errors import UserError
from unalike.data.caltech101 import caltech101
from unalike.data.cifar10 import CLASSES, read_cifar10
from unalike.data.digits import load_digits_table
from unalike.data.ham10000 import ham10000
from unalike.data.jpeg import Broken
from unalike.data.table import Table
from unalike.tasks import MultiLabel

SEED = 22  # fixes which images meet on a canvas, for every run

Count = Annotated[int, Field(ge=1)]
Kinds = Annotated[int, Field(ge=1, le=4)]


def digits_composites(
    folder: str | None = None, train: Count = 1200, test: Count = 600, most: Kinds = 3
) -> Table:
    """Four handwritten digits on a canvas of 16x16, of one to `most` kinds; needs no file."""
    table = load_digits_table()
    assert isinstance(table.x, Tensor)
    images = table.x.mul(255).byte()
    parts = [(images[rows], table.targets["digit"][rows]) for rows in (table.train, table.test)]
    return compose_table(parts, table.tasks["digit"].labels, (train, test), most)


def cifar_composites(
    folder: str | None = None, train: Count = 10000, test: Count = 4000, most: Kinds = 2
) -> Table:
    """Four CIFAR-10 images on a canvas of 64x64, of one to `most` kinds; needs cifar10.npz."""
    parts = read_cifar10("cifar_composites", folder)
    return compose_table(parts, CLASSES, (train, test), most)


def caltech_composites(
    folder: str | None = None,
    train: Count = 6000,
    test: Count = 2500,
    most: Kinds = 3,
    broken: Broken = "refuse",
) -> Table:
    """Four Caltech-101 photographs on a canvas of 96x96, of one to `most` kinds; needs its file."""
    table = caltech101(folder, broken)
    assert isinstance(table.x, Tensor)
    small = interpolate(table.x.float(), scale_factor=0.5, mode="area").round().byte()
    parts = [(small[rows], table.targets["thing"][rows]) for rows in (table.train, table.test)]
    return compose_table(parts, table.tasks["thing"].labels, (train, test), most)


def lesion_composites(
    folder: str | None = None,
    train: Count = 4000,
    test: Count = 1500,
    most: Kinds = 2,
    broken: Broken = "refuse",
) -> Table:
    """Four skin lesions of HAM10000 on a canvas of 128x128, of one to `most` kinds."""
    table = ham10000(folder, broken)
    assert isinstance(table.x, Tensor)
    parts = [(table.x[rows], table.targets["lesion"][rows]) for rows in (table.train, table.test)]
    return compose_table(parts, table.tasks["lesion"].labels, (train, test), most)


def compose_table(
    parts: list[tuple[Tensor, Tensor]], labels: tuple[str, ...], sizes: tuple[int, int], most: int
) -> Table:
    """A table of canvases; those to train on and to test on are made of different images.

    Args:
        parts: images and classes of the training and of the test part.
        sizes: how many canvases of either.
    """
    generator = torch.Generator().manual_seed(SEED)
    canvases, targets = [], []
    for (x, y), size in zip(parts, sizes, strict=True):
        canvas, marks = compose(x, y, len(labels), size, most, generator)
        canvases.append(canvas)
        targets.append(marks)
    return Table(
        x=torch.cat(canvases),
        targets={"objects": torch.cat(targets)},
        tasks={"objects": MultiLabel(labels)},
        train=torch.arange(sizes[0]),
        test=torch.arange(sizes[0], sum(sizes)),
    )


def compose(
    x: Tensor, y: Tensor, labels: int, count: int, most: int, generator: Generator
) -> tuple[Tensor, Tensor]:
    """Canvases of 2x2 images, and which labels are on each.

    A canvas has 1 to `most` different classes, each number as likely, and each class at least once.

    Args:
        x: images (n, channels, height, width).
        y: classes (n,).
        labels: number of classes.
        count: number of canvases.
    Returns: (count, channels, 2 height, 2 width), and (count, labels) of 1 or 0.
    """
    if not 1 <= most <= 4:
        raise UserError(f"a canvas has room for four images: most is from 1 to 4, got {most}")
    if count < 1:
        raise UserError(f"composites are 1 or more, got {count}")
    present = y.unique()
    if len(present) < most:
        raise UserError(f"a canvas of {most} kinds needs as many, the images have {len(present)}")
    orders = [torch.randperm(len(present), generator=generator)[:most] for _ in range(count)]
    order = present[torch.stack(orders)]  # (count, most)
    kinds = torch.randint(1, most + 1, (count, 1), generator=generator)
    rank = torch.rand(count, 4, generator=generator).argsort(1)  # of a cell in a random order
    repeated = (torch.rand(count, 4, generator=generator) * kinds).long()
    # the first `kinds` cells show each class once, the others any of them: (count, 4)
    chosen = order.gather(1, torch.where(rank < kinds, rank, repeated))
    rows = torch.empty_like(chosen)
    for label in present.tolist():
        own, cells = (y == label).nonzero().flatten(), chosen == label
        picks = torch.randint(len(own), (int(cells.sum()),), generator=generator)
        rows[cells] = own[picks]
    images = x[rows].unflatten(1, (2, 2))  # (count, 2, 2, channels, height, width)
    canvas = images.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)
    marks = torch.zeros(count, labels).scatter_(1, chosen, 1.0)
    return canvas.contiguous(), marks
