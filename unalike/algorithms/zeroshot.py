"""Zero-shot classification with a frozen vision-language model and a hand-written prompt.

Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", ICML 2021,
https://arxiv.org/abs/2103.00020.

A baseline, after CLIP. A label's score is the cosine of the image with a text such as "a photo of a
cat". Only a gain and a bias of these scores are learnt and averaged: they set the threshold, not
the ranking of images, so mAP is that of the frozen model."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from unalike.methods.prompt_tuning import PromptTuning
from unalike.models.prompts import ScoresToLogits
from unalike.models.vlm import VisionLanguageModel


@dataclass
class ZeroShot(PromptTuning):
    """Compares images with one fixed text per label.

    Args:
        template: a sentence in which {} stands for the label.
    """

    template: str = "a photo of a {}"

    def check(self, clients: int, public_rows: int) -> list[tuple[str, str]]:
        if "{}" in self.template:
            return []
        return [("template", f'must contain {{}}, the place of the label, got "{self.template}".')]

    def head(self, model: VisionLanguageModel, labels: Sequence[str]) -> nn.Module:
        return FixedTexts(model.texts([self.template.format(label) for label in labels]))


class FixedTexts(nn.Module):
    """Logits from the similarity of an image with fixed text features (labels, width)."""

    texts: Tensor

    def __init__(self, texts: Tensor):
        super().__init__()
        self.register_buffer("texts", texts, persistent=False)
        self.verdict = ScoresToLogits()

    def forward(self, model: VisionLanguageModel, patches: Tensor, whole: Tensor) -> Tensor:
        return self.verdict(model.similarity(whole, self.texts))
