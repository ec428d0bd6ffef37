"""Encoders of texts from scratch, and of an image with its text. Knows nothing of tasks or methods."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from unalike.models.model import find_trunk

LETTERS = torch.int32  # texts as code points; other whole numbers are words already
PRIME = 2_147_483_647
BASE = 257


class GRU(nn.Module):
    """A recurrent network over words (Chung 2014), the mean of what it says ahead and from the end: (B, words or letters) to (B, width).

    Texts are word numbers from 0, no word, or int32 code points, whose words, runs of letters and digits in any case, get numbers by hash.
    What comes after a text changes nothing. With `length` texts are cut to so many words, and all batches are as long: a GPU records them.
    """

    has_fixed_trunk = True  # nothing learns before words have numbers

    def __init__(
        self,
        shape: Sequence[int],
        words: int = 20001,
        embedding: int = 128,
        width: int = 128,
        depth: int = 1,
        length: int | None = None,
    ):
        super().__init__()
        if (
            len(shape) != 1
            or min(words - 1, embedding, width, depth, length or 1) < 1
            or length == 0
        ):
            raise ValueError(
                f"gru takes texts as rows of numbers, (words,), and sizes of 1 or more, 2 words at least; got {tuple(shape)}"
            )
        self.width, self.length = width, length
        self.vectors = nn.Embedding(words, embedding, padding_idx=0)
        self.ahead, self.back = (
            nn.GRU(embedding, width, depth, batch_first=True) for _ in range(2)
        )

    def trunk(self, x: Tensor) -> Tensor:
        """Texts as word numbers, (B, words)."""
        words = numbered(x, self.vectors.num_embeddings, self.length) if x.dtype == LETTERS else x
        return words if self.length is None else pad(words, (0, self.length - words.shape[1]))

    def forward(self, x: Tensor) -> Tensor:
        words = self.trunk(x)
        if self.length is None:
            words = words[:, : max(int((words > 0).sum(1).max()), 1)]
        place, count = (
            torch.arange(words.shape[1], device=words.device),
            (words > 0).sum(1, keepdim=True),
        )
        turned = torch.where(place < count, count - 1 - place, place).unsqueeze(
            -1
        )  # each text from its end
        seen = self.vectors(words)
        from_end = self.back(seen.gather(1, turned.expand_as(seen)))[0]
        said = (
            self.ahead(seen)[0] + from_end.gather(1, turned.expand_as(from_end))
        ) / 2  # (B, words, width)
        there = (words > 0).unsqueeze(-1).to(said.dtype)
        return (said * there).sum(1) / there.sum(1).clamp(min=1)


class Pair(nn.Module):
    """An image and its text, each by an encoder of its own and a linear layer to a common width: modalities by name to (B, 2, width).

    `image` and `text` are models with their options, such as {name: cnn, channels: [8, 16]}; which modality is which is told by its axes.
    """

    def __init__(
        self,
        shape: Mapping[str, Sequence[int]],
        image: dict[str, Any],
        text: dict[str, Any],
        width: int = 128,
    ):
        super().__init__()
        from unalike.models.encoders import build_encoder

        sight = [name for name, axes in shape.items() if len(axes) == 3]
        if len(shape) != 2 or len(sight) != 1:
            raise ValueError(
                f"pair takes an image (channels, height, width) and a text (words,), got {dict(shape)}"
            )
        self.names = (sight[0], next(name for name in shape if name != sight[0]))
        parts = [
            build_encoder(
                told["name"],
                shape[name],
                {key: value for key, value in told.items() if key != "name"},
            )
            for name, told in zip(self.names, (image, text), strict=True)
        ]
        self.width, self.parts = width, nn.ModuleList(parts)
        self.has_fixed_trunk = any(find_trunk(part) is not None for part in parts)
        self.joint = nn.ModuleList(
            nn.Linear(int(getattr(part, "width", 0)), width) for part in parts
        )

    def trunk(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        """What encoders with a fixed trunk make of theirs."""
        seen = {}
        for name, part in zip(self.names, self.parts, strict=True):
            trunk = find_trunk(part)
            seen[name] = x[name] if trunk is None else trunk(x[name])
        return seen

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return torch.stack(
            [
                joint(part(x[name]))
                for name, part, joint in zip(self.names, self.parts, self.joint, strict=True)
            ],
            1,
        )


def numbered(x: Tensor, words: int, most: int | None = None) -> Tensor:
    """Code points (n, letters) as word numbers (n, most), from 1 to words - 1, 0 where there are no more; the first `most`, or all.

    >>> text = lambda said: torch.tensor([list(map(ord, said))], dtype=torch.int32)
    >>> numbered(text("A dog, a DOG"), 1000)[0, :4].tolist() == numbered(text("a dog a  dog"), 1000)[0, :4].tolist()
    True
    """
    x, most = x.long(), (x.shape[1] + 1) // 2 if most is None else most
    x = torch.where((x >= 65) & (x <= 90), x + 32, x)
    letter = ((x >= 97) & (x <= 122)) | ((x >= 48) & (x <= 57)) | (x > 127)
    begins = letter & ~torch.cat([torch.zeros_like(letter[:, :1]), letter[:, :-1]], 1)
    word = begins.cumsum(1)  # which word a letter is of, from 1
    place = torch.arange(x.shape[1], device=x.device)
    start = torch.where(begins, place, 0).cummax(1).values
    weight = torch.tensor(powers(x.shape[1] + 1), device=x.device)[place - start]
    sums = torch.zeros(
        len(x), most + 2, dtype=torch.int64, device=x.device
    )  # first none, last all that are cut off
    sums = sums.scatter_add(1, (word * letter).clamp(max=most + 1), x * weight % PRIME * letter)[
        :, 1:-1
    ]
    return torch.where(
        torch.arange(most, device=x.device) < word[:, -1:], sums % (words - 1) + 1, 0
    )


@cache
def powers(count: int) -> list[int]:
    """Of BASE, by PRIME."""
    found = [1]
    while len(found) < count:
        found.append(found[-1] * BASE % PRIME)
    return found
