"""Zero-shot: labels told by hand-written prompts and the frozen model; all that is learnt is where "present" begins."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from unalike.methods.prompt_tuning import PromptTuning
from unalike.models.prompts import ScoresToLogits
from unalike.models.vlm import VisionLanguageModel


@dataclass
class ZeroShot(PromptTuning):
    """Cosine of the whole image with `template`. The gain and bias that are learnt leave the images of a label in their order, so mAP is
    what the frozen model has."""

    template: str = "a photo of a {}"

    def check(self, clients: int, public_rows: int) -> list[tuple[str, str]]:
        return (
            []
            if "{}" in self.template
            else [("template", f'says with {{}} where the label goes, got "{self.template}".')]
        )

    def head(self, model: VisionLanguageModel, labels: Sequence[str]) -> nn.Module:
        return Told(model.texts([self.template.format(label) for label in labels]))


class Told(nn.Module):
    """The whole image against fixed vectors of the labels."""

    texts: Tensor

    def __init__(self, texts: Tensor):
        super().__init__()
        self.register_buffer("texts", texts, persistent=False)
        self.verdict = ScoresToLogits()

    def forward(self, model: VisionLanguageModel, patches: Tensor, whole: Tensor) -> Tensor:
        return self.verdict(model.similarity(whole, self.texts))
