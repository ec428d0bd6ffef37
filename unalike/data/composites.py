"""Several real images on one canvas, so that a sample has several labels: from digits, CIFAR-10 and Caltech-101. Knows no clients."""

from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Generator, Tensor
from torch.nn.functional import interpolate

from unalike.base.errors import UserError
from unalike.data.benchmarks import CIFAR, CIFAR_CLASSES
from unalike.data.digits import load_digits_table
from unalike.data.files import find, opened
from unalike.data.pictures import Broken, caltech101
from unalike.data.table import Table
from unalike.tasks import MultiLabel

SEED = 22  # fixes which images meet on a canvas, for every run

Count = Annotated[int, Field(ge=1)]
Kinds = Annotated[int, Field(ge=1, le=4)]


def digits_composites(
    folder: str | None = None, train: Count = 1200, test: Count = 600, most: Kinds = 3
) -> Table:
    """Four handwritten digits on a canvas of 16x16, of one to three kinds: 1200 to train, 600 to test. The folder is not used."""
    table = load_digits_table()
    assert isinstance(table.x, Tensor)
    sets = [
        (table.x[rows].mul(255).byte(), table.targets["digit"][rows])
        for rows in (table.train, table.test)
    ]
    return composed(sets, table.tasks["digit"].labels, (train, test), most)


def cifar_composites(
    folder: str | None = None, train: Count = 10000, test: Count = 4000, most: Kinds = 2
) -> Table:
    """Four CIFAR-10 images on a canvas of 64x64, of one or two kinds: 10000 to train, 4000 to test; needs cifar10.npz."""
    with opened(find("cifar_composites", folder, ("cifar10.npz",), CIFAR)) as held:
        sets = [
            (
                torch.from_numpy(held[f"x_{part}"]).permute(0, 3, 1, 2),
                torch.from_numpy(held[f"y_{part}"].astype(np.int64).ravel()),
            )
            for part in ("train", "test")
        ]
    return composed(sets, CIFAR_CLASSES, (train, test), most)


def caltech_composites(
    folder: str | None = None,
    train: Count = 6000,
    test: Count = 2500,
    most: Kinds = 3,
    broken: Broken = "refuse",
) -> Table:
    """Four Caltech-101 photographs on a canvas of 96x96, of one to three kinds: 6000 to train, 2500 to test; needs its file."""
    table = caltech101(folder, broken)
    assert isinstance(table.x, Tensor)
    small = interpolate(table.x.float(), scale_factor=0.5, mode="area").round().byte()
    sets = [(small[rows], table.targets["thing"][rows]) for rows in (table.train, table.test)]
    return composed(sets, table.tasks["thing"].labels, (train, test), most)


def composed(
    sets: list[tuple[Tensor, Tensor]], labels: tuple[str, ...], sizes: tuple[int, int], most: int
) -> Table:
    """A table of canvases from images and their labels to train and to test; each set of canvases is made from images of its own."""
    draws = torch.Generator().manual_seed(SEED)
    made = [
        compose(x, y, len(labels), size, most, draws)
        for (x, y), size in zip(sets, sizes, strict=True)
    ]
    x, y = (torch.cat(parts) for parts in zip(*made, strict=True))
    return Table(
        x=x,
        targets={"objects": y},
        tasks={"objects": MultiLabel(labels)},
        train=torch.arange(sizes[0]),
        test=torch.arange(sizes[0], sum(sizes)),
    )


def compose(
    x: Tensor, y: Tensor, labels: int, count: int, most: int, draws: Generator
) -> tuple[Tensor, Tensor]:
    """Canvases of 2x2 images (count, channels, 2 height, 2 width), and which labels are on each (count, labels), 1 or 0.

    x (n, channels, height, width), y (n,). Each canvas has 1 to `most` kinds, as likely; each kind is there at least once.
    """
    if not 1 <= most <= 4:
        raise UserError(f"a canvas has room for four images: most is from 1 to 4, got {most}")
    if count < 1:
        raise UserError(f"composites are 1 or more, got {count}")
    there = y.unique()
    if len(there) < most:
        raise UserError(f"a canvas of {most} kinds needs as many, the images have {len(there)}")
    order = torch.stack(
        [there[torch.randperm(len(there), generator=draws)[:most]] for _ in range(count)]
    )  # (count, most)
    kinds = torch.randint(1, most + 1, (count, 1), generator=draws)
    place = torch.rand(count, 4, generator=draws).argsort(
        1
    )  # a cell's place in a random order of the four
    spare = (torch.rand(count, 4, generator=draws) * kinds).long()
    chosen = order.gather(
        1, torch.where(place < kinds, place, spare)
    )  # (count, 4): the first cells show each kind once
    rows = torch.empty_like(chosen)
    for label in there.tolist():
        own, cells = (y == label).nonzero().flatten(), chosen == label
        rows[cells] = own[torch.randint(len(own), (int(cells.sum()),), generator=draws)]
    cells = x[rows].unflatten(1, (2, 2))  # (count, 2, 2, channels, height, width)
    canvas = cells.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)
    marks = torch.zeros(count, labels).scatter_(1, chosen, 1.0)
    return canvas.contiguous(), marks
