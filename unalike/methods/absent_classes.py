"""Masking of absent classes in local training with averaged heads.

Classes that a client has no sample of, but another client of its group has, are left out of the
softmax of its local loss.

Otherwise they are negatives for every sample of the client, which unlearns what the averaged head
knows of them. After FedRS (Li and Zhan 2021).
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from unalike.base.message import Value
from unalike.core.federation import Federation
from unalike.core.operations import query
from unalike.core.program import ClientProgram
from unalike.methods.averaging import LabelMask, label_masks

MASK = "open"  # in a program's memory: the classes to mask


class AbsentClassProgram(ClientProgram):
    """Masks absent classes in the local loss, where its method has `mask_absent_classes` set."""

    algorithm: Any

    @query
    def present(self) -> LabelMask:
        """(labels,): 1 for each label that the client has a sample of."""
        if not self.algorithm.mask_absent_classes:
            raise ValueError("a client sends its classes only with mask_absent_classes")
        return self.client.label_mask.float()

    def receive_group_classes(self, had: Tensor) -> None:
        """Mask the classes of the group, (labels,), that this client has no sample of."""
        own = self.client.label_mask
        if not self.algorithm.mask_absent_classes:
            raise ValueError(
                "got the classes of its group, but this client masks no absent classes"
            )
        if had.shape != own.shape:
            raise ValueError(
                f"expected a class mask of shape {tuple(own.shape)}, got {tuple(had.shape)}"
            )
        self.memory[MASK] = had.cpu().bool() & ~own

    @cached_property
    def masked_classes(self) -> Tensor:
        """(labels,), True for masked classes. Changed in place, for CUDA graphs."""
        labels = len(self.client.task.labels)
        return torch.zeros(labels, dtype=torch.bool, device=self.client.device)

    def learn(self, *args: Any, **kwargs: Any) -> float:
        if MASK in self.memory:
            self.masked_classes.copy_(self.memory[MASK])
        return super().learn(*args, **kwargs)

    def error(self, output: Tensor, y: Tensor) -> Tensor:
        if self.algorithm.mask_absent_classes and self.client.task.single_label:
            output = output.masked_fill(self.masked_classes, -torch.inf)
        return super().error(output, y)


def classes_in_groups(
    fed: Federation, clients: list[str], groups: dict[str, str]
) -> dict[str, dict[str, Value]]:
    """For each classifier among the clients: {"had": (labels,), 1 for classes of its group}.

    Classes of clients that are not active now count, too: the head knows them. Each client is asked
    once.
    """
    classifiers = [c for c in clients if fed.infos[c].has("single_label")]
    present = label_masks(fed, classifiers)
    arguments: dict[str, dict[str, Value]] = {}
    for client in classifiers:
        if client in present:
            members = [present[c] for c in present if groups[c] == groups[client]]
            arguments[client] = {"had": torch.stack(members).any(0).float()}
    return arguments
