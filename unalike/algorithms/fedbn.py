"""FedBN: everything is averaged but batch normalisation.

Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021,
https://arxiv.org/abs/2102.07623.

Weights, biases and statistics of batch-norm layers stay with their client (Algorithm 1); the rest
is federated averaged. With models that have no batch normalisation it is FedAvg. Nothing of the
paper is left out.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch.nn.modules.batchnorm import _BatchNorm

from unalike.base.types import Parameters
from unalike.methods.averaging import Averaging, AveragingProgram


@dataclass
class FedBN(Averaging):
    """Federated averaging of all layers but batch norm."""

    personalised: ClassVar[bool] = True

    class Program(AveragingProgram):
        algorithm: "FedBN"

        def shared(self) -> Parameters:
            norms = [
                f"{name}."
                for name, layer in self.model.named_modules()
                if isinstance(layer, _BatchNorm)
            ]
            state = self.model.state_dict()
            return {n: tensor for n, tensor in state.items() if not n.startswith(tuple(norms))}
