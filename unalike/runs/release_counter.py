"""Counts how often the privacy mechanism was used on each client's data."""

from typing import Any

from unalike.core.federation import Federation
from unalike.core.privacy import Privacy, protects, releases
from unalike.core.program import ClientProgram


class ReleaseCounter:
    """Counts releases of replies to the operations of a method.

    Args:
        program: the client half of the method, whose operations say what they release (`@sends`).
        privacy: the run's privacy, None where nothing is protected.
    """

    def __init__(self, program: type[ClientProgram], privacy: Privacy | None):
        self.program = program
        self.secret = privacy is not None and privacy.entropy == "secret"
        self.by_operation: dict[str, int] = {}  # releases in the last reply to each operation

    def count(self, operation: str, answer: dict[str, Any]) -> int:
        """Return how many releases an answer is.

        A failure may have come of the data, or the reply may still be on its way: it counts as
        much as the last reply to that operation.
        """
        sends = getattr(getattr(self.program, operation), "sends", {})
        if "failure" in answer:
            return max(1, self.by_operation.get(operation, 1)) if protects(sends) else 0
        self.by_operation[operation] = releases(answer.get("body"), sends)
        return self.by_operation[operation]

    def count_repeated(self, fed: Federation) -> None:
        """Count what clients computed again because their process died.

        With secret noise the second reply is another release; seeded noise is the same again.
        """
        while self.secret and fed.engine.repeated:
            client, operation = fed.engine.repeated.pop()
            count = self.by_operation.get(operation, 0)
            if count:
                fed.release(client, count)
