"""Encoders of texts from scratch, and of an image with its text. Knows nothing of tasks or methods."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

LETTERS = torch.int32       # texts as code points; other whole numbers are words already
PRIME = 2_147_483_647
BASE = 257


class GRU(nn.Module):
    """A recurrent network over words (Chung 2014), the mean of what it says in both directions: (B, words) or (B, letters) to (B, width).

    Texts are word numbers from 0, no word, or int32 code points, whose words, runs of letters and digits in any case, get numbers by hash.
    """

    def __init__(self, shape: Sequence[int], words: int = 20001, embedding: int = 128, width: int = 128, depth: int = 1):
        super().__init__()
        if len(shape) != 1 or min(words - 1, embedding, width, depth) < 1:
            raise ValueError(f"gru takes texts as rows of numbers, (words,), and sizes of 1 or more, 2 words at least; got {tuple(shape)}")
        self.width = width
        self.vectors = nn.Embedding(words, embedding, padding_idx=0)
        self.cells = nn.GRU(embedding, width, depth, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        words = numbered(x, self.vectors.num_embeddings) if x.dtype == LETTERS else x
        words = words[:, :max(int((words > 0).sum(1).max()), 1)]
        there = (words > 0).unsqueeze(-1).to(self.vectors.weight.dtype)
        said = self.cells(self.vectors(words))[0].unflatten(-1, (2, self.width)).mean(-2)       # (B, words, width)
        return (said * there).sum(1) / there.sum(1).clamp(min=1)


class Pair(nn.Module):
    """An image and its text, each by an encoder of its own and a linear layer to a common width: modalities by name to (B, 2, width).

    `image` and `text` are models with their options, such as {name: cnn, channels: [8, 16]}; which modality is which is told by its axes.
    """

    def __init__(self, shape: Mapping[str, Sequence[int]], image: dict[str, Any], text: dict[str, Any], width: int = 128):
        super().__init__()
        from unalike.models.encoders import build_encoder
        sight = [name for name, axes in shape.items() if len(axes) == 3]
        if len(shape) != 2 or len(sight) != 1:
            raise ValueError(f"pair takes an image (channels, height, width) and a text (words,), got {dict(shape)}")
        self.names = (sight[0], next(name for name in shape if name != sight[0]))
        parts = [build_encoder(told["name"], shape[name], {key: value for key, value in told.items() if key != "name"})
                 for name, told in zip(self.names, (image, text), strict=True)]
        self.width, self.parts = width, nn.ModuleList(parts)
        self.joint = nn.ModuleList(nn.Linear(int(getattr(part, "width", 0)), width) for part in parts)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return torch.stack([joint(part(x[name])) for name, part, joint in zip(self.names, self.parts, self.joint, strict=True)], 1)


def numbered(x: Tensor, words: int) -> Tensor:
    """Code points (n, letters) as word numbers (n, most words), from 1 to words - 1, 0 where there are no more.

    >>> text = lambda said: torch.tensor([list(map(ord, said))], dtype=torch.int32)
    >>> numbered(text("A dog, a DOG"), 1000)[0, :4].tolist() == numbered(text("a dog a  dog"), 1000)[0, :4].tolist()
    True
    """
    x = x.long()
    x = torch.where((x >= 65) & (x <= 90), x + 32, x)
    letter = ((x >= 97) & (x <= 122)) | ((x >= 48) & (x <= 57)) | (x > 127)
    begins = letter & ~torch.cat([torch.zeros_like(letter[:, :1]), letter[:, :-1]], 1)
    word = begins.cumsum(1)                                                                  # which word a letter is of, from 1
    place = torch.arange(x.shape[1], device=x.device)
    start = torch.where(begins, place, 0).cummax(1).values
    powers = [1]
    for _ in range(x.shape[1]):
        powers.append(powers[-1] * BASE % PRIME)
    weight = torch.tensor(powers, device=x.device)[place - start]
    sums = torch.zeros(len(x), max(int(word.max()), 1) + 1, dtype=torch.int64, device=x.device)
    sums = sums.scatter_add(1, word * letter, x * weight % PRIME * letter)[:, 1:]
    return torch.where(torch.arange(sums.shape[1], device=x.device) < word[:, -1:], sums % (words - 1) + 1, 0)
