"""FedRCL (Seo 2024): encoders of one architecture are averaged; each client contrasts classes, but lets a class keep its spread.

Beside its task's loss a client draws the least alike sample of a class near and the most alike of others away, at several depths, and
holds off those of a class that are almost one. docs/baselines.md says what is ours in it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unalike.base.types import Parameters
from unalike.core.operations import operation, sends
from unalike.losses.contrastive import relaxed_contrast
from unalike.methods.averaging import Averaging, AveragingProgram, Update
from unalike.tasks import Task


@dataclass
class FedRCL(Averaging):
    """Local loss + weight * the mean over depths of the relaxed contrast."""

    temperature: float = 0.05
    limit: float = 0.7  # cosine from which two of a class are too alike
    weight: float = 1.0
    depths: int = (
        5  # layers at which samples are compared, spread over the encoder, its end among them
    )

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return task.classifies

    def check(self, clients: int, public_rows: int) -> list[tuple[str, str]]:
        problems = (
            [("temperature", f"must be above 0, got {self.temperature:g}.")]
            if not self.temperature > 0
            else []
        )
        return problems + (
            [("depths", f"must be at least 1, got {self.depths}.")] if self.depths < 1 else []
        )

    def shares(self, name: str) -> bool:
        return name.startswith("encoder.")

    def requires_same_labels(self) -> bool:
        return False

    class Program(AveragingProgram):
        algorithm: "FedRCL"

        @operation
        @sends(parameters="parameters", samples="open")
        def update(self, parameters: Parameters) -> Update:
            """As in averaging, but with an optimizer that is kept: most have nobody to be averaged with."""
            self.receive(parameters)
            self.transient = True
            loss = self.learn()
            return {"parameters": self.shared(), "samples": len(self.client.train), "loss": loss}

        def loss(self, x: Tensor | dict, y: Tensor) -> Tensor:
            how, seen = self.algorithm, []
            hooks = [
                layer.register_forward_hook(lambda layer, given, out: seen.append(out))
                for layer in self.layers()
            ]
            try:
                seen.append(features := self.model.features(x))
            finally:
                for hook in hooks:
                    hook.remove()
            output = self.model.head(features)
            labels = self.client.task.label_matrix(y)
            contrasts = [
                relaxed_contrast(pooled(z), labels, how.temperature, how.limit)
                for z in seen
                if isinstance(z, Tensor) and z.requires_grad and len(z) == len(y)
            ]
            return self.client.task.loss(output, y) + how.weight * torch.stack(contrasts).mean()

        def layers(self) -> list[nn.Module]:
            """Where it looks but at the end: layers of the innermost row of the encoder that has more than one, evenly spread."""
            at: Any = self.model.encoder
            while len(inside := list(at.children())) == 1:
                (at,) = inside
            count = self.algorithm.depths
            places = {round(i * len(inside) / count) - 1 for i in range(1, count)} - {
                -1,
                len(inside) - 1,
            }
            return [inside[place] for place in sorted(places)]


def pooled(z: Tensor) -> Tensor:
    """(n, channels) of a map (n, channels, height, width) or of tokens (n, tokens, channels)."""
    return z.mean((-2, -1)) if z.dim() == 4 else z.mean(1) if z.dim() == 3 else z
