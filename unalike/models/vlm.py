"""Vision-language models: images and texts as vectors of one space, compared by cosine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import normalize

from unalike.base.errors import UserError

# part of a text: embeddings (n, L, word) or token ids (n, L), and a mask (n, L), false for padding
Part = tuple[Tensor, Tensor]

# labels of VOC as words that the models know
READABLE_NAMES = {
    "aeroplane": "airplane",
    "diningtable": "dining table",
    "pottedplant": "potted plant",
    "tvmonitor": "tv monitor",
}


class VisionLanguageModel(nn.Module):
    """Frozen encoders of images in [0, 1] and of texts, both to vectors (n, `width`).

    A text is at most `context` tokens, those of `begin` and `end` included; each is embedded as a
    vector of width `word`. `read` takes embeddings, so that some of them may be learned prompts. An
    image has `places` (rows, columns), each with a vector of the joint space, and one vector for
    the whole. Similarity is `scale` times the cosine.

    A model implements `see`, `split`, `embed` and `read`.
    """

    width: int
    word: int
    context: int
    scale: float
    places: tuple[int, int]
    begin: tuple[int, ...]
    end: tuple[int, ...]

    def see(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors of an image's places (n, width, rows, columns) and of the whole (n, width)."""
        raise NotImplementedError

    def split(self, text: str) -> list[int]:
        """Token ids of a text, without `begin` and `end`."""
        raise NotImplementedError

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids (...) as embeddings (..., word), without positions."""
        raise NotImplementedError

    def read(self, embeddings: Tensor, mask: Tensor) -> Tensor:
        """Vectors (n, width) of whole texts.

        Args:
            embeddings: (n, L, word), with `begin` and `end`.
            mask: (n, L), true for tokens; padding comes last.
        """
        raise NotImplementedError

    def patches(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors of places (n, rows x columns, width), row by row, and the whole (n, width)."""
        places, whole = self.see(images)
        return places.flatten(2).mT, whole

    def grid(self, images: Tensor) -> Tensor:
        """The feature map (n, width, rows, columns), as other encoders have it."""
        return self.see(images)[0]

    def forward(self, images: Tensor) -> Tensor:
        return self.see(images)[1]

    def tokens(self, texts: Sequence[str]) -> Part:
        """Token ids (n, L) without begin and end, padded with 0, and their mask (n, L)."""
        rows = [self.split(text) for text in texts]
        room = self.context - len(self.begin) - len(self.end)
        for text, row in zip(texts, rows):
            if not row:
                raise UserError(f"{text!r} has no word this model can read: use words")
            if len(row) > room:
                raise UserError(
                    f"{text!r} has {len(row)} tokens, this model reads {room}: use a shorter text"
                )
        longest = max(map(len, rows), default=0)
        padded = [row + [0] * (longest - len(row)) for row in rows]
        ids = torch.tensor(padded, device=self.device).reshape(len(rows), longest)
        lengths = torch.tensor([[len(row)] for row in rows], device=self.device)
        return ids, torch.arange(longest, device=self.device) < lengths

    def prompt(self, *parts: Part) -> Part:
        """Join parts of embeddings between begin and end, padding moved to the end, for `read`."""
        rows = len(parts[0][0])
        begin, end = (
            self.embed(torch.tensor(ids, dtype=torch.long, device=self.device)).expand(rows, -1, -1)
            for ids in (self.begin, self.end)
        )
        ones = torch.ones(rows, 1, dtype=torch.bool, device=self.device)
        embeddings = torch.cat([begin, *(part for part, _ in parts), end], 1)
        masks = [mask for _, mask in parts]
        mask = torch.cat(
            [ones.expand(-1, begin.shape[1]), *masks, ones.expand(-1, end.shape[1])], 1
        )
        longest = int(mask.sum(1).max())
        if longest > self.context:
            raise UserError(
                f"a prompt has {longest} tokens with its ends, this model reads {self.context}: "
                "use fewer or shorter names"
            )
        # a stable sort keeps the tokens' order and moves padding behind them
        order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)[:, :longest]
        columns = order[..., None].expand(-1, -1, embeddings.shape[2])
        return embeddings.gather(1, columns), mask.gather(1, order)

    def texts(self, texts: Sequence[str]) -> Tensor:
        """Vectors (n, width) of texts."""
        ids, mask = self.tokens(texts)
        return self.read(*self.prompt((self.embed(ids), mask)))

    def similarity(self, images: Tensor, texts: Tensor) -> Tensor:
        """scale x cosine (..., n, m) of vectors of images (..., n, width) and texts (m, width)."""
        return self.scale * normalize(images, dim=-1) @ normalize(texts, dim=-1).mT

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def train(self, mode: bool = True) -> "VisionLanguageModel":
        """Stay in eval mode: nothing here learns, batch statistics included."""
        return super().train(False)


class DualEncoder(VisionLanguageModel):
    """An image encoder with a feature map and a text encoder, each with a projection.

    Args:
        eye: has `grid(images)`, (n, channels, rows, columns).
        reader: has `width`, `word`, `context`, `begin`, `end`, `split(text)`, `embed(ids)` and
            `read(embeddings, mask)`.
        image_projection, text_projection: into the joint space.
        shape: of one image.
        place_projection: of places; by default the one of whole images.
    """

    def __init__(
        self,
        eye: nn.Module,
        reader: nn.Module,
        image_projection: nn.Module,
        text_projection: nn.Module,
        shape: Sequence[int],
        scale: float,
        place_projection: nn.Module | None = None,
    ):
        super().__init__()
        self.eye: Any = eye
        self.reader: Any = reader
        # the projections' names in files of weights
        self.seen = image_projection
        self.told = text_projection
        self.placed = place_projection
        self.scale = scale
        for name in ("word", "context", "begin", "end"):
            setattr(self, name, getattr(reader, name))
        self.requires_grad_(False).eval()
        with torch.no_grad():
            places, whole = self.see(torch.zeros(1, *shape))
        self.width = whole.shape[1]
        self.places = (places.shape[2], places.shape[3])

    def see(self, images: Tensor) -> tuple[Tensor, Tensor]:
        grid = self.eye.grid(images)  # (n, channels, rows, columns)
        place_projection = self.placed or self.seen
        places = place_projection(grid.movedim(1, -1)).movedim(-1, 1)
        return places, self.seen(grid.mean((-2, -1)))

    def split(self, text: str) -> list[int]:
        return self.reader.split(text)

    def embed(self, ids: Tensor) -> Tensor:
        return self.reader.embed(ids)

    def read(self, embeddings: Tensor, mask: Tensor) -> Tensor:
        return self.told(self.reader.read(embeddings, mask))


def load_weights(path: Path, model: str) -> dict[str, Tensor]:
    """Weights that `unalike train-vlm` wrote, as float32."""
    try:
        return {name: tensor.float() for name, tensor in load_file(path).items()}
    except Exception as problem:  # safetensors' errors have no common base class
        raise UserError(
            f"{path} cannot be read as weights of vlm-{model} ({problem}): "
            f"`unalike train-vlm {model} --out FILE` makes them"
        ) from None
