"""FedPer: the body is averaged, every client keeps its own head.

Arivazhagan et al., "Federated Learning with Personalization Layers", 2019,
https://arxiv.org/abs/1912.00818.

Base layers are federated averaged (Algorithm 1 of the paper), personalisation layers (K_P = 1
block, here the head) never leave a client. Body and head are trained together. Tasks and labels may
differ among clients. Nothing of the paper is left out.
"""

from dataclasses import dataclass

from unalike.methods.personal import SharedBody


@dataclass
class FedPer(SharedBody):
    """Algorithms 1 and 2; all of it is in `SharedBody`."""
