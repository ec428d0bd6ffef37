"""Images that a program makes, not a camera: blots and stripes over a slope of two colours. Needs no download; knows no clients."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from unalike.data.table import Table

SEED = 96  # fixes the images, for every run
SHAPES = 6  # over each other in an image

Count = Annotated[int, Field(ge=1)]


def generated(folder: str | None = None, count: Count = 5200, side: Count = 96) -> Table:
    """Images (count, 3, side, side) that show nothing, as bytes, no labels: a public set where there are no photographs."""
    draws = torch.Generator().manual_seed(SEED)
    x = torch.cat([painted(len(few), side, draws) for few in torch.arange(count).split(256)])
    return Table(x=x, targets={}, tasks={}, train=torch.arange(count), test=torch.arange(0))


def painted(count: int, side: int, draws: torch.Generator) -> Tensor:
    """As many images; ellipses, each plain or striped, hide what is below them."""
    rand = lambda *shape: torch.rand(count, *shape, generator=draws)
    place = torch.linspace(-1, 1, side)
    y, x = place[None, :, None], place[None, None, :]
    turned = lambda angle: (
        x * angle.cos()[:, None, None] + y * angle.sin()[:, None, None]
    )  # (count, side, side)
    slope = (turned(6.3 * rand())[:, None] + 1.5) / 3
    image = rand(3, 1, 1) * slope + rand(3, 1, 1) * (1 - slope)
    for _ in range(SHAPES):
        angle, size, centre = 6.3 * rand(), 0.1 + 0.6 * rand(2), 2 * rand(2) - 1
        along, across = (
            turned(angle) - centre[:, :1, None],
            turned(angle + torch.pi / 2) - centre[:, 1:, None],
        )
        inside = (along / size[:, :1, None]) ** 2 + (across / size[:, 1:, None]) ** 2 < 1
        stripes = (
            0.5
            + 0.5
            * (along * (5 + 40 * rand()[:, None, None])).sin().sign()
            * (rand() < 0.5)[:, None, None]
        )
        colour = rand(3, 1, 1) * stripes[:, None] + rand(3, 1, 1) * (1 - stripes[:, None])
        image = torch.where(inside[:, None], colour, image)
    return (255 * (image + 0.05 * torch.randn(image.shape, generator=draws)).clamp(0, 1)).byte()
