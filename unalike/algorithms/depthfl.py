"""DepthFL: clients train the first layers of one model, as deep as they can, with several exits.

Kim et al., "DepthFL: Depthwise Federated Learning for Heterogeneous Clients", ICLR 2023,
https://openreview.net/forum?id=pf8RIZTMU58.

A client with d exits minimises the sum of their cross entropies and 1 / (d - 1) times the sum over
pairs of KL(p_j || p_i), where exit i learns from exit j (eq. 2). The server averages every tensor
over the clients that have it; the mean of all exits predicts. Left out: FedDyn's regulariser, which
the paper adds to the local loss.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from unalike.methods.early_exits import EarlyExitMethod, EarlyExitProgram, kl


@dataclass
class DepthFL(EarlyExitMethod):
    """All exits learn the labels, and from each other."""

    def exits_loss(self, program: EarlyExitProgram, outputs: list[Tensor], y: Tensor) -> Tensor:
        loss = torch.stack([program.error(output, y) for output in outputs]).sum()
        for i, student in enumerate(outputs):
            for j, teacher in enumerate(outputs):
                if i != j:
                    loss = loss + kl(teacher.detach(), student) / (len(outputs) - 1)
        return loss
