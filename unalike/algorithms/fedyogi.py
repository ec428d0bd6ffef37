"""FedYogi: federated averaging with Yogi at the server.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021, https://arxiv.org/abs/2003.00295.

The mean change of the clients' models is a gradient for the server (Algorithm 2, Yogi's line:
v = v - (1 - beta2) Delta^2 sign(v - Delta^2)). `server_lr` is the paper's for CIFAR-10. Nothing
is left out.
"""

from dataclasses import dataclass

from torch import Tensor

from unalike.methods.server_optimizer import AdaptiveServer


@dataclass
class FedYogi(AdaptiveServer):
    """Algorithm 2 with v = v - (1 - beta2) Delta^2 sign(v - Delta^2)."""

    def second_moment(self, second: Tensor, square: Tensor) -> Tensor:
        return second - (1 - self.beta2) * square * (second - square).sign()
