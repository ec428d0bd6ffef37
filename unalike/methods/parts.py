"""Parts: steps that may be added to the rounds of a method, each in a file of its own.

A part has a server half, a `Part`, and often a client half, a class derived from `ClientProgram`
alone, from which the method's `Program` inherits next to others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from unalike.core.algorithm import Algorithm
from unalike.core.federation import Federation
from unalike.core.program import ClientProgram
from unalike.core.safeguard import NOT_CROSS_VALIDATED


class Part:
    """The server's half of a part. It overrides the hooks that it needs; all of them do nothing.

    A round is: `before_local`, local epochs with `between_epochs` after all but the last,
    `after_local`, the method's own exchange, `after_exchange`. After the last round comes `finish`.
    """

    acts_between_epochs = False  # if so, each local epoch is a call of its own

    def before_local(self, fed: Federation) -> None:
        """Before the local epochs of a round."""

    def between_epochs(self, fed: Federation) -> None:
        """After each local epoch but the last."""

    def after_local(self, fed: Federation) -> None:
        """After the local epochs, once clients have been evaluated."""

    def after_exchange(self, fed: Federation) -> None:
        """At the end of a round."""

    def finish(self, fed: Federation) -> None:
        """After the last round."""


class PartList(Part):
    """Several parts as one, which act in this order."""

    def __init__(self, parts: Sequence[Part]):
        self.parts = parts
        self.acts_between_epochs = any(part.acts_between_epochs for part in parts)

    def before_local(self, fed: Federation) -> None:
        for part in self.parts:
            part.before_local(fed)

    def between_epochs(self, fed: Federation) -> None:
        for part in self.parts:
            part.between_epochs(fed)

    def after_local(self, fed: Federation) -> None:
        for part in self.parts:
            part.after_local(fed)

    def after_exchange(self, fed: Federation) -> None:
        for part in self.parts:
            part.after_exchange(fed)

    def finish(self, fed: Federation) -> None:
        for part in self.parts:
            part.finish(fed)


@dataclass
class TakesParts(Algorithm):
    """A method whose rounds have the hooks of parts. Its `serve` calls them on `part_list()`."""

    def parts(self) -> list[Part]:
        """Parts that are added to the rounds, in the order in which they act."""
        return []

    def part_list(self) -> PartList:
        """The parts as one."""
        return PartList(self.parts())

    def finish(self, fed: Federation) -> None:
        self.part_list().finish(fed)


def train_locally(
    fed: Federation, operation: str = "train", part: Part | None = None
) -> dict[str, float]:
    """The local epochs of a round. Returns each client's loss, of the last call.

    Args:
        operation: what clients do; takes `epoch` to do that epoch only.
        part: acts between epochs, if it wants to.
    """
    if part is None or not part.acts_between_epochs:
        return dict(fed.call(operation))
    losses: dict[str, float] = {}
    for epoch in range(fed.training.epochs):
        if epoch > 0:
            part.between_epochs(fed)
        losses = dict(fed.call(operation, epoch=epoch))
    return losses


def drop_invalid_replicas(program: ClientProgram) -> None:
    """Drop the safeguard's fold replicas of a client that received something derived from its own
    labels: they know the labels that they would be tested on, so it cannot be cross-validated."""
    if program.memory.get(NOT_CROSS_VALIDATED):
        program.fold_replicas = []
