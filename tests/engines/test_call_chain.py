"""A reader follows one local training step from the host to the loss through few files."""

import sys
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import nn

from unalike.algorithms import FedAvg
from unalike.core.client import Client
from unalike.core.runtime import build_runtime
from unalike.engines.host import Host
from unalike.engines.store import Store
from unalike.tasks import Classification
from unalike.training.loop import Training

MAX_CROSSINGS = 6
chains: list[list[str]] = []


@dataclass(frozen=True)
class RecordedClassification(Classification):
    """Classification that records which modules are on the stack, outermost first."""

    def loss(self, output, y):
        modules = []
        frame = sys._getframe(1)
        while frame is not None:
            modules.append(frame.f_globals["__name__"])
            frame = frame.f_back
        chains.append(modules[::-1])
        return super().loss(output, y)


def test_a_step_of_fedavg_crosses_at_most_six_files_from_the_host_to_the_loss(tmp_path):
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    y = torch.arange(8) % 2
    client = Client("a", partial(nn.Linear, 3, 4), RecordedClassification(2), train=(x, y))
    build = partial(build_runtime, algorithm=FedAvg(), training=Training(batch_size=4), seed=0)
    host = Host([client], build, Store(tmp_path))
    request = {"number": 1, "round": 1, "turn": 0}
    start = host.handle("a", {**request, "operation": "begin", "body": {}})["body"]
    chains.clear()
    body = {"parameters": start}
    host.handle("a", {**request, "number": 2, "operation": "update", "body": body})

    ours = [module for module in chains[0] if module.startswith("unalike.")]
    ours = [*ours[ours.index("unalike.engines.host") :], "unalike.tasks.classification"]
    crossings = [f"{caller} -> {callee}" for caller, callee in pairwise(ours) if caller != callee]
    assert len(chains) == 2, "expected one call of the loss for each of the two batches"
    assert len(crossings) <= MAX_CROSSINGS, "\n".join(crossings)
