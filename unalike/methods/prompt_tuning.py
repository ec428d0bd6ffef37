"""Averaging where a model that sees and reads is frozen, and only prompts and the like are learnt and sent. Knows no engine.

A method says what learns: `head(model, labels)`, a module that takes the model, patches (n, places, width) and wholes (n, width) of
images, and gives logits (n, labels).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import nn

from unalike.core.algorithm import Described
from unalike.core.client import Client
from unalike.core.federation import Replies
from unalike.core.operations import query, sends
from unalike.data import Samples, Tensors
from unalike.methods.averaging import Averaging, AveragingProgram
from unalike.models.prompts import PromptedModel
from unalike.models.vlm import READABLE_NAMES, VisionLanguageModel
from unalike.tasks import Task
from unalike.training.batching import batches

LARGEST = 8 * 2**30  # bytes of what was seen that a client keeps; beyond, it looks again each time


class PromptTuningProgram(AveragingProgram):
    """What it has seen of its images stays in memory, never in the state: the frozen half says the same each time."""

    algorithm: "PromptTuning"
    model: PromptedModel

    def build(self, encoder: nn.Module) -> PromptedModel:
        how, labels = (
            self.algorithm,
            [READABLE_NAMES.get(label, label) for label in self.client.task.labels],
        )
        if not isinstance(encoder, VisionLanguageModel):
            raise ValueError(
                f"{type(how).__name__} needs a model that sees and reads, such as clip, siglip or vlm-small; "
                f"{type(encoder).__name__} does not"
            )
        encoder.tokens(
            labels
        )  # a label without a word is told, though a template around it has some
        return PromptedModel(encoder, how.head(encoder, labels))

    def held(self, part: str) -> Samples | None:
        if not hasattr(self, "looked"):
            self.looked: dict[str, Samples] = {}
        data = super().held(part)
        if data is None or not len(data):
            return data
        if part not in self.looked:
            self.looked[part] = seen(self.model, data, self.client)
        return self.looked[part]

    @query
    @sends(parameters="open", flops="open", trainable="open")
    def describe(self) -> Described:
        told = super().describe()
        told["parameters"] += sum(p.numel() for p in self.model.encoder.parameters())
        return told


@dataclass
class PromptTuning(Averaging):
    """Both encoders frozen; the mean of what the clients learnt goes out again."""

    Program: ClassVar[type[AveragingProgram]] = PromptTuningProgram

    mean: Literal["uniform", "samples"] = "samples"  # how clients count in the average

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return task.multilabel

    def head(self, model: VisionLanguageModel, labels: Sequence[str]) -> nn.Module:
        raise NotImplementedError(
            f"{type(self).__name__} does not say what learns: write head(model, labels)"
        )

    def by_label(self) -> bool:
        return False  # labels are read, not learnt

    def weights(self, replies: Replies) -> dict[str, float]:
        return super().weights(replies) if self.mean == "samples" else dict.fromkeys(replies, 1.0)


@dataclass
class Querying(PromptTuning):
    """What learns has queries that look around by attention."""

    Head: ClassVar[Callable[..., nn.Module]]

    tokens: int = 4
    heads: int = 4

    def check(self, clients: int, public_rows: int) -> list[tuple[str, str]]:
        return [
            (name, f"must be above 0, got {getattr(self, name)}.")
            for name in ("tokens", "heads")
            if not getattr(self, name) > 0
        ]

    def head(self, model: VisionLanguageModel, labels: Sequence[str]) -> nn.Module:
        if model.width % self.heads:
            raise ValueError(
                f"{type(self).__name__} shares {model.width} channels among its heads: {self.heads} do not divide them"
            )
        return type(self).Head(self, model, labels)


def seen(model: PromptedModel, data: Samples, client: Client) -> Samples:
    """The same samples with what the frozen half sees in place of images; the images themselves where that would be too much to keep."""
    parts, labels = [], []
    for few in batches(len(data), 128):
        x, y = data.labelled_batch(few)
        if isinstance(x, dict):
            raise ValueError(
                f"a model that sees and reads takes images alone, the data have modalities {', '.join(x)}"
            )
        parts.append(model.look(client.to_device(x)))
        labels.append(y)
        if (
            sum(part.nbytes for part in parts[0].values()) * len(data) / len(few) > LARGEST
            and len(parts) == 1
        ):
            return data
    return Tensors(
        {name: torch.cat([part[name] for part in parts]) for name in parts[0]}, torch.cat(labels)
    )
