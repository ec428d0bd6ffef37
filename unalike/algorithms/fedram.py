"""Fed-RAM: RAM (Recover And Match) with federated averaging.

Tan et al., "Recover and Match: Open-Vocabulary Multi-Label Recognition through
Knowledge-Constrained Optimal Transport", CVPR 2025, https://arxiv.org/abs/2503.15337.

An adapter recovers local features of the patches; optimal transport, guided by the frozen model's
similarities, matches patches with labels. A label's logit is the similarity under that plan;
clients train the adapters and the server averages them as FedAvg does. Left out: RAM's adapter sits
beside the last layers of a ViT and uses their attention, ours works on the encoder's output; its
texts come from many templates, ours from one with an adapter of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import normalize

from unalike.losses.transport import sinkhorn
from unalike.methods.prompt_tuning import PromptTuning
from unalike.models.prompts import INITIAL_WORDS, ScoresToLogits, zero_linear
from unalike.models.vlm import VisionLanguageModel

SCALE = 20.0  # of cosines, instead of the model's own


@dataclass
class FedRAM(PromptTuning):
    """Averages adapters of patches and texts.

    Args:
        rank: inner width of the adapters.
        entropy: weight of the plan's entropy.
        knowledge: weight of the frozen model's matching in the plan.
        temperature: of the frozen model's matching.
        steps: Sinkhorn iterations.
        dropout: share of what the adapter adds to patches that is left out in training.
        whole: whether the image feature counts as one more patch.
    """

    rank: PositiveInt = 64
    entropy: PositiveFloat = 0.1
    knowledge: NonNegativeFloat = 0.5
    temperature: PositiveFloat = 1.0
    steps: PositiveInt = 10
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    whole: bool = False

    def head(self, model: VisionLanguageModel, labels: Sequence[str]) -> nn.Module:
        return PatchTextMatching(self, model, labels)


class PatchTextMatching(nn.Module):
    """Similarities of adapted patches and texts, weighted by the transport plan between them."""

    texts: Tensor  # text features of the labels, (labels, width)

    def __init__(self, method: FedRAM, model: VisionLanguageModel, labels: Sequence[str]):
        super().__init__()
        self.method = method
        texts = normalize(model.texts([f"{INITIAL_WORDS} {label}" for label in labels]), dim=-1)
        self.register_buffer("texts", texts, persistent=False)
        self.eye = adapter(model.width, method.rank)
        self.words = adapter(model.width, method.rank)
        self.dropout = nn.Dropout(method.dropout)
        self.verdict = ScoresToLogits()

    def forward(self, model: VisionLanguageModel, patches: Tensor, whole: Tensor) -> Tensor:
        method = self.method
        if method.whole:
            patches = torch.cat([patches, whole[:, None]], 1)
        patches = normalize(patches, dim=-1)
        adapted_patches = normalize(patches + self.dropout(self.eye(patches)), dim=-1)
        adapted_texts = normalize(self.texts + self.words(self.texts), dim=-1)
        cosine = adapted_patches @ adapted_texts.mT  # (n, places, labels)
        frozen = (SCALE * patches @ self.texts.mT / method.temperature).log_softmax(1)
        cost = 1 - cosine - method.entropy * method.knowledge * frozen
        uniform = cosine.new_full(cosine.shape[:-1], 1 / cosine.shape[-2])
        plan = sinkhorn(cost, uniform, method.entropy, method.steps)
        labels = cosine.shape[-1]
        return self.verdict(SCALE * labels * (plan * cosine).sum(-2))


def adapter(width: int, rank: int) -> nn.Sequential:
    """A bottleneck of inner width `rank` whose output is zero before training."""
    return nn.Sequential(nn.Linear(width, rank), nn.GELU(), zero_linear(rank, width))
