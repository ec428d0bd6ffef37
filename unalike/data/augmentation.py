"""Random augmentations of inputs, for methods that compare two views of a sample.

Random numbers come from torch's global generator; for repeatable ones call it inside `scope`.
"""

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

NOISE = 0.1  # of weakly augmented features, in standard deviations
DROPPED = 0.2  # share of words or features that a strong augmentation drops
SPACE = ord(" ")


def augment(
    x: Tensor | dict, strong: bool = True, moves: bool = True, flips: bool = True
) -> Tensor | dict:
    """A random view of each sample of a batch; a weak one is hardly changed.

    Images (n, channels, height, width) are cropped, shifted and perhaps mirrored; strong ones
    change in brightness and contrast and lose a square. Texts, word numbers (n, words) or int32
    code points (n, letters), lose words (0). Other numbers get noise; strong ones lose some (0).
    Modalities by name are augmented one by one; boolean masks stay.

    Args:
        moves: False keeps everything in its place, as dense labels need.
        flips: whether images may be mirrored.

    >>> torch.manual_seed(0) and augment(torch.ones(2, 3, 8, 8)).shape
    torch.Size([2, 3, 8, 8])
    """
    if isinstance(x, dict):
        return {name: augment(part, strong, moves, flips) for name, part in x.items()}
    if x.dtype == torch.bool:
        return x
    if not x.is_floating_point():
        return _drop_words(x, DROPPED if strong else DROPPED / 2)
    if x.dim() == 4:
        return augment_images(x, strong, moves, flips)
    noisy = x
    if len(x) > 1:
        noisy = x + NOISE * (1 + strong) * x.std() * torch.randn(x.shape).to(x)
    return noisy * (_uniform(x) >= DROPPED) if strong else noisy


def _drop_words(x: Tensor, share: float) -> Tensor:
    """Set a share of the words to 0; those of code points are what lies between spaces."""
    if x.dtype == torch.int32:
        word = (x == SPACE).cumsum(1)
    else:
        word = torch.arange(x.shape[1], device=x.device).expand_as(x)
    return x * (_uniform(x).gather(1, word) >= share)


def augment_images(x: Tensor, strong: bool, moves: bool, flips: bool) -> Tensor:
    """Weak: shifted by up to an eighth, perhaps mirrored.

    Strong: cropped to half to all of the area, other light and contrast, a square removed.
    """
    n, _, height, width = x.shape
    if moves:
        x = _crop_and_flip(x, strong, flips)
    if strong:
        light = torch.empty(n, 1, 1, 1).uniform_(0.6, 1.4).to(x)
        contrast = torch.empty(n, 1, 1, 1).uniform_(0.6, 1.4).to(x)
        mean = x.mean((1, 2, 3), keepdim=True)
        x = ((x - mean) * contrast + mean) * light
        rows, columns = _random_stretch(n, height), _random_stretch(n, width)
        removed = rows[:, None, :, None] & columns[:, None, None, :]
        x = x * ~removed.to(x.device)
    return x


def _crop_and_flip(x: Tensor, strong: bool, flips: bool) -> Tensor:
    n = len(x)
    # side of the crop, as a share of the image's
    size = torch.empty(n).uniform_(0.5, 1.0).sqrt() if strong else torch.ones(n)
    room = (1 - size) + (0.0 if strong else 0.25)
    right = room * torch.empty(n).uniform_(-1, 1)
    down = room * torch.empty(n).uniform_(-1, 1)
    horizontal = size * (1 - 2 * (torch.rand(n) < 0.5)) if flips else size
    zero = torch.zeros(n)
    first_row = torch.stack([horizontal, zero, right], 1)
    second_row = torch.stack([zero, size, down], 1)
    affine = torch.stack([first_row, second_row], 1).to(x)  # (n, 2, 3)
    grid = affine_grid(affine, list(x.shape), align_corners=False)
    return grid_sample(x, grid, padding_mode="reflection", align_corners=False)


def _random_stretch(n: int, length: int) -> Tensor:
    """(n, length): true in a random stretch of a quarter of the length."""
    side = max(length // 4, 1)
    start = torch.randint(0, length - side + 1, (n, 1))
    position = torch.arange(length)
    return (position >= start) & (position < start + side)


def _uniform(x: Tensor) -> Tensor:
    return torch.rand(x.shape).to(x.device)
