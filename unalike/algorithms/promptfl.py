"""PromptFL (Guo 2023): CoOp's learnt context before every class name, averaged like FedAvg."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from unalike.methods.prompt_tuning import PromptTuning
from unalike.models.prompts import Prompts, ScoresToLogits, initial_tokens
from unalike.models.vlm import VisionLanguageModel


@dataclass
class PromptFL(PromptTuning):
    """One context for all labels, against the whole image. Left out: nothing; its softmax over classes is the task's loss here."""

    tokens: int = 4

    def check(self, clients: int, public_rows: int) -> list[tuple[str, str]]:
        return [] if self.tokens > 0 else [("tokens", f"must be above 0, got {self.tokens}.")]

    def head(self, model: VisionLanguageModel, labels: Sequence[str]) -> nn.Module:
        return Context(model, labels, self.tokens)


class Context(nn.Module):
    """Learnt tokens before each label; the whole image against what that reads."""

    def __init__(self, model: VisionLanguageModel, labels: Sequence[str], count: int):
        super().__init__()
        self.texts = Prompts(model, [[count, label] for label in labels])
        self.tokens, self.verdict = initial_tokens(model, count), ScoresToLogits()

    def forward(self, model: VisionLanguageModel, patches: Tensor, whole: Tensor) -> Tensor:
        return self.verdict(model.similarity(whole, model.read(*self.texts(self.tokens))))
