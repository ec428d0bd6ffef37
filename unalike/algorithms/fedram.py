"""Fed-RAM: RAM (Tan 2025), patches recovered by an adapter and matched with labels by transport that heeds the frozen model; averaged."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.functional import normalize

from unalike.losses.transport import sinkhorn
from unalike.methods.prompt_tuning import PromptTuning
from unalike.models.prompts import INITIAL_WORDS, ScoresToLogits, zero_linear
from unalike.models.vlm import VisionLanguageModel


@dataclass
class FedRAM(PromptTuning):
    """Left out: its adapter sits beside the last layers of a ViT and sees neighbours by their attention, ours is on what the eye gives; its
    texts are of many templates, ours of one, with an adapter of their own."""

    rank: int = 64
    entropy: float = 0.1
    knowledge: float = 0.5  # how much the plan heeds where the frozen model would look
    temperature: float = 1.0  # of that, on similarities of 20 x cosine
    steps: int = 10

    def check(self, clients: int, public_rows: int) -> list[tuple[str, str]]:
        positive = ("rank", "entropy", "temperature", "steps")
        problems = [
            (name, f"must be above 0, got {getattr(self, name):g}.")
            for name in positive
            if not getattr(self, name) > 0
        ]
        return problems + [("knowledge", f"must be at least 0, got {self.knowledge:g}.")] * (
            self.knowledge < 0
        )

    def head(self, model: VisionLanguageModel, labels: Sequence[str]) -> nn.Module:
        return Matched(self, model, labels)


class Matched(nn.Module):
    """Similarities of adapted patches and texts, weighed by the plan between them."""

    texts: Tensor

    def __init__(self, how: FedRAM, model: VisionLanguageModel, labels: Sequence[str]):
        super().__init__()
        self.how = how
        self.register_buffer(
            "texts",
            normalize(model.texts([f"{INITIAL_WORDS} {label}" for label in labels]), dim=-1),
            persistent=False,
        )
        self.eye, self.words = adapter(model.width, how.rank), adapter(model.width, how.rank)
        self.verdict = ScoresToLogits()

    def forward(self, model: VisionLanguageModel, patches: Tensor, whole: Tensor) -> Tensor:
        places = normalize(patches, dim=-1)
        cosine = (
            normalize(places + self.eye(places), dim=-1)
            @ normalize(self.texts + self.words(self.texts), dim=-1).mT
        )
        frozen = (20 * places @ self.texts.mT / self.how.temperature).log_softmax(
            1
        )  # (n, places, labels)
        even = cosine.new_full(cosine.shape[:-1], 1 / cosine.shape[-2])
        plan = sinkhorn(
            1 - cosine - self.how.entropy * self.how.knowledge * frozen,
            even,
            self.how.entropy,
            self.how.steps,
        )
        return self.verdict(20 * cosine.shape[-1] * (plan * cosine).sum(-2))


def adapter(width: int, rank: int) -> nn.Sequential:
    """Down, on, up; changes nothing at first."""
    return nn.Sequential(nn.Linear(width, rank), nn.GELU(), zero_linear(rank, width))
