"""Arguments of operations may declare axes by name, as replies do."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import torch
from torch import Tensor

from unalike.base.errors import Refusal
from unalike.core.algorithm import Algorithm
from unalike.core.operations import operation
from unalike.core.program import ClientProgram
from unalike.core.runtime import build_runtime
from unalike.core.signatures import Shape


@dataclass
class Prototypes(Algorithm):
    width: int = 3

    class Program(ClientProgram):
        @operation
        def receive(self, prototypes: Annotated[Tensor, Shape("labels", "width")]) -> float:
            return float(prototypes.sum())


def test_an_argument_with_named_axes_is_checked_by_the_client(toys):
    runtime = build_runtime(toys.client("a"), Prototypes(), toys.training(), 0)
    labels = len(toys.client("a").task.labels)
    assert runtime.perform("receive", 1, 0, {"prototypes": torch.ones(labels, 3)}) == 3 * labels
    with pytest.raises(Refusal, match=r"shape \(4, 2\).*\(4, 3\)"):
        runtime.perform("receive", 1, 1, {"prototypes": torch.ones(labels, 2)})
