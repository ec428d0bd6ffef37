"""FedProto: clients exchange class prototypes instead of parameters.

Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022,
https://arxiv.org/abs/2105.00243.

A prototype is the mean feature of a client's samples of a class (eq. 3). The server averages those
of each class, weighted by samples (eq. 6; `mean: uniform` is the authors' code), and clients
minimise their task's loss + lambda times the distance to them (eq. 7). Features of unlike models
are projected to a common width. Left out: prediction by the nearest prototype; heads predict.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import NonNegativeFloat

from unalike.core.federation import Federation, Replies
from unalike.methods.prototypes import PrototypeMethod, PrototypeProgram, uploads_by_label


@dataclass
class FedProto(PrototypeMethod):
    """Averaged prototypes as targets of the features.

    Args:
        lam: lambda, the pull of features towards the prototypes.
        mean: weight of a client in a prototype: its "samples" of the class, or the same for all
            ("uniform").
    """

    lam: NonNegativeFloat = 1.0
    mean: Literal["samples", "uniform"] = "samples"

    def aggregate(self, fed: Federation, replies: Replies) -> None:
        tables = fed.state.setdefault("prototypes", {})
        for task, uploads in uploads_by_label(fed, replies).items():
            table = tables.setdefault(task, {})
            for label, sent in uploads.items():
                rows = torch.stack([row.to(sent[0][0]) for row, _ in sent])
                counts = [count if self.mean == "samples" else 1.0 for _, count in sent]
                weights = torch.tensor(counts).to(rows)
                table[label] = weights @ rows / weights.sum()

    class Program(PrototypeProgram):
        algorithm: "FedProto"
