"""FedAdam: federated averaging with Adam at the server.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021, https://arxiv.org/abs/2003.00295.

The mean change of the clients' models is a gradient for the server (Algorithm 2, Adam's line:
v = beta2 v + (1 - beta2) Delta^2). `server_lr` is the paper's for CIFAR-10. Nothing is left out.
"""

from dataclasses import dataclass

from torch import Tensor

from unalike.methods.server_optimizer import AdaptiveServer


@dataclass
class FedAdam(AdaptiveServer):
    """Algorithm 2 with v = beta2 v + (1 - beta2) Delta^2."""

    def second_moment(self, second: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * second + (1 - self.beta2) * square
