"""PosCoOp: one learnt prompt per label for "present", and a learnt vector for "absent".

Rawlekar et al., "Rethinking Prompting Strategies for Multi-Label Recognition with Partial
Annotations", WACV 2025, https://arxiv.org/abs/2409.08381.

DualCoOp's second prompt is replaced: whether a label is absent is told by a vector that is learnt
in the joint space directly, without the text encoder (PositiveCoOp, sec. 3.2). The rest, and the
federated averaging, is as in Fed-DualCoOp. Left out: what Fed-DualCoOp leaves out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import normalize

from unalike.algorithms.feddualcoop import SCALE
from unalike.methods.prompt_tuning import PromptTuning
from unalike.models.prompts import Prompts, initial_tokens
from unalike.models.vlm import VisionLanguageModel


@dataclass
class PosCoOp(PromptTuning):
    """Averages a learnt prompt and a learnt vector per label.

    Args:
        tokens: learnt tokens of a prompt's context.
        gain: factor of the logits.
    """

    tokens: PositiveInt = 16
    gain: PositiveFloat = 5.0

    def requires_same_labels(self) -> bool:
        return True

    def head(self, model: VisionLanguageModel, labels: Sequence[str]) -> nn.Module:
        return PositivePrompts(self, model, labels)


class PositivePrompts(nn.Module):
    """Logits from the similarities of patches with a prompt and a vector per label."""

    def __init__(self, method: PosCoOp, model: VisionLanguageModel, labels: Sequence[str]):
        super().__init__()
        self.gain = method.gain
        self.texts = Prompts(model, [[method.tokens, label] for label in labels])
        self.tokens = initial_tokens(model, len(labels), method.tokens)
        self.absent = nn.Parameter(torch.randn(len(labels), model.width) / model.width**0.5)

    def forward(self, model: VisionLanguageModel, patches: Tensor, whole: Tensor) -> Tensor:
        patches = SCALE * normalize(patches, dim=-1)
        texts = normalize(model.read(*self.texts(self.tokens)), dim=-1)  # (labels, width)
        positive = patches @ texts.mT  # (n, places, labels)
        negative = patches @ normalize(self.absent, dim=-1).mT
        return self.gain * (positive.softmax(1) * (positive - negative)).sum(1)
