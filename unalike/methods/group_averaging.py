"""Clients that are alike go on from the mean of what they have in common: whole models, or their heads. Knows no methods and no engine."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from unalike.base.message import Value
from unalike.base.types import Parameters
from unalike.core.algorithm import ClientProgram
from unalike.core.federation import Federation
from unalike.core.operations import operation, query, sends
from unalike.core.safeguard import UNJUDGED, unjudge
from unalike.methods.averaging import LabelMask, label_masks, mean_states, shape_hash, short_hash

OPEN = "open"  # what a method's `absent` is where classes are left open, and what a side remembers them by


class GroupAveragingProgram(ClientProgram):
    """Gives what of its model may be averaged, and takes the mean."""

    common: ClassVar[str] = ""  # names of these parameters begin so; "": all of the model's

    @query
    @sends("open")
    def kind_of(self) -> str:
        """A word that is equal for those who may be averaged; none where there is nothing to average."""
        return kind(self.client.task.name, self.client.task.labels, self.shared())

    @query
    @sends("parameters")
    def give(self) -> Parameters:
        return self.shared()

    def blank_give(self) -> Parameters:
        return self.shared()

    @query
    def present(self) -> LabelMask:
        """(labels,): 1 for each that the client has a sample of."""
        if not self.spares:
            raise ValueError(
                "which classes a client has is told only where it leaves open those that others have"
            )
        return self.client.present.float()

    @operation
    def take(self, parameters: Parameters, had: Tensor | None = None) -> None:
        """The mean; and which classes those of its kind have between them."""
        if shape_hash(parameters) != shape_hash(self.shared()):
            raise ValueError("what came is not what it shares: other names or shapes")
        if had is not None:
            if not self.spares:
                raise ValueError("it leaves no class open, whoever has it")
            if had.shape != self.client.present.shape:
                raise ValueError(
                    f"it has {len(self.client.present)} classes, which of them others have came as {tuple(had.shape)}"
                )
            self.memory[OPEN] = had.cpu().bool() & ~self.client.present
        self.model.load_state_dict(parameters, strict=False)
        self.memory[UNJUDGED] = True

    def learn(self, *given: Any, **named: Any) -> float:
        """Local epochs; who begins them with what was made from its own labels cannot be judged any more, and spares itself the shadows."""
        if self.memory.get(UNJUDGED):
            self.fold_replicas = []
        if OPEN in self.memory:
            self.open.copy_(self.memory[OPEN])
        return super().learn(*given, **named)

    @property
    def spares(self) -> bool:
        """Whether classes that it has none of are no wrong answers to it, where others of its kind have some: its method's choice."""
        return getattr(self.algorithm, "mask_absent_classes", False)

    def error(self, output: Tensor, y: Tensor) -> Tensor:
        return super().error(
            output.masked_fill(self.open, -torch.inf)
            if self.spares and self.client.task.single_label
            else output,
            y,
        )

    @cached_property
    def open(self) -> Tensor:
        """(labels,): True for classes left open. Changed where it lies: a GPU may have recorded steps with it."""
        return torch.zeros(
            len(self.client.task.labels), dtype=torch.bool, device=self.client.device
        )

    def shared(self) -> Parameters:
        return {
            name: tensor
            for name, tensor in self.model.state_dict().items()
            if name.startswith(self.common)
        }


def unite(fed: Federation, spares: bool = False) -> None:
    """Those of one task, label set and shape go on from their mean, weighted by their samples; who has no company stays as it is. If
    it `spares` them, those who classify are told which classes they have between them, and leave open what they have none of."""
    kinds = fed.state.setdefault("kinds", {})
    if new := [c for c in fed.active if c not in kinds]:
        kinds |= dict(fed.call("kind_of", clients=new, quorum=0))
    known = [kinds.get(c) for c in fed.active]
    alike = [c for c, one in zip(fed.active, known, strict=True) if one and known.count(one) > 1]
    if alike:
        told = dict(fed.call("give", clients=alike))
        for client in [
            c
            for c, its in told.items()
            if kind(fed.infos[c].task, fed.infos[c].labels, its) != kinds[c]
        ]:
            fed.refuse(client, "give", "its parameters are not those of the kind it told")
            del told[client]
        groups = {
            one: {c: its for c, its in told.items() if kinds[c] == one}
            for one in {kinds[c] for c in told}
        }
        weights = {c: float(fed.infos[c].samples) for c in told}
        means = {
            one: mean_states(group, weights) for one, group in groups.items() if len(group) > 1
        }
        each: dict[str, dict[str, Value]] = {
            c: {"parameters": means[kinds[c]]} for c in told if kinds[c] in means
        }
        if spares:
            have = label_masks(fed, [c for c in each if fed.infos[c].has("single_label")])
            for c in have.keys() & each.keys():
                each[c]["had"] = (
                    torch.stack([have[other] for other in have if kinds[other] == kinds[c]])
                    .any(0)
                    .float()
                )
        if each:
            unjudge(fed.state, each)
            fed.call("take", clients=[c for c in each if c in fed.active], per_client=each)


def train_united(fed: Federation, how: str = "train", spares: bool = False) -> dict[str, float]:
    """Local epochs, after each of which but the last those alike go on from their mean; the last one's losses."""
    told: dict[str, float] = {}
    for epoch in range(fed.training.epochs):
        if epoch:
            unite(fed, spares)
        told = dict(fed.call(how, epoch=epoch))
    return told


def kind(task: str, labels: Sequence[str], parameters: Parameters) -> str:
    """Equal for those who may be averaged; empty where there are no parameters."""
    return short_hash((task, tuple(labels), shape_hash(parameters))) if parameters else ""
