"""Models that see and read: images and texts as vectors of one space, compared by cosine. Knows nothing of learnt prompts or clients."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import normalize

Part = tuple[Tensor, Tensor]  # embeddings (n, L, word), and which of them are there (n, L)

# labels of VOC in words that models have read
READABLE_NAMES = {
    "aeroplane": "airplane",
    "diningtable": "dining table",
    "pottedplant": "potted plant",
    "tvmonitor": "tv monitor",
}


class VisionLanguageModel(nn.Module):
    """Images in [0, 1] and texts to vectors (n, `width`); similarity is `scale` times their cosine. All of it is frozen.

    A text is tokens between those of `begin` and `end`, at most `context` in all, each a vector of width `word`; `read` takes vectors, so
    that some of them may be learnt. An image has `places` (rows, columns), each a vector of the joint space, and one for the whole.
    """

    width: int
    word: int
    context: int
    scale: float
    places: tuple[int, int]
    begin: tuple[int, ...]
    end: tuple[int, ...]

    # what a model says for itself

    def see(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The map (n, width, rows, columns), and the whole (n, width)."""
        raise NotImplementedError

    def split(self, text: str) -> list[int]:
        """A text's tokens, without `begin` and `end`."""
        raise NotImplementedError

    def embed(self, ids: Tensor) -> Tensor:
        """Tokens (...) as vectors (..., word), before any position is added."""
        raise NotImplementedError

    def read(self, embeddings: Tensor, mask: Tensor) -> Tensor:
        """Whole texts, with begin and end: (n, L, word), and which tokens are there (n, L), these first; to (n, width)."""
        raise NotImplementedError

    # what follows

    def patches(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(n, rows x columns, width), row after row, and the whole (n, width)."""
        places, whole = self.see(images)
        return places.flatten(2).mT, whole

    def grid(self, images: Tensor) -> Tensor:
        """The map alone, as of every encoder that has one."""
        return self.see(images)[0]

    def forward(self, images: Tensor) -> Tensor:
        return self.see(images)[1]

    def tokens(self, texts: Sequence[str]) -> Part:
        """Ids (n, L) without begin and end, 0 where there are no more, and which are there."""
        rows = [self.split(text) for text in texts]
        room = self.context - len(self.begin) - len(self.end)
        for text, row in zip(texts, rows):
            if not row:
                raise ValueError(f"{text!r} has no word this model can read: use words")
            if len(row) > room:
                raise ValueError(
                    f"{text!r} has {len(row)} tokens, this model reads {room}: use a shorter text"
                )
        longest = max(map(len, rows), default=0)
        ids = torch.tensor(
            [row + [0] * (longest - len(row)) for row in rows], device=self.device
        ).reshape(len(rows), longest)
        return ids, torch.arange(longest, device=self.device) < torch.tensor(
            [[len(row)] for row in rows], device=self.device
        )

    def prompt(self, *parts: Part) -> Part:
        """Parts one after another between begin and end, without gaps: what `read` takes. Each is embeddings and which are there."""
        rows = len(parts[0][0])
        ends = [
            self.embed(torch.tensor(ids, dtype=torch.long, device=self.device)).expand(rows, -1, -1)
            for ids in (self.begin, self.end)
        ]
        embeddings = torch.cat([ends[0], *(part for part, _ in parts), ends[1]], 1)
        there = [torch.ones(part.shape[:2], dtype=torch.bool, device=self.device) for part in ends]
        mask = torch.cat([there[0], *(which for _, which in parts), there[1]], 1)
        longest = int(mask.sum(1).max())
        if longest > self.context:
            raise ValueError(
                f"a prompt has {longest} tokens with its ends, this model reads {self.context}: use fewer or shorter names"
            )
        order = (
            (~mask).to(torch.uint8).argsort(dim=1, stable=True)[:, :longest]
        )  # those there come first, in their order
        return embeddings.gather(
            1, order[..., None].expand(-1, -1, embeddings.shape[2])
        ), mask.gather(1, order)

    def texts(self, texts: Sequence[str]) -> Tensor:
        """Texts as they are, (n, width)."""
        ids, mask = self.tokens(texts)
        return self.read(*self.prompt((self.embed(ids), mask)))

    def similarity(self, images: Tensor, texts: Tensor) -> Tensor:
        """Vectors of images (..., n, width) and of texts (m, width): scale x cosine (..., n, m)."""
        return self.scale * normalize(images, dim=-1) @ normalize(texts, dim=-1).mT

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def train(self, mode: bool = True) -> "VisionLanguageModel":
        """Stays as it was trained: nothing here learns, statistics of batches neither."""
        return super().train(False)


class DualEncoder(VisionLanguageModel):
    """An encoder of images with a feature map and a reader of texts, each with a projection into the joint space.

    A reader has `width`, `word`, `context`, `begin`, `end`, `split(text)`, `embed(ids)` and `read(embeddings, mask)`.
    """

    def __init__(
        self,
        eye: nn.Module,
        reader: nn.Module,
        seen: nn.Module,
        told: nn.Module,
        shape: Sequence[int],
        scale: float,
    ):
        super().__init__()
        self.eye: Any = eye
        self.reader: Any = reader
        self.seen, self.told, self.scale = seen, told, scale
        self.word, self.context, self.begin, self.end = (
            getattr(reader, name) for name in ("word", "context", "begin", "end")
        )
        self.requires_grad_(False).eval()
        with torch.no_grad():
            places, whole = self.see(torch.zeros(1, *shape))
        self.width, self.places = whole.shape[1], (places.shape[2], places.shape[3])

    def see(self, images: Tensor) -> tuple[Tensor, Tensor]:
        grid = self.eye.grid(images)  # (n, channels, rows, columns)
        return self.seen(grid.movedim(1, -1)).movedim(-1, 1), self.seen(grid.mean((-2, -1)))

    def split(self, text: str) -> list[int]:
        return self.reader.split(text)

    def embed(self, ids: Tensor) -> Tensor:
        return self.reader.embed(ids)

    def read(self, embeddings: Tensor, mask: Tensor) -> Tensor:
        return self.told(self.reader.read(embeddings, mask))


def stored(path: Path, model: str) -> dict[str, Tensor]:
    """Weights that `unalike train-vlm` wrote, in full precision."""
    try:
        return {name: tensor.float() for name, tensor in load_file(path).items()}
    except Exception as problem:  # safetensors has kinds of its own
        raise ValueError(
            f"{path} cannot be read as weights of vlm-{model} ({problem}): `unalike train-vlm {model} --out FILE` makes "
            "them"
        ) from None
