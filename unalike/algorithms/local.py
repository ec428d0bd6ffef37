"""Local training: every client trains alone on its own data.

The baseline against which every gain is measured. Clients train the round's local epochs on their
task; no parameters are sent.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from unalike.core.algorithm import Algorithm
from unalike.core.federation import Federation
from unalike.tasks import Task


@dataclass
class Local(Algorithm):
    """Each client trains alone; only the request to do so is sent."""

    supports_safeguard: ClassVar[bool] = True

    @classmethod
    def serves(cls, task: Task | type[Task]) -> bool:
        return not task.paired

    def serve(self, fed: Federation) -> Iterator[int]:
        for round in fed.rounds():
            fed.log_metrics("train_loss", dict(fed.call("train")))
            yield round
