"""FedHeNN: different models learn the same similarities between public rows.

D. Makhija et al., "Architecture Agnostic Federated Learning for Neural Networks", 2022,
https://arxiv.org/abs/2202.07757.

Each round clients send the kernel (pairwise similarities) of their representations of some public
rows; local training pulls their own kernel towards the mean. docs/baselines.md says what is ours.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from unalike.core.algorithm import Algorithm
from unalike.core.federation import Federation
from unalike.core.operations import operation, query, sends
from unalike.core.program import ClientProgram
from unalike.core.signatures import Shape
from unalike.losses.kernels import cka
from unalike.methods.agreement import PeerRule, kernel_weights
from unalike.methods.public_data import blank_rows, check_batch, public_batch, public_batches


@dataclass
class FedHeNN(Algorithm):
    """Local loss + eta sqrt(round) (1 - CKA(mean kernel, own kernel)).

    Args:
        batch: public rows that are compared, others each round.
        eta: weight of the distance in the first round.
        robust: whether kernels that agree with nobody's are left out.
    """

    needs_public: ClassVar[bool] = True

    batch: int = 128
    eta: Annotated[float, Field(ge=0)] = 0.01
    robust: PeerRule = "never"

    def check(self, clients: int, public_rows: int) -> list[tuple[str, str]]:
        return check_batch(self.batch, public_rows)

    def serve(self, fed: Federation) -> Iterator[int]:
        for round in fed.rounds():
            rows = len(fed.public(self.batch).batches(round)[0])
            kernels = dict(fed.call("kernel", sizes={"rows": rows}))
            if kernels:
                mean = self.mean_kernel(fed, kernels)
                fed.log_metrics("train_loss", dict(fed.call("follow", kernel=mean)))
            yield round

    def mean_kernel(self, fed: Federation, kernels: dict[str, Tensor]) -> Tensor:
        """Mean over clients, without those that agree with nobody if `robust` says so."""
        if self.robust == "agreement":
            weights = kernel_weights(fed, kernels)
            fed.log_metrics("peer_weight", weights)
            kernels = {c: kernel for c, kernel in kernels.items() if weights[c] > 0}
        rows = list(kernels.values())
        return torch.stack([kernel.to(rows[0]) for kernel in rows]).mean(0)

    class Program(ClientProgram):
        algorithm: "FedHeNN"

        def compute_kernel(self) -> Tensor:
            """(n, n): cosine similarities of the representations of this round's rows."""
            z = self.model.represent(public_batch(self, public_batches(self, 0)[0]))
            return z @ z.mT

        @query
        @sends("rows")
        def kernel(self) -> Annotated[Tensor, Shape("rows", "rows")]:
            """(n, n): cosine similarities of the representations of this round's rows."""
            self.model.eval()
            with torch.no_grad():
                return self.compute_kernel()

        def blank_kernel(self) -> Tensor:
            rows = len(public_batches(self, 0)[0])
            return blank_rows(self, rows, rows)

        @operation
        def follow(self, kernel: Tensor) -> float:
            """The round's local epochs with the distance to the mean kernel (n, n) in the loss."""
            weight = self.algorithm.eta * self.round**0.5
            batches = -(-len(self.client.train) // self.training.batch_size)
            self.work += len(kernel) * self.training.epochs * batches

            def loss(x: Tensor | dict, y: Tensor) -> Tensor:
                own = self.compute_kernel()
                return self.task_loss(x, y) + weight * (1 - cka(own, kernel.to(own)))

            return self.learn(loss=loss)
