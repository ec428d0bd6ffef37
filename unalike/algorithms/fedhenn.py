"""FedHeNN (Makhija 2022): unlike models learn to find the same public rows alike, by the mean of everybody's kernel.

Each round everyone tells how alike it finds some rows of the public set, two by two; while it trains on its labels, its own kernel is
drawn to the mean of all. docs/baselines.md says what is ours in it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from unalike.core.algorithm import Algorithm
from unalike.core.federation import Federation
from unalike.core.operations import operation, query, sends
from unalike.core.signatures import Shape
from unalike.losses.kernels import cka
from unalike.methods.public_data import PublicDataProgram, check_batch


@dataclass
class FedHeNN(Algorithm):
    """Local loss + eta sqrt(round) (1 - CKA(mean kernel, own kernel))."""

    needs_public: ClassVar[bool] = True

    batch: int = 128  # public rows that are compared, others each round
    eta: float = 0.01  # of the distance in the first round

    def check(self, clients: int, public_rows: int) -> list[tuple[str, str]]:
        negative = [("eta", f"must be at least 0, got {self.eta:g}.")] if not self.eta >= 0 else []
        return negative + check_batch(self.batch, public_rows)

    def serve(self, fed: Federation) -> Iterator[int]:
        for round in fed.rounds():
            if kernels := list(
                fed.call(
                    "kernel", sizes={"rows": len(fed.public(self.batch).batches(round)[0])}
                ).values()
            ):
                mean = torch.stack([kernel.to(kernels[0]) for kernel in kernels]).mean(0)
                fed.log_metrics("train_loss", dict(fed.call("follow", kernel=mean)))
            yield round

    class Program(PublicDataProgram):
        algorithm: "FedHeNN"

        @query
        @sends("rows")
        def kernel(self) -> Annotated[Tensor, Shape("rows", "rows")]:
            """(l, l): cosines of the representations of this round's rows."""
            self.model.eval()
            with torch.no_grad():
                return self.alike()

        def blank_kernel(self) -> Tensor:
            return self.blank(rows := len(self.walk(0)[0]), rows)

        @operation
        def follow(self, kernel: Tensor) -> float:
            """The round's local epochs, held near the kernel of all."""
            weight = self.algorithm.eta * self.round**0.5
            self.work += (
                len(kernel)
                * self.training.epochs
                * -(-len(self.client.train) // self.training.batch_size)
            )

            def loss(x: Tensor | dict, y: Tensor) -> Tensor:
                own = self.alike()
                return self.task_loss(x, y) + weight * (1 - cka(own, kernel.to(own)))

            return self.learn(loss=loss)

        def alike(self) -> Tensor:
            z = self.model.represent(self.public_rows(self.walk(0)[0]))
            return z @ z.mT
