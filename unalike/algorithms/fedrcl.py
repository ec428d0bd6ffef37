"""FedRCL: encoders are averaged, and local training contrasts classes at several depths.

S. Seo, J. Kim, G. Kim, B. Han, "Relaxed Contrastive Learning for Federated Learning", CVPR 2024,
https://arxiv.org/abs/2401.04928.

Beside its task's loss a client pulls the least similar sample of a class closer and pushes the most
similar ones of other classes away, and keeps samples of one class from collapsing into each other.
docs/baselines.md says what is ours in it.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from unalike.losses.contrastive import relaxed_contrast
from unalike.methods.averaging import Averaging, AveragingProgram
from unalike.tasks import Task
from unalike.training.loop import Positive


@dataclass
class FedRCL(Averaging):
    """Local loss + weight * the mean over depths of the relaxed contrast.

    Args:
        temperature: of the contrast.
        limit: cosine from which two samples of a class are too similar.
        weight: of the contrast in the local loss.
        depths: layers that are contrasted, spread over the encoder; the last is its end.
    """

    temperature: Annotated[float, Field(gt=0)] = 0.05
    limit: float = 0.7
    weight: float = 1.0
    depths: Positive = 5

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return task.classifies

    def shares(self, name: str) -> bool:
        return name.startswith("encoder.")

    def requires_same_labels(self) -> bool:
        return False

    class Program(AveragingProgram):
        algorithm: "FedRCL"

        def train_round(self) -> float:
            """With an optimizer that is kept between rounds: most clients have nobody to be
            averaged with."""
            return self.learn()

        def loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
            method = self.algorithm
            outputs, features = self.forward_with_layers(x)
            logits = self.model.head(features)
            labels = self.client.task.label_matrix(y)
            contrasts = [
                relaxed_contrast(pool(z), labels, method.temperature, method.limit)
                for z in [*outputs, features]
                if isinstance(z, Tensor) and z.requires_grad and len(z) == len(y)
            ]
            contrast = torch.stack(contrasts).mean()
            return self.client.task.loss(logits, y) + method.weight * contrast

        def forward_with_layers(self, x: Tensor | dict) -> tuple[list[Any], Tensor]:
            """Outputs of the contrasted layers but the last, and the features."""
            outputs: list[Any] = []
            hooks = [
                layer.register_forward_hook(lambda layer, inputs, out: outputs.append(out))
                for layer in self.contrasted_layers()
            ]
            try:
                return outputs, self.model.features(x)
            finally:
                for hook in hooks:
                    hook.remove()

        def contrasted_layers(self) -> list[nn.Module]:
            """Layers that are contrasted besides the end of the encoder, evenly spread over the
            outermost module of the encoder that has more than one child."""
            layers = list(self.model.encoder.children())
            while len(layers) == 1:
                layers = list(layers[0].children())
            depths = self.algorithm.depths
            indices = {round(i * len(layers) / depths) - 1 for i in range(1, depths)}
            return [layers[index] for index in sorted(indices - {-1, len(layers) - 1})]


def pool(z: Tensor) -> Tensor:
    """(n, channels) of a map (n, channels, height, width) or of tokens (n, tokens, channels)."""
    if z.dim() == 4:
        return z.mean((-2, -1))
    return z.mean(1) if z.dim() == 3 else z
