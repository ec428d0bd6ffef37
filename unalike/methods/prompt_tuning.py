"""Federated prompt tuning: a frozen vision-language model, with small parts that are learnt.

Both encoders are frozen and never sent. A method adds a head, `head(model, labels)`: a module whose
`forward(model, patches, whole)` turns patch features (n, places, width) and image features
(n, width) into logits (n, labels). Its parameters, such as prompt tokens, are averaged.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from unalike.core.client import Client
from unalike.core.operations import measurement, query, sends
from unalike.core.program import ModelDescription
from unalike.data import Samples, Tensors
from unalike.methods.averaging import Averaging, AveragingProgram
from unalike.models.prompts import PromptedModel
from unalike.models.vlm import READABLE_NAMES, VisionLanguageModel
from unalike.tasks import Task
from unalike.training.batching import batches

MAX_CACHE_BYTES = 8 * 2**30  # beyond, a client encodes its images again each time


class PromptTuningProgram(AveragingProgram):
    """The client's half. Features of the frozen image encoder are computed once and cached."""

    algorithm: "PromptTuning"
    model: PromptedModel

    def build(self, encoder: nn.Module) -> PromptedModel:
        """The frozen vision-language model with the method's head."""
        if not isinstance(encoder, VisionLanguageModel):
            raise ValueError(
                f"{type(self.algorithm).__name__} needs a vision-language model, such as clip, "
                f"siglip or vlm-small, got {type(encoder).__name__}"
            )
        labels = [READABLE_NAMES.get(label, label) for label in self.client.task.labels]
        # Raises for a label that has no tokens; in a template it would pass unnoticed.
        encoder.tokens(labels)
        return PromptedModel(encoder, self.algorithm.head(encoder, labels))

    def samples(self, part: str) -> Samples | None:
        """The client's samples with image features in place of images."""
        if not hasattr(self, "feature_cache"):
            self.feature_cache: dict[str, Samples] = {}
        data = super().samples(part)
        if data is None or not len(data):
            return data
        if part not in self.feature_cache:
            self.feature_cache[part] = encode_images(self.model, data, self.client)
        return self.feature_cache[part]

    @query
    @measurement
    @sends(parameters="open", flops="open", trainable="open")
    def describe(self) -> ModelDescription:
        """As of every model, with the parameters of the frozen encoders."""
        description = super().describe()
        description["parameters"] += sum(p.numel() for p in self.model.encoder.parameters())
        return description


@dataclass
class PromptTuning(Averaging):
    """Averages the head of a frozen vision-language model."""

    Program: ClassVar[type[AveragingProgram]] = PromptTuningProgram

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return task.multilabel

    def head(self, model: VisionLanguageModel, labels: Sequence[str]) -> nn.Module:
        """The module that is learnt; see the top of this file.

        Args:
            labels: the client's labels in words.
        """
        name = type(self).__name__
        raise NotImplementedError(f"{name} has no learnt part: write head(model, labels)")

    def requires_same_labels(self) -> bool:
        """False: labels are texts that the model encodes, no parameter belongs to one."""
        return False


def check_attention_heads(method: PromptTuning, model: VisionLanguageModel, heads: int) -> None:
    """Raise a ValueError unless attention with so many heads fits the model's width."""
    if model.width % heads:
        raise ValueError(
            f"{type(method).__name__} splits {model.width} channels among its attention heads: "
            f"heads must divide them, got {heads}"
        )


def encode_images(model: PromptedModel, data: Samples, client: Client) -> Samples:
    """The same samples with the frozen encoder's features in place of images.

    Returns `data` itself where the features would take more than `MAX_CACHE_BYTES`.
    """
    parts, labels = [], []
    for index in batches(len(data), 128):
        x, y = data.labelled_batch(index)
        if isinstance(x, dict):
            raise ValueError(
                "a vision-language model takes images only, "
                f"the data have the modalities {', '.join(x)}"
            )
        parts.append(model.look(client.to_device(x)))
        labels.append(y)
        if len(parts) == 1:
            batch_bytes = sum(part.nbytes for part in parts[0].values())
            if batch_bytes * len(data) / len(index) > MAX_CACHE_BYTES:
                return data
    features = {}
    for name in parts[0]:
        features[name] = torch.cat([part[name] for part in parts])
    return Tensors(features, torch.cat(labels))
