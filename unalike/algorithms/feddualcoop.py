"""Fed-DualCoOp: DualCoOp with federated averaging.

Sun et al., "DualCoOp: Fast Adaptation to Multi-Label Recognition with Limited Annotations",
NeurIPS 2022, https://arxiv.org/abs/2206.09541.

Every label has two learnt prompts, one for "present" and one for "absent". A label's logit is the
difference of their similarities to the patches, weighted towards patches where "present" is most
similar; clients train the prompts and the server averages them as FedAvg does. Left out: DualCoOp
takes CLIP's last attention layer away to get patch features, ours are the model's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import normalize

from unalike.methods.prompt_tuning import PromptTuning
from unalike.models.prompts import INITIAL_WORDS, Prompts, ScoresToLogits, initial_tokens
from unalike.models.vlm import VisionLanguageModel

SCALE = 20.0  # of cosines, instead of the model's own


@dataclass
class FedDualCoOp(PromptTuning):
    """Averages a pair of learnt prompts per label.

    Args:
        tokens: learnt tokens of each prompt's context.
        own: a context per label; False: one for all labels.
        gain: factor of the logits.
        absent: words that the context for "absent" starts as; the one for "present" starts as
            "a photo of a".
        whole: whether the image feature counts as one more patch.
        compare: whether an image's logits are brought to mean 0 and spread 1 over its labels, with
            a learnt gain and bias.
    """

    tokens: PositiveInt = 16
    own: bool = True
    gain: PositiveFloat = 5.0
    absent: str = INITIAL_WORDS
    whole: bool = False
    compare: bool = False

    def requires_same_labels(self) -> bool:
        return self.own

    def head(self, model: VisionLanguageModel, labels: Sequence[str]) -> nn.Module:
        return DualPrompts(self, model, labels)


class DualPrompts(nn.Module):
    """Logits from the similarities of patches with a positive and a negative prompt per label."""

    def __init__(self, method: FedDualCoOp, model: VisionLanguageModel, labels: Sequence[str]):
        super().__init__()
        self.method, self.labels = method, len(labels)
        rows: list[list[str | int]] = [[method.tokens, label] for label in labels]
        self.texts = Prompts(model, rows * 2)  # positive prompts first, then negative ones
        shape = (1, len(labels) if method.own else 1, method.tokens)
        self.present = initial_tokens(model, *shape)
        self.absent = initial_tokens(model, *shape, words=method.absent)
        if method.compare:
            self.verdict = ScoresToLogits()

    def forward(self, model: VisionLanguageModel, patches: Tensor, whole: Tensor) -> Tensor:
        tokens = torch.cat([self.present, self.absent])
        context = tokens.expand(-1, self.labels, -1, -1).flatten(0, 1)
        texts = normalize(model.read(*self.texts(context)), dim=-1)  # (2 labels, width)
        if self.method.whole:
            patches = torch.cat([patches, whole[:, None]], 1)
        similarity = SCALE * normalize(patches, dim=-1) @ texts.mT
        positive, negative = similarity.chunk(2, -1)  # (n, places, labels) each
        logits = self.method.gain * (positive.softmax(1) * (positive - negative)).sum(1)
        return self.verdict(logits) if self.method.compare else logits
