"""Linear probe: one linear layer on the features of a frozen image encoder, averaged.

A baseline of our own for prompt tuning: it uses the same frozen vision-language model and no text.
Clients train the layer on image features; the server averages it as FedAvg does. Compared with
`fedavg` on the same model it has no hidden layer, and each image is encoded only once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.functional import normalize

from unalike.methods.prompt_tuning import PromptTuning
from unalike.models.vlm import VisionLanguageModel


@dataclass
class LinearProbe(PromptTuning):
    """Averages a linear classifier on frozen image features."""

    def requires_same_labels(self) -> bool:
        return True

    def head(self, model: VisionLanguageModel, labels: Sequence[str]) -> nn.Module:
        return Probe(model.width, len(labels))


class Probe(nn.Linear):
    """A linear layer on features scaled to length sqrt(width), whose entries are about 1."""

    def forward(  # type: ignore[override]
        self, model: VisionLanguageModel, patches: Tensor, whole: Tensor
    ) -> Tensor:
        return super().forward(normalize(whole, dim=-1) * self.in_features**0.5)
