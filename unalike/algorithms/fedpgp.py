"""FedPGP: a shared prompt, adapted by every client in a low rank.

Cui et al., "Harmonizing Generalization and Personalization in Federated Prompt Learning",
ICML 2024, https://arxiv.org/abs/2405.09771.

A client's context is the shared one plus U V of rank `rank` (eq. 4); only the shared one is sent
and averaged. Beside the task's loss a client minimises mu times a contrast of text features
(eq. 6): of the shared prompt, positive with those of the frozen model's own prompt, negative with
the client's. The paper's cross entropy is replaced by the task's loss, since an image may have
several labels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, softplus

from unalike.methods.prompt_tuning import PromptTuning, PromptTuningProgram
from unalike.models.prompts import INITIAL_WORDS, Prompts, ScoresToLogits, initial_tokens
from unalike.models.vlm import VisionLanguageModel


@dataclass
class FedPGP(PromptTuning):
    """Averages a context; clients keep low-rank changes of it.

    Args:
        tokens: learnt tokens of the context.
        rank: of a client's change of it, the paper's bottleneck.
        mu: weight of the contrast.
        temperature: of the contrast.
    """

    personalised: ClassVar[bool] = True

    tokens: PositiveInt = 16
    rank: PositiveInt = 8
    mu: NonNegativeFloat = 1.0
    temperature: PositiveFloat = 0.5

    def shares(self, name: str) -> bool:
        return name != "head.down" and name != "head.up"

    def head(self, model: VisionLanguageModel, labels: Sequence[str]) -> nn.Module:
        return AdaptedContext(self, model, labels)

    class Program(PromptTuningProgram):
        algorithm: "FedPGP"

        def loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
            """Eq. 7: the task's loss and mu times the contrast."""
            head: Any = self.model.head
            contrast = head.contrast(self.model.encoder, self.algorithm.temperature)
            return super().loss(x, y) + self.algorithm.mu * contrast


class AdaptedContext(nn.Module):
    """Logits from the similarity of an image with "[shared context + U V] label"."""

    frozen: Tensor  # text features of the hand-written prompt, (labels, width)

    def __init__(self, method: FedPGP, model: VisionLanguageModel, labels: Sequence[str]):
        super().__init__()
        self.texts = Prompts(model, [[method.tokens, label] for label in labels])
        frozen = model.texts([f"{INITIAL_WORDS} {label}" for label in labels])
        self.register_buffer("frozen", frozen, persistent=False)
        self.tokens = initial_tokens(model, method.tokens)  # shared
        self.down = nn.Parameter(0.02 * torch.randn(method.tokens, method.rank))  # U
        self.up = nn.Parameter(0.02 * torch.randn(method.rank, model.word))  # V
        self.verdict = ScoresToLogits()

    def forward(self, model: VisionLanguageModel, patches: Tensor, whole: Tensor) -> Tensor:
        return self.verdict(model.similarity(whole, self.adapted(model)))

    def adapted(self, model: VisionLanguageModel) -> Tensor:
        """Text features (labels, width) of the client's own prompt."""
        return model.read(*self.texts(self.tokens + self.down @ self.up))

    def contrast(self, model: VisionLanguageModel, temperature: float) -> Tensor:
        """Eq. 6, mean over labels: -log(e^p / (e^p + e^n)) of both cosines over the temperature."""
        shared = model.read(*self.texts(self.tokens))
        positive = cosine_similarity(shared, self.frozen, dim=-1)
        negative = cosine_similarity(shared, self.adapted(model), dim=-1)
        return softplus((negative - positive) / temperature).mean()
