"""Parts that may be added to the rounds of a method with a public set, and the fields for them.

Everything is off by default. Each part is a file of its own in this folder; docs/fedmuscleplus.md
has a section for each with what it is worth.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from unalike.core.algorithm import Sharing
from unalike.core.federation import Federation
from unalike.core.program import ClientProgram
from unalike.methods.distillation import PublicDistillation
from unalike.methods.final_model import LocalFinalModel
from unalike.methods.group_averaging import HeadAveraging, averaged_groups
from unalike.methods.parts import Part, TakesParts
from unalike.methods.public_data import LearningRate
from unalike.methods.shared_subspace import SharedProjectionInit


@dataclass
class AddedParts(TakesParts):
    """Fields of the parts. A method derives from it and calls the parts' hooks (`parts.Part`).

    Args:
        projection_init: start of the projections; "shared": fitted to one subspace of all clients
            (shared_subspace.py).
        average_heads: averaging of heads among clients with the same task and labels
            (group_averaging.py).
        mask_absent_classes: leave classes that only clients with the same averaged head have out of
            the local loss (absent_classes.py).
        distill_public: distillation of public logits after the alignment, among "all" clients with
            labels in common, or only the "multilabel" ones (distillation.py). "auto": all, but
            nobody in a run with the safeguard, which cannot cross-validate clients that distil, or
            with privacy, where every logit counts.
        backbone_lr_scale: learning rate of encoder and projection in local epochs, relative to the
            head's (slow_backbone.py).
        align_lr: learning rate of the alignment; None: training.lr.
        distill_lr: learning rate of the distillation; None: that of the alignment.
        decay: both learning rates go to 0 over the rounds, along a cosine.
        final_model: the model that clients end with: after the last local epochs ("local"), or
            after the alignment that follows them ("aligned") (final_model.py).
    """

    RENAMED: ClassVar[dict[str, str]] = {
        "heads": "average_heads",
        "absent": "mask_absent_classes",
        "opinions": "distill_public",
        "start": "projection_init",
        "local": "backbone_lr_scale",
        "align_rate": "align_lr",
        "opinion_rate": "distill_lr",
        "keep": "final_model",
    }

    projection_init: Literal["random", "shared"] = "random"
    average_heads: Literal["never", "round", "epoch"] = "never"
    mask_absent_classes: bool = False
    distill_public: Literal["auto", "never", "all", "multilabel"] = "auto"
    backbone_lr_scale: Annotated[float, Field(ge=0, le=1)] = 1.0
    align_lr: LearningRate | None = None
    distill_lr: LearningRate | None = None
    decay: bool = False
    final_model: Literal["local", "aligned"] = "local"

    def parts(self) -> list[Part]:
        parts: list[Part] = []
        if self.projection_init == "shared":
            parts.append(SharedProjectionInit())
        if self.final_model == "local":  # before heads are averaged: a client ends with its own
            parts.append(LocalFinalModel())
        if self.average_heads != "never":
            parts.append(HeadAveraging(self.average_heads == "epoch", self.mask_absent_classes))
        if self.distill_public != "never":
            multilabel_only = self.distill_public == "multilabel"
            parts.append(PublicDistillation(multilabel_only, self.distill_public == "auto"))
        return parts

    @property
    def local_operation(self) -> str:
        """What clients do in their local epochs."""
        return "train" if self.backbone_lr_scale == 1 else "train_gently"

    def sharing(self, fed: Federation) -> Sharing | None:
        """All clients share the public set; some average their heads, too."""
        return {**(super().sharing(fed) or {}), **averaged_groups(self, fed)}

    def check(self, clients: int, public_rows: int) -> list[tuple[str, str]]:
        problems = super().check(clients, public_rows)
        if self.mask_absent_classes and self.average_heads == "never":
            sentence = "is for averaged heads: set algorithm.average_heads to round or epoch."
            problems = [("mask_absent_classes", sentence), *problems]
        return problems

    def privacy_problem(self) -> str | None:
        if self.mask_absent_classes:
            return (
                "with mask_absent_classes clients send which labels they have, which nothing "
                "protects; set algorithm.mask_absent_classes to false"
            )
        return super().privacy_problem()

    def public_optimizer(self, program: ClientProgram, name: str) -> torch.optim.Optimizer:
        """A client's optimizer on the public set, with the learning rate of this round.

        Args:
            name: "align" for the alignment, "public" for the distillation.
        """
        own = self.distill_lr if name == "public" else None
        lr = own or self.align_lr or program.training.lr
        optimizer = program.optimizer(name, lr)
        if self.decay:
            progress = (program.round - 1) / program.training.rounds
            for group in optimizer.param_groups:
                group["lr"] = lr * (1 + math.cos(math.pi * progress)) / 2
        return optimizer
