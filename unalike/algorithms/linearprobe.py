"""A linear probe: one linear layer on what the frozen model sees of the whole image, averaged like FedAvg. Reads no text."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.functional import normalize

from unalike.methods.prompt_tuning import PromptTuning
from unalike.models.vlm import VisionLanguageModel


@dataclass
class LinearProbe(PromptTuning):
    """What labels alone teach; `fedavg` on the same model adds a hidden layer, and looks at every image anew."""

    def by_label(self) -> bool:
        return True

    def head(self, model: VisionLanguageModel, labels: Sequence[str]) -> nn.Module:
        return Probe(model.width, len(labels))


class Probe(nn.Linear):
    """On vectors of length sqrt(width), whose entries are about 1."""

    def forward(self, model: VisionLanguageModel, patches: Tensor, whole: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(normalize(whole, dim=-1) * self.in_features**0.5)
