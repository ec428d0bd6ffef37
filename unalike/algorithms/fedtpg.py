"""FedTPG: federated text-driven prompt generation.

Qiu et al., "Federated Text-driven Prompt Generation for Vision-Language Models", ICLR 2024,
https://arxiv.org/abs/2310.06123.

A small network generates the context tokens of the prompts from the class names. Clients train the
network on a frozen vision-language model, and the server averages it as FedAvg does. Left out:
classes that differ from client to client; here all clients have the same ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.nn.functional import normalize

from unalike.methods.prompt_tuning import PromptTuning, check_attention_heads
from unalike.models.prompts import Prompts, ScoresToLogits, initial_tokens, zero_linear
from unalike.models.vlm import VisionLanguageModel


@dataclass
class FedTPG(PromptTuning):
    """Averages a prompt generator conditioned on the class names.

    Args:
        tokens: learnt queries.
        heads: of the attention.
    """

    tokens: PositiveInt = 4
    heads: PositiveInt = 4

    def head(self, model: VisionLanguageModel, labels: Sequence[str]) -> nn.Module:
        check_attention_heads(self, model, self.heads)
        return PromptGenerator(self, model, labels)


class PromptGenerator(nn.Module):
    """Generates context tokens by cross-attention of learnt queries to the class names."""

    names: Tensor  # text features of the class names, (labels, width)

    def __init__(self, method: FedTPG, model: VisionLanguageModel, labels: Sequence[str]):
        super().__init__()
        width = model.width
        self.texts = Prompts(model, [[method.tokens, label] for label in labels])
        self.register_buffer("names", normalize(model.texts(labels), dim=-1), persistent=False)
        self.start = initial_tokens(model, method.tokens)
        self.queries = nn.Parameter(torch.randn(method.tokens, width) / width**0.5)
        self.attention = nn.MultiheadAttention(width, method.heads, batch_first=True)
        # The last layer starts at zero: training begins with the prompt `start`.
        self.write = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), zero_linear(width, model.word)
        )
        self.verdict = ScoresToLogits()

    def forward(self, model: VisionLanguageModel, patches: Tensor, whole: Tensor) -> Tensor:
        context, _ = self.attention(self.queries, self.names, self.names, need_weights=False)
        prompts = self.start + self.write(self.queries + context)  # (tokens, word)
        return self.verdict(model.similarity(whole, model.read(*self.texts(prompts))))
