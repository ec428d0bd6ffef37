"""PromptFL: federated learning of a text prompt.

Guo et al., "PromptFL: Let Federated Participants Cooperatively Learn Prompts Instead of Models",
2022, https://arxiv.org/abs/2208.11625.

The prompt of a label is a learnt context followed by the label, as in CoOp; the context is the
same for all labels. Clients train the context on a frozen vision-language model, and the server
averages it as FedAvg does. The paper's softmax over classes is replaced by the task's loss, since
an image may have several labels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import PositiveInt
from torch import Tensor, nn

from unalike.methods.prompt_tuning import PromptTuning
from unalike.models.prompts import Prompts, ScoresToLogits, initial_tokens
from unalike.models.vlm import VisionLanguageModel


@dataclass
class PromptFL(PromptTuning):
    """Averages one learnt context for all labels.

    Args:
        tokens: learnt tokens of the context.
    """

    tokens: PositiveInt = 4

    def head(self, model: VisionLanguageModel, labels: Sequence[str]) -> nn.Module:
        return LearntContext(model, labels, self.tokens)


class LearntContext(nn.Module):
    """Logits from the similarity of an image with "[context] label"."""

    def __init__(self, model: VisionLanguageModel, labels: Sequence[str], count: int):
        super().__init__()
        self.texts = Prompts(model, [[count, label] for label in labels])
        self.tokens = initial_tokens(model, count)
        self.verdict = ScoresToLogits()

    def forward(self, model: VisionLanguageModel, patches: Tensor, whole: Tensor) -> Tensor:
        texts = model.read(*self.texts(self.tokens))  # (labels, width)
        return self.verdict(model.similarity(whole, texts))
