"""LG-FedAvg: every client keeps its own body, and the head is averaged.

Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global
Representations", 2020, https://arxiv.org/abs/2001.01523.

The opposite of FedPer: the encoder and a projection to a common width are local, so architectures
may differ; the global part on top, here the head, is averaged among clients with the same task and
labels (Algorithm 1). Left out: auxiliary losses of the local representation (self-supervised,
adversarial) and the ensemble for new clients.
"""

from dataclasses import dataclass
from typing import ClassVar

from unalike.methods.averaging import Averaging, AveragingProgram
from unalike.methods.common_width import CommonWidthProgram
from unalike.training.loop import Positive


@dataclass
class LGFedAvg(Averaging):
    """Heads on features of a common width are averaged.

    Args:
        width: of the head's input, the same for all clients.
    """

    personalised: ClassVar[bool] = True
    needs_head: ClassVar[bool] = True

    width: Positive = 512

    def shares(self, name: str) -> bool:
        return name.startswith("head.")

    class Program(CommonWidthProgram, AveragingProgram):
        algorithm: "LGFedAvg"
