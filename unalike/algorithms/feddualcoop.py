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

from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import normalize

from unalike.methods.prompt_tuning import PromptTuning
from unalike.models.prompts import Prompts, initial_tokens
from unalike.models.vlm import VisionLanguageModel

SCALE = 20.0  # of cosines, instead of the model's own


@dataclass
class FedDualCoOp(PromptTuning):
    """Averages a pair of learnt prompts per label.

    Args:
        tokens: learnt tokens of each prompt's context.
        own: a context per label; False: one for all labels.
        gain: factor of the logits.
    """

    tokens: PositiveInt = 16
    own: bool = True
    gain: PositiveFloat = 5.0

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
        self.tokens = initial_tokens(model, 2, len(labels) if method.own else 1, method.tokens)

    def forward(self, model: VisionLanguageModel, patches: Tensor, whole: Tensor) -> Tensor:
        context = self.tokens.expand(-1, self.labels, -1, -1).flatten(0, 1)
        texts = normalize(model.read(*self.texts(context)), dim=-1)  # (2 labels, width)
        similarity = SCALE * normalize(patches, dim=-1) @ texts.mT
        positive, negative = similarity.chunk(2, -1)  # (n, places, labels) each
        return self.method.gain * (positive.softmax(1) * (positive - negative)).sum(1)
