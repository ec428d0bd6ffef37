"""Local training: everybody alone. The reference every gain is measured against."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from unalike.core.algorithm import Algorithm
from unalike.core.federation import Federation
from unalike.tasks import Task


@dataclass
class Local(Algorithm):
    """Each client trains on its own data; nothing but the order to do so travels."""

    supports_safeguard: ClassVar[bool] = True

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return not task.paired

    def serve(self, fed: Federation) -> Iterator[int]:
        for round in fed.rounds():
            fed.log_metrics("train_loss", dict(fed.call("train")))
            yield round
