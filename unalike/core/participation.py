"""Who takes part in a round, when a round counts, and what becomes of those who fail. Knows nothing of what is asked or how it travels."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field

from unalike.base.errors import RunError
from unalike.base.randomness import stream
from unalike.base.settings import Settings

Share = Annotated[float, Field(ge=0, le=1)]


class FederationConfig(Settings):
    """`federation:` in a scenario."""

    participation: Annotated[float, Field(gt=0, le=1)] = (
        1.0  # share of the clients drawn for a round
    )
    dropout: Share = 0.0  # chance that a drawn client is gone for the round
    deadline: Annotated[float, Field(gt=0)] | None = (
        None  # simulated seconds a call may take; later replies are lost
    )
    quorum: Share = 0.5  # share of the called clients that must reply
    tick: Annotated[float, Field(ge=0)] = (
        0.0  # replies arrive at multiples of so many simulated seconds
    )
    evaluations: Annotated[int, Field(ge=1)] = 10  # points on the learning curves
    message_bytes: Annotated[int, Field(gt=0)] | None = None  # the largest message, either way
    round_bytes: Annotated[int, Field(gt=0)] | None = (
        None  # what a client may send in a round, all its replies together
    )

    @property
    def partial(self) -> bool:
        """Whether somebody may miss a round."""
        return self.participation < 1 or self.dropout > 0 or self.deadline is not None

    def places(self, clients: int) -> int:
        """How many of so many clients are drawn for a round, or visited at a time."""
        return max(1, round(self.participation * clients))

    def drawn(self, clients: Sequence[str], seed: int, round: int) -> list[str]:
        """Who takes part in a round, in their own order."""
        if self.participation == 1:
            return list(clients)
        picks = torch.randperm(len(clients), generator=stream(seed, "participation", round))[
            : self.places(len(clients))
        ]
        return [clients[i] for i in sorted(picks.tolist())]

    def drops(self, client: str, seed: int, round: int) -> bool:
        """Whether a client that was drawn is gone for the round."""
        if not self.dropout or not round:
            return False
        return (
            float(torch.rand((), generator=stream(seed, "dropout", round, client))) < self.dropout
        )

    def attended(
        self, clients: Sequence[str], seed: int, rounds: Iterable[int]
    ) -> dict[str, list[int]]:
        """The rounds in which each client is drawn and not gone: those it trains in, together or alone, if nothing fails."""
        drawn = {number: set(self.drawn(clients, seed, number)) for number in rounds}
        return {
            c: [
                number
                for number, there in drawn.items()
                if c in there and not self.drops(c, seed, number)
            ]
            for c in clients
        }


class QuorumError(RunError):
    """Too few clients replied. `passing`: there would have been enough but for those who may be back next time."""

    repeats = True  # rounds are drawn, and clients compute, as they did before: so does this, unless the world has changed

    def __init__(self, what: str, there: int, of: int, needed: int, failures: list["Failure"]):
        reasons: dict[str, list[str]] = {}
        for failure in failures:
            reasons.setdefault(failure.reason, []).append(failure.client)
        self.passing = there + sum(not failure.lasting for failure in failures) >= needed
        super().__init__(
            f"{what}: {there} of {of} clients replied, the quorum is {needed}. "
            + "; ".join(f"{', '.join(clients)}: {reason}" for reason, clients in reasons.items())
        )


@dataclass(frozen=True)
class Failure:
    client: str
    operation: str
    round: int
    reason: str
    lasting: bool = (
        True  # True: the client is left out for the rest of the run; False: for the round
    )

    def __str__(self) -> str:
        return f"{self.client} failed in {self.operation}, round {self.round}: {self.reason}"


class Replies(dict):
    """Replies by client; `failures` names who did not reply and why."""

    failures: dict[str, Failure]

    def __init__(self, replies: dict[str, Any], failures: dict[str, Failure] | None = None):
        super().__init__(replies)
        self.failures = failures or {}
