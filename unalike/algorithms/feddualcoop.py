"""Fed-DualCoOp: DualCoOp (Sun 2022), a learnt context for "there" and one for "not there" of every label, averaged like FedAvg."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.functional import normalize

from unalike.methods.prompt_tuning import PromptTuning
from unalike.models.prompts import Prompts, initial_tokens
from unalike.models.vlm import VisionLanguageModel

SCALE = 20.0  # of cosines, whatever the model's own is


@dataclass
class FedDualCoOp(PromptTuning):
    """Patches are weighed by how much they speak for the label. Left out: the attention layer of CLIP that DualCoOp takes out to get
    patches; here they are the model's own."""

    tokens: int = 16
    own: bool = True  # each label has contexts of its own
    gain: float = 5.0  # of the logits

    def check(self, clients: int, public_rows: int) -> list[tuple[str, str]]:
        return [
            (name, f"must be above 0, got {getattr(self, name):g}.")
            for name in ("tokens", "gain")
            if not getattr(self, name) > 0
        ]

    def by_label(self) -> bool:
        return self.own

    def head(self, model: VisionLanguageModel, labels: Sequence[str]) -> nn.Module:
        return Dual(self, model, labels)


class Dual(nn.Module):
    """Evidence for minus evidence against, from the patches that speak for."""

    def __init__(self, how: FedDualCoOp, model: VisionLanguageModel, labels: Sequence[str]):
        super().__init__()
        self.how, self.labels = how, len(labels)
        rows: list[list[str | int]] = [[how.tokens, label] for label in labels]
        self.texts = Prompts(model, rows * 2)
        self.tokens = initial_tokens(model, 2, len(labels) if how.own else 1, how.tokens)

    def forward(self, model: VisionLanguageModel, patches: Tensor, whole: Tensor) -> Tensor:
        learnt = self.tokens.expand(-1, self.labels, -1, -1).flatten(0, 1)
        texts = normalize(model.read(*self.texts(learnt)), dim=-1)
        there, absent = (SCALE * normalize(patches, dim=-1) @ texts.mT).chunk(
            2, -1
        )  # (n, places, labels) each
        return self.how.gain * (there.softmax(1) * (there - absent)).sum(1)
