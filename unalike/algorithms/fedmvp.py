"""FedMVP (Singha 2025): tokens made from an image's patches and the words for the labels, added to what is seen; averaged like FedAvg."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from unalike.methods.prompt_tuning import Querying
from unalike.models.prompts import INITIAL_WORDS, ScoresToLogits, zero_linear
from unalike.models.vlm import VisionLanguageModel


class Former(nn.Module):
    """The whole image, moved by what its queries found, against fixed vectors of the labels."""

    texts: Tensor

    def __init__(self, how: Querying, model: VisionLanguageModel, labels: Sequence[str]):
        super().__init__()
        width = model.width
        self.register_buffer(
            "texts",
            normalize(model.texts([f"{INITIAL_WORDS} {label}" for label in labels]), dim=-1),
            persistent=False,
        )
        self.queries = nn.Parameter(torch.randn(how.tokens, width) / width**0.5)
        self.look = nn.MultiheadAttention(width, how.heads, batch_first=True)
        self.recall = nn.MultiheadAttention(width, how.heads, batch_first=True)
        self.mix = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), zero_linear(width, width)
        )
        self.verdict = ScoresToLogits()

    def forward(self, model: VisionLanguageModel, patches: Tensor, whole: Tensor) -> Tensor:
        places, texts = normalize(patches, dim=-1), self.texts.expand(len(patches), -1, -1)
        found = self.queries.expand(len(patches), -1, -1)
        found = found + self.look(found, places, places, need_weights=False)[0]
        found = found + self.recall(found, texts, texts, need_weights=False)[0]
        return self.verdict(
            model.similarity(normalize(whole, dim=-1) + self.mix(found).mean(1), self.texts)
        )


@dataclass
class FedMVP(Querying):
    """Its PromptFormer: learnt queries look at patches, then at texts. Left out: its tokens go into the layers of a ViT, ours, since the
    eye may be any and is looked through once, to what it gives; its texts are attributes from an LLM, ours the labels."""

    Head = Former
