"""Procedurally generated images: ellipses and stripes over a colour gradient. Needs no file."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from unalike.data.table import Table

SEED = 96  # fixes the images, for every run
SHAPES = 6  # ellipses per image
CHUNK = 256  # images made at once

Count = Annotated[int, Field(ge=1)]


def generated(folder: str | None = None, count: Count = 5200, side: Count = 96) -> Table:
    """Generated images (count, 3, side, side) as bytes, without labels: a substitute public set."""
    generator = torch.Generator().manual_seed(SEED)
    chunks = torch.arange(count).split(CHUNK)
    x = torch.cat([paint_images(len(chunk), side, generator) for chunk in chunks])
    return Table(x=x, targets={}, tasks={}, train=torch.arange(count), test=torch.arange(0))


def paint_images(count: int, side: int, generator: torch.Generator) -> Tensor:
    """Images (count, 3, side, side) as bytes; ellipses, plain or striped, over each other."""

    def rand(*shape: int) -> Tensor:
        return torch.rand(count, *shape, generator=generator)

    axis = torch.linspace(-1, 1, side)
    y, x = axis[None, :, None], axis[None, None, :]

    def rotate(angle: Tensor) -> Tensor:
        """The first coordinate after a rotation, (count, side, side)."""
        return x * angle.cos()[:, None, None] + y * angle.sin()[:, None, None]

    def blend(share: Tensor) -> Tensor:
        """Two random colours, mixed by a share that broadcasts to (count, 3, side, side)."""
        return rand(3, 1, 1) * share + rand(3, 1, 1) * (1 - share)

    image = blend((rotate(6.3 * rand())[:, None] + 1.5) / 3)
    for _ in range(SHAPES):
        angle = 6.3 * rand()
        size = 0.1 + 0.6 * rand(2)
        centre = 2 * rand(2) - 1
        along = rotate(angle) - centre[:, :1, None]
        across = rotate(angle + torch.pi / 2) - centre[:, 1:, None]
        inside = (along / size[:, :1, None]) ** 2 + (across / size[:, 1:, None]) ** 2 < 1
        waves = (along * (5 + 40 * rand()[:, None, None])).sin().sign()
        is_striped = (rand() < 0.5)[:, None, None]
        stripes = 0.5 + 0.5 * waves * is_striped
        image = torch.where(inside[:, None], blend(stripes[:, None]), image)
    noise = 0.05 * torch.randn(image.shape, generator=generator)
    return (255 * (image + noise).clamp(0, 1)).byte()
