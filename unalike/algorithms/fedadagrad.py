"""FedAdagrad: federated averaging with Adagrad at the server.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021, https://arxiv.org/abs/2003.00295.

The mean change of the clients' models is a gradient for the server (Algorithm 2, Adagrad's line:
v = v + Delta^2). `server_lr` is the paper's for CIFAR-10. Nothing is left out.
"""

from dataclasses import dataclass

from torch import Tensor

from unalike.methods.server_optimizer import AdaptiveServer, Decay, PositiveFloat


@dataclass
class FedAdagrad(AdaptiveServer):
    """Algorithm 2 with v = v + Delta^2.

    Args:
        server_lr: eta, the server's learning rate.
        beta1: decay of the first moment.
    """

    server_lr: PositiveFloat = 0.1
    beta1: Decay = 0.0

    def second_moment(self, second: Tensor, square: Tensor) -> Tensor:
        return second + square
