"""Other looks at the same samples, for methods that learn by them. Knows shapes and number types, nothing of what they show.

Draws come from torch's global generator: a caller that must repeat draws inside `scope`.
"""

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

NOISE = 0.1  # of a view of features, in their standard deviations
SPACE = ord(" ")
WORDS = 0.2  # share of words a strong view of a text lacks; a weak one half of it


def augment(
    x: Tensor | dict, strong: bool = True, moves: bool = True, flips: bool = True
) -> Tensor | dict:
    """A look at each sample of a batch; weak: hardly changed. `moves` false: everything stays in its place, as dense labels need.

    Images (n, channels, height, width) are cropped, shifted and perhaps mirrored, strong ones have other brightness and contrast and lack
    a square; texts, (n, words) of whole numbers or (n, letters) of int32 code points, lack some words (0); other numbers get noise, and
    strong ones lack some (0). Modalities by name each get their own, truth values stay.

    >>> torch.manual_seed(0) and augment(torch.ones(2, 3, 8, 8)).shape
    torch.Size([2, 3, 8, 8])
    """
    if isinstance(x, dict):
        return {name: augment(part, strong, moves, flips) for name, part in x.items()}
    if x.dtype == torch.bool:
        return x
    if not x.is_floating_point():
        word = (
            (x == SPACE).cumsum(1)
            if x.dtype == torch.int32
            else torch.arange(x.shape[1], device=x.device).expand_as(x)
        )
        return x * (_chances(x).gather(1, word) >= (WORDS if strong else WORDS / 2))
    if x.dim() == 4:
        return image_view(x, strong, moves, flips)
    noisy = x + NOISE * (1 + strong) * x.std() * torch.randn(x.shape).to(x) if len(x) > 1 else x
    return noisy * (_chances(x) >= WORDS) if strong else noisy


def image_view(x: Tensor, strong: bool, moves: bool, flips: bool) -> Tensor:
    """Weak: up to an eighth aside, perhaps mirrored. Strong: half to all of the area, other light, a square gone."""
    n, _, height, width = x.shape
    if moves:
        size = (
            torch.empty(n).uniform_(0.5, 1.0).sqrt() if strong else torch.ones(n)
        )  # side of the crop
        room = (1 - size) + (0.0 if strong else 0.25)
        aside, down = (room * torch.empty(n).uniform_(-1, 1) for _ in range(2))
        across = size * (1 - 2 * (torch.rand(n) < 0.5)) if flips else size
        zero = torch.zeros(n)
        how = torch.stack(
            [torch.stack([across, zero, aside], 1), torch.stack([zero, size, down], 1)], 1
        ).to(x)  # (n, 2, 3)
        x = grid_sample(
            x,
            affine_grid(how, list(x.shape), align_corners=False),
            padding_mode="reflection",
            align_corners=False,
        )
    if strong:
        light, contrast = (torch.empty(n, 1, 1, 1).uniform_(0.6, 1.4).to(x) for _ in range(2))
        mean = x.mean((1, 2, 3), keepdim=True)
        x = ((x - mean) * contrast + mean) * light
        x = x * ~(_square(n, height)[:, None, :, None] & _square(n, width)[:, None, None, :]).to(
            x.device
        )
    return x


def _square(n: int, length: int) -> Tensor:
    """(n, length): where a stretch of a quarter of the length lies, at random."""
    program = max(length // 4, 1)
    start = torch.randint(0, length - program + 1, (n, 1))
    places = torch.arange(length)
    return (places >= start) & (places < start + program)


def _chances(x: Tensor) -> Tensor:
    return torch.rand(x.shape).to(x.device)
