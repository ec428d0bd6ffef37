"""FedAvg: federated averaging.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS 2017, https://arxiv.org/abs/1602.05629.

Clients train the shared model for their local epochs; the server averages the results by number
of samples. Clients of different architectures are averaged with those of the same architecture
only. Nothing of the paper is left out.
"""

from dataclasses import dataclass

from unalike.methods.averaging import Averaging


@dataclass
class FedAvg(Averaging):
    """Algorithm 1 of the paper; all of it is in `Averaging`."""
