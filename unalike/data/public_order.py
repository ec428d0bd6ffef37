"""The order in which all clients go through the public set."""

from dataclasses import dataclass

import torch
from torch import Tensor

from unalike.base.errors import UserError
from unalike.base.randomness import stream
from unalike.training.batching import batches


@dataclass(frozen=True)
class PublicOrder:
    """`rows` public samples in batches, shuffled anew each round and epoch, alike for everyone."""

    rows: int
    batch: int
    seed: int

    def __post_init__(self) -> None:
        if self.rows < self.batch:
            raise UserError(
                f"the public set has {self.rows} rows, fewer than a batch of {self.batch}; "
                "lower algorithm.batch or give a larger public set"
            )

    def batches(self, round: int, epoch: int = 0, most: int | None = None) -> list[Tensor]:
        """Row numbers of each batch of a pass.

        Args:
            most: no further batches once they have so many rows; None: all rows.
        """
        drawn = list(batches(self.rows, self.batch, stream(self.seed, "public", round, epoch)))
        return drawn if most is None else drawn[: -(-most // self.batch)]

    def __len__(self) -> int:
        return len(list(batches(self.rows, self.batch, torch.Generator())))
