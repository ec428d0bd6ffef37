"""FedMVP: federated multimodal visual prompt tuning.

Singha et al., "FedMVP: Federated Multimodal Visual Prompt Tuning for Vision-Language Models",
ICCV 2025, https://arxiv.org/abs/2504.20860.

A PromptFormer combines an image's patches and the label texts by cross-attention into visual
prompts. Clients train it on a frozen vision-language model, and the server averages it as FedAvg
does. Left out: the paper puts the prompts into the layers of a ViT, we add them to the output of
the image encoder, which may be of any kind and runs once per image; its texts are attributes from
a language model, ours the labels, with learnt tokens before them if asked; its consistency loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import normalize

from unalike.methods.prompt_tuning import PromptTuning, check_attention_heads
from unalike.models.prompts import (
    INITIAL_WORDS,
    Prompts,
    ScoresToLogits,
    initial_tokens,
    zero_linear,
)
from unalike.models.vlm import VisionLanguageModel


@dataclass
class FedMVP(PromptTuning):
    """Averages a PromptFormer.

    Args:
        tokens: learnt queries.
        heads: of the attention.
        text_tokens: learnt tokens before each label, the same for all; 0: "a photo of a".
    """

    tokens: PositiveInt = 4
    heads: PositiveInt = 4
    text_tokens: NonNegativeInt = 0

    def head(self, model: VisionLanguageModel, labels: Sequence[str]) -> nn.Module:
        check_attention_heads(self, model, self.heads)
        return PromptFormer(self, model, labels)


class PromptFormer(nn.Module):
    """Moves the image feature by learnt queries that attend to patches, then to label texts."""

    texts: Tensor  # text features of the labels, (labels, width), unless their tokens are learnt

    def __init__(self, method: FedMVP, model: VisionLanguageModel, labels: Sequence[str]):
        super().__init__()
        width = model.width
        if method.text_tokens:
            self.prompts = Prompts(model, [[method.text_tokens, label] for label in labels])
            self.text_tokens = initial_tokens(model, method.text_tokens)
        else:
            texts = model.texts([f"{INITIAL_WORDS} {label}" for label in labels])
            self.register_buffer("texts", normalize(texts, dim=-1), persistent=False)
        self.learns_texts = method.text_tokens > 0
        self.queries = nn.Parameter(torch.randn(method.tokens, width) / width**0.5)
        self.look = nn.MultiheadAttention(width, method.heads, batch_first=True)
        self.recall = nn.MultiheadAttention(width, method.heads, batch_first=True)
        # The last layer starts at zero: training begins with the frozen model's prediction.
        self.mix = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), zero_linear(width, width)
        )
        self.verdict = ScoresToLogits()

    def label_texts(self, model: VisionLanguageModel) -> Tensor:
        """Unit text features of the labels, (labels, width)."""
        if not self.learns_texts:
            return self.texts
        return normalize(model.read(*self.prompts(self.text_tokens)), dim=-1)

    def forward(self, model: VisionLanguageModel, patches: Tensor, whole: Tensor) -> Tensor:
        patches = normalize(patches, dim=-1)
        label_texts = self.label_texts(model)
        texts = label_texts.expand(len(patches), -1, -1)
        prompts = self.queries.expand(len(patches), -1, -1)  # (n, tokens, width)
        prompts = prompts + self.look(prompts, patches, patches, need_weights=False)[0]
        prompts = prompts + self.recall(prompts, texts, texts, need_weights=False)[0]
        image = normalize(whole, dim=-1) + self.mix(prompts).mean(1)
        return self.verdict(model.similarity(image, label_texts))
