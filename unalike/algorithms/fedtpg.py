"""FedTPG (Qiu 2024): a small network writes the context from the class names, and the network is averaged like FedAvg."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unalike.methods.prompt_tuning import Querying
from unalike.models.prompts import Prompts, ScoresToLogits, initial_tokens, zero_linear
from unalike.models.vlm import VisionLanguageModel


class Writer(nn.Module):
    """Context tokens from the class names by one layer of attention and two linear ones; the whole image against what that reads."""

    names: Tensor

    def __init__(self, how: Querying, model: VisionLanguageModel, labels: Sequence[str]):
        super().__init__()
        width = model.width
        self.texts = Prompts(model, [[how.tokens, label] for label in labels])
        self.register_buffer(
            "names", nn.functional.normalize(model.texts(labels), dim=-1), persistent=False
        )
        self.start, self.queries = (
            initial_tokens(model, how.tokens),
            nn.Parameter(torch.randn(how.tokens, width) / width**0.5),
        )
        self.attention = nn.MultiheadAttention(width, how.heads, batch_first=True)
        self.write = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), zero_linear(width, model.word)
        )
        self.verdict = ScoresToLogits()

    def forward(self, model: VisionLanguageModel, patches: Tensor, whole: Tensor) -> Tensor:
        found = (
            self.queries
            + self.attention(self.queries, self.names, self.names, need_weights=False)[0]
        )
        return self.verdict(
            model.similarity(whole, model.read(*self.texts(self.start + self.write(found))))
        )


@dataclass
class FedTPG(Querying):
    """Learnt queries look at all class names. Left out: classes that differ from client to client; here all have them all."""

    Head = Writer
