"""Prompts with gaps for learned tokens, and a frozen vision-language model with a learned head."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unalike.models.model import Model
from unalike.models.vlm import VisionLanguageModel

INITIAL_WORDS = "a photo of a"  # learned tokens start as these
NOISE = 0.02


class Prompts(nn.Module):
    """Texts with gaps, embedded once; `forward` fills the gaps with learned tokens.

    The fixed part is not saved or sent: every client has the model that computes it.

    Args:
        rows: one text each, as a list of strings and of numbers: a number is a gap for so many
            tokens. All rows have room for the same number of tokens.
    """

    base: Tensor  # (rows, L, word), zeros in the gaps
    mask: Tensor  # (rows, L)
    at: Tensor  # (rows, room), positions of the gaps

    def __init__(self, model: VisionLanguageModel, rows: Sequence[Sequence[str | int]]):
        super().__init__()
        embedded, gaps = [], []
        for row in rows:
            parts: list[Tensor] = []
            gap: list[int] = []
            position = len(model.begin)
            for part in row:
                if isinstance(part, int):
                    gap += range(position, position + part)
                    parts.append(torch.zeros(part, model.word, device=model.device))
                else:
                    parts.append(model.embed(model.tokens([part])[0])[0])
                position += len(parts[-1])
            embedded.append(torch.cat(parts))
            gaps.append(gap)
        lengths = torch.tensor([[len(row)] for row in embedded], device=model.device)
        padded = nn.utils.rnn.pad_sequence(embedded, batch_first=True)
        mask = torch.arange(padded.shape[1], device=model.device) < lengths
        with torch.no_grad():
            base, mask = model.prompt((padded, mask))
        self.register_buffer("base", base, persistent=False)
        self.register_buffer("mask", mask, persistent=False)
        self.register_buffer("at", torch.tensor(gaps, device=model.device), persistent=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings and mask for the model's `read`.

        Args:
            tokens: (rows, room, word), or (room, word) for all rows.
        """
        rows, _, word = self.base.shape
        positions = self.at[..., None].expand(-1, -1, word)
        tokens = tokens.expand(rows, -1, -1).to(self.base.dtype)
        return self.base.scatter(1, positions, tokens), self.mask


def initial_tokens(
    model: VisionLanguageModel, *shape: int, words: str = INITIAL_WORDS
) -> nn.Parameter:
    """Learned tokens (*shape, word) that start as some words, repeated, with a little noise."""
    with torch.no_grad():
        embedded = model.embed(model.tokens([words])[0])[0]  # (tokens, word)
        order = torch.arange(shape[-1], device=embedded.device) % len(embedded)
        start = embedded[order].expand(*shape, -1)
        noise = NOISE * embedded.std() * torch.randn(start.shape).to(embedded)
        return nn.Parameter(start + noise)


def zero_linear(before: int, after: int) -> nn.Linear:
    """A linear layer whose weights start at zero."""
    layer = nn.Linear(before, after)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class ScoresToLogits(nn.Module):
    """Scores (n, labels) to logits: standardised per image, then a learned gain and bias.

    Similarities are far from 0 and close to each other, whatever the model. Standardising makes an
    image's labels comparable and leaves two numbers to learn. A single label has nothing to be
    compared with: its score is used as it is.
    """

    def __init__(self, gain: float = 1.0, bias: float = -1.0):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(gain))
        self.bias = nn.Parameter(torch.tensor(bias))

    def forward(self, scores: Tensor) -> Tensor:
        return self.gain * standardize(scores) + self.bias


def standardize(scores: Tensor) -> Tensor:
    """Scores (..., labels) with mean 0 and spread 1 over the labels; those of a single label as
    they are."""
    if scores.shape[-1] == 1:
        return scores
    # mean first: the order decides in which order autograd sums gradients, to the last bit
    centred = scores - scores.mean(-1, keepdim=True)
    return centred / (scores.std(-1, keepdim=True, correction=0) + 1e-6)


class PromptedModel(Model):
    """A frozen vision-language model and a head that learns.

    `head(model, patches, whole)` returns logits (n, labels). Inputs are images, or a dict of what
    the model computed from them ("patches", "whole"). The frozen model is not saved, sent or
    counted as learned.
    """

    encoder: VisionLanguageModel

    def __init__(self, encoder: VisionLanguageModel, head: nn.Module):
        nn.Module.__init__(self)
        self.__dict__["encoder"] = encoder  # not registered: no part of the state
        self.projection = nn.Identity()
        self.head = head
        self.dense = False

    def _apply(self, fn: Any, recurse: bool = True) -> "PromptedModel":
        self.encoder._apply(fn)
        return super()._apply(fn, recurse)

    def look(self, images: Tensor) -> dict[str, Tensor]:
        """The frozen model's outputs for images: "patches" (n, places, width), "whole" (n, width).

        On CUDA in half precision, whose accuracy convolutions have there anyway.
        """
        half = images.is_cuda and images.dtype == torch.float32
        with torch.no_grad(), torch.autocast("cuda", torch.float16, enabled=half):
            patches, whole = self.encoder.patches(images)
        return {"patches": patches.to(images.dtype), "whole": whole.to(images.dtype)}

    def explain(self, x: Tensor | dict) -> dict[str, Tensor]:
        """What the head reports of how it came to its output; empty if it has no `explain`."""
        explain = getattr(self.head, "explain", None)
        return explain(self.encoder, **self._outputs(x)) if explain else {}

    def features(self, x: Tensor | dict) -> Tensor:
        return self._outputs(x)["whole"]

    def forward(self, x: Tensor | dict) -> Tensor:
        return self.head(self.encoder, **self._outputs(x))

    def _outputs(self, x: Tensor | dict) -> dict[str, Tensor]:
        return x if isinstance(x, dict) else self.look(x)
