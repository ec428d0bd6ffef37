"""Texts with gaps for learnt tokens, and the model whose frozen half sees and reads while only the rest learns. Knows no clients."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unalike.models.model import Model
from unalike.models.vlm import VisionLanguageModel

INITIAL_WORDS = "a photo of a"  # what learnt tokens say before they learn
NOISE = 0.02


class Prompts(nn.Module):
    """Texts put together once: in each row words stay as they are, and a number leaves room for so many learnt tokens.

    Rows have room for equally many; `forward` takes the tokens (rows, room, word), or (room, word) for all rows, and gives what a model
    reads. What is fixed is neither saved nor sent: everyone has the model that makes it.
    """

    base: Tensor
    mask: Tensor
    at: Tensor

    def __init__(self, model: VisionLanguageModel, rows: Sequence[Sequence[str | int]]):
        super().__init__()
        told = {
            text: model.tokens([text])[0] for row in rows for text in row if isinstance(text, str)
        }
        made, at = [], []
        for row in rows:
            parts, place = [], len(model.begin)
            free: list[int] = []
            for part in row:
                count = part if isinstance(part, int) else told[part].shape[1]
                if isinstance(part, int):
                    free += range(place, place + part)
                parts.append(
                    torch.zeros(count, model.word, device=model.device)
                    if isinstance(part, int)
                    else model.embed(told[part])[0]
                )
                place += count
            made.append(torch.cat(parts))
            at.append(free)
        longest = max(map(len, made))
        there = torch.tensor(
            [[i < len(row) for i in range(longest)] for row in made], device=model.device
        )
        held = torch.stack([nn.functional.pad(row, (0, 0, 0, longest - len(row))) for row in made])
        with torch.no_grad():
            base, mask = model.prompt((held, there))
        for name, tensor in (
            ("base", base),
            ("mask", mask),
            ("at", torch.tensor(at, device=model.device)),
        ):
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        rows, _, word = self.base.shape
        return self.base.scatter(
            1,
            self.at[..., None].expand(-1, -1, word),
            tokens.expand(rows, -1, -1).to(self.base.dtype),
        ), self.mask


def initial_tokens(model: VisionLanguageModel, *shape: int) -> nn.Parameter:
    """Learnt tokens (*shape, word) that begin as the words "a photo of a", again and again, and a little noise."""
    with torch.no_grad():
        words = model.embed(model.tokens([INITIAL_WORDS])[0])[0]  # (4 or so, word)
        begun = words[torch.arange(shape[-1], device=words.device) % len(words)].expand(*shape, -1)
        return nn.Parameter(begun + NOISE * words.std() * torch.randn(begun.shape).to(words))


def zero_linear(before: int, after: int) -> nn.Linear:
    """A linear layer that says nothing until it learns."""
    made = nn.Linear(before, after)
    nn.init.zeros_(made.weight)
    nn.init.zeros_(made.bias)
    return made


class ScoresToLogits(nn.Module):
    """From scores to logits: a gain and a bias, learnt, after the scores of an image are brought to mean 0 and spread 1.

    Similarities of any model are far from 0 and near each other; this makes an image's labels comparable, and leaves two numbers to learn
    where "present" begins. One label has nothing to be compared with: its score is taken as it is.
    """

    def __init__(self, gain: float = 1.0, bias: float = -1.0):
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.tensor(gain)), nn.Parameter(torch.tensor(bias))

    def forward(self, scores: Tensor) -> Tensor:
        if scores.shape[-1] > 1:
            scores = (scores - scores.mean(-1, keepdim=True)) / (
                scores.std(-1, keepdim=True, correction=0) + 1e-6
            )
        return self.gain * scores + self.bias


class PromptedModel(Model):
    """A frozen model that sees and reads, and a head that learns: `head(model, patches, whole)` gives logits (n, labels).

    Takes images, or what was seen of them ("patches", "whole"). The frozen half is neither saved nor sent nor counted as learnt.
    """

    encoder: VisionLanguageModel

    def __init__(self, encoder: VisionLanguageModel, head: nn.Module):
        nn.Module.__init__(self)
        self.__dict__["encoder"] = encoder  # past torch's books: no part of the state
        self.projection, self.head, self.dense = nn.Identity(), head, False

    def _apply(self, fn: Any, recurse: bool = True) -> "PromptedModel":
        self.encoder._apply(fn)
        return super()._apply(fn, recurse)

    def look(self, images: Tensor) -> dict[str, Tensor]:
        """On CUDA in half precision, which has the digits that convolutions have there anyway."""
        with (
            torch.no_grad(),
            torch.autocast(
                "cuda", torch.float16, enabled=images.is_cuda and images.dtype == torch.float32
            ),
        ):
            return {
                name: part.to(images.dtype)
                for name, part in zip(
                    ("patches", "whole"), self.encoder.patches(images), strict=True
                )
            }

    def explain(self, x: Tensor | dict) -> dict[str, Tensor]:
        """What the head can tell of how it came to its guess; nothing where it cannot."""
        told = getattr(self.head, "explain", None)
        return told(self.encoder, **(x if isinstance(x, dict) else self.look(x))) if told else {}

    def features(self, x: Tensor | dict) -> Tensor:
        return (x if isinstance(x, dict) else self.look(x))["whole"]

    def forward(self, x: Tensor | dict) -> Tensor:
        return self.head(self.encoder, **(x if isinstance(x, dict) else self.look(x)))
