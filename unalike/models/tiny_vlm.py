"""A small reader of texts in a few known words, and with a small eye a model that sees and reads. Knows nothing of what it learnt from."""

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from unalike.models.vlm import DualEncoder, stored

SHIPPED, SCALE = Path(__file__).parent / "weights" / "vlm-tiny.safetensors", 20.0
PAD, BEGIN, END, STRANGE = range(
    4
)  # tokens that are no word; every word that is not known is the same stranger
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
WORDS = (
    *DIGITS,
    "a",
    "and",
    "at",
    "bottom",
    "digit",
    "digits",
    "in",
    "left",
    "of",
    "only",
    "right",
    "scene",
    "the",
    "top",
    "with",
)


class Words(nn.Module):
    """A transformer of one layer over whole words: embeddings (n, L, word) to (n, width), the mean over tokens that are there."""

    begin, end = (BEGIN,), (END,)

    def __init__(self, vocabulary: Sequence[str] = WORDS, width: int = 64, context: int = 32):
        super().__init__()
        self.known = {
            word: token for token, word in enumerate(dict.fromkeys(vocabulary), STRANGE + 1)
        }
        self.width = self.word = width
        self.context = context
        self.vectors = nn.Embedding(len(self.known) + STRANGE + 1, width)
        self.positions = nn.Parameter(0.1 * torch.randn(context, width))
        self.layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )

    def split(self, text: str) -> list[int]:
        return [self.known.get(word, STRANGE) for word in re.findall(r"[a-z0-9]+", text.lower())]

    def embed(self, ids: Tensor) -> Tensor:
        return self.vectors(ids)

    def read(self, embeddings: Tensor, mask: Tensor) -> Tensor:
        tokens = self.layer(
            embeddings + self.positions[: embeddings.shape[1]], src_key_padding_mask=~mask
        )
        there = mask[..., None].to(tokens.dtype)
        return (tokens * there).sum(1) / there.sum(1).clamp(min=1)


class Eye(nn.Module):
    """Three convolutions, halved once: images (n, 1 or 3, h, w) in [0, 1] to a map (n, width, h / 2, w / 2)."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
        )

    def grid(self, x: Tensor) -> Tensor:
        return self.layers(x.mean(1, keepdim=True))


class TinyVLM(DualEncoder):
    """A model of 0.1 million parameters that sees and reads scenes of handwritten digits, made by `unalike train-vlm tiny`.

    `weights` is "shipped", "none" for random ones, or a file.
    """

    def __init__(self, shape: Sequence[int], weights: str = "shipped"):
        super().__init__(Eye(), Words(), nn.Linear(64, 64), nn.Linear(64, 64), shape, scale=SCALE)
        if weights != "none":
            self.load_state_dict(stored(SHIPPED if weights == "shipped" else Path(weights), "tiny"))
