"""A tiny vision-language model of digit scenes, for examples and tests."""

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from unalike.models.reader import mean_over_tokens
from unalike.models.vlm import DualEncoder, load_weights

SHIPPED = Path(__file__).parent / "weights" / "vlm-tiny.safetensors"
SCALE = 20.0
PAD, BEGIN, END, UNKNOWN = range(4)  # token ids that are no word
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
VOCABULARY = (
    *DIGITS,
    *"a and at bottom digit digits in left of only right scene the top with".split(),
)


class WordEncoder(nn.Module):
    """A one-layer transformer over whole words: embeddings (n, L, word) to (n, width)."""

    begin = (BEGIN,)
    end = (END,)

    def __init__(self, vocabulary: Sequence[str] = VOCABULARY, width: int = 64, context: int = 32):
        super().__init__()
        words = dict.fromkeys(vocabulary)
        self.known = {word: token for token, word in enumerate(words, UNKNOWN + 1)}
        self.width = self.word = width
        self.context = context
        self.vectors = nn.Embedding(len(self.known) + UNKNOWN + 1, width)
        self.positions = nn.Parameter(0.1 * torch.randn(context, width))
        self.layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )

    def split(self, text: str) -> list[int]:
        return [self.known.get(word, UNKNOWN) for word in re.findall(r"[a-z0-9]+", text.lower())]

    def embed(self, ids: Tensor) -> Tensor:
        return self.vectors(ids)

    def read(self, embeddings: Tensor, mask: Tensor) -> Tensor:
        tokens = embeddings + self.positions[: embeddings.shape[1]]
        return mean_over_tokens(self.layer(tokens, src_key_padding_mask=~mask), mask)


class Eye(nn.Module):
    """Three convolutions, pooled once: images (n, 1 or 3, h, w) in [0, 1] to a feature map.

    The map is (n, width, h / 2, w / 2).
    """

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
    """A vision-language model of 0.1 million parameters for scenes of handwritten digits.

    `unalike train-vlm tiny` trains it. `weights` is "shipped", "none" for random ones, or a file.
    """

    def __init__(self, shape: Sequence[int], weights: str = "shipped"):
        super().__init__(
            Eye(),
            WordEncoder(),
            image_projection=nn.Linear(64, 64),
            text_projection=nn.Linear(64, 64),
            shape=shape,
            scale=SCALE,
        )
        if weights != "none":
            path = SHIPPED if weights == "shipped" else Path(weights)
            self.load_state_dict(load_weights(path, "tiny"))
