"""Which clients take part in a round, how many must reply, and what is known of failures."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import torch
from pydantic import Field

from unalike.base.errors import RunError
from unalike.base.randomness import stream
from unalike.base.settings import Settings

Share = Annotated[float, Field(ge=0, le=1)]
Reply = TypeVar("Reply")


class FederationConfig(Settings):
    """Participation, dropout, deadlines and limits: `federation:` in a scenario.

    Args:
        participation: share of the clients sampled for a round.
        dropout: probability that a sampled client is unreachable for the round.
        deadline: seconds of the engine's clock that a call may take; later replies are lost. None:
            no limit.
        quorum: share of the called clients that must reply.
        retries: times a client that failed is asked again, in the rounds that follow; then it is
            out.
        tick: replies arrive at multiples of so many simulated seconds.
        evaluations: points on the learning curves.
        evaluation_clients: clients that are measured, at most, drawn by the seed; None: all, and
            100 of lazy clients.
        message_bytes: the largest message in bytes, either way; None: 2 GiB.
        round_bytes: bytes that a client may send in a round, all its replies together; None: no
            limit.
    """

    participation: Annotated[float, Field(gt=0, le=1)] = 1.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    deadline: Annotated[float, Field(gt=0)] | None = None
    quorum: Share = 0.5
    retries: Annotated[int, Field(ge=0)] = 2
    tick: Annotated[float, Field(ge=0)] = 0.0
    evaluations: Annotated[int, Field(ge=1)] = 10
    evaluation_clients: Annotated[int, Field(ge=1)] | None = None
    message_bytes: Annotated[int, Field(gt=0)] | None = None
    round_bytes: Annotated[int, Field(gt=0)] | None = None

    @property
    def partial(self) -> bool:
        """Whether a client may miss a round."""
        return self.participation < 1 or self.dropout > 0 or self.deadline is not None

    def clients_per_round(self, clients: int) -> int:
        """How many of so many clients are sampled for a round, or visited at a time."""
        return max(1, round(self.participation * clients))

    def sample(self, clients: Sequence[str], seed: int, round: int) -> list[str]:
        """The clients of a round, in their own order."""
        if self.participation == 1:
            return list(clients)
        order = torch.randperm(len(clients), generator=stream(seed, "participation", round))
        chosen = order[: self.clients_per_round(len(clients))]
        return [clients[i] for i in sorted(chosen.tolist())]

    def drops_out(self, client: str, seed: int, round: int) -> bool:
        """Whether a sampled client is unreachable for the round."""
        if not self.dropout or not round:
            return False
        chance = torch.rand((), generator=stream(seed, "dropout", round, client))
        return float(chance) < self.dropout

    def attended_rounds(
        self, clients: Sequence[str], seed: int, rounds: Iterable[int]
    ) -> dict[str, list[int]]:
        """The rounds in which each client is sampled and reachable.

        These are the rounds it trains in, federated or locally, if nothing fails.
        """
        attended: dict[str, list[int]] = {client: [] for client in clients}
        for number in rounds:
            for client in self.sample(clients, seed, number):
                if not self.drops_out(client, seed, number):
                    attended[client].append(number)
        return attended


@dataclass(frozen=True)
class Failure:
    """Why a client did not reply, or why its reply was not used.

    Args:
        client: its id.
        operation: what was called.
        round: when.
        reason: in one sentence.

    Attributes:
        lasting: the client is left out for the rest of the run, unless it is asked again
            (`Federation.ask_again`); otherwise for the round.
        traceback: of a bug in the operation, where clients are simulated; empty for mistakes that
            the reason explains. Across organisations a traceback never leaves its client.
    """

    client: str
    operation: str
    round: int
    reason: str
    lasting: bool = True
    traceback: str = field(default="", compare=False)

    def __str__(self) -> str:
        where = f"{self.operation}, round {self.round}"
        return f"{self.client} failed in {where}: {self.explanation}"

    @property
    def explanation(self) -> str:
        """The reason and, of a bug, file and line."""
        return f"{self.reason} ({self.location})" if self.location else self.reason

    @property
    def location(self) -> str:
        """File, line and function of the last frame of the traceback; empty without one."""
        frames = re.findall(r'^ *File "(.*)", line (\d+), in (.*)$', self.traceback, re.MULTILINE)
        return "{}, line {}, in {}".format(*frames[-1]) if frames else ""

    def bug_report(self) -> dict[str, str]:
        """What is logged of a bug: `location` and `traceback`; nothing of a recognised mistake."""
        if not self.traceback:
            return {}
        return {"location": self.location, "traceback": self.traceback}

    def to_list(self) -> list[Any]:
        """For checkpoints; `Failure(*values)` takes it back. The traceback is in the log only."""
        return [self.client, self.operation, self.round, self.reason, self.lasting]


def one_line(reason: object) -> str:
    """A client's words in one line of at most 500 characters that can be printed."""
    text = " ".join(str(reason)[:2000].split())
    return "".join(character for character in text if character.isprintable())[:500]


class QuorumError(RunError):
    """Too few clients replied.

    Args:
        where: the call that failed.
        replied: number of clients that did reply.
        called: number of clients that were called.
        needed: number that the quorum asks for.
        failures: why each of the others did not reply.

    Attributes:
        passing: enough would have replied but for clients that may be back in the next round.
        repeats: sampling and training are deterministic, so a resumed run fails the same way
            unless the cause was external.
    """

    repeats = True

    def __init__(self, where: str, replied: int, called: int, needed: int, failures: list[Failure]):
        clients_by_reason: dict[str, list[str]] = {}
        for failure in failures:
            clients_by_reason.setdefault(failure.explanation, []).append(failure.client)
        absent = sum(not failure.lasting for failure in failures)
        self.passing = replied + absent >= needed
        reasons = [f"{', '.join(names)}: {why}" for why, names in clients_by_reason.items()]
        super().__init__(
            f"{where}: {replied} of {called} clients replied, the quorum is {needed}. "
            + "; ".join(reasons)
        )


class Replies(dict[str, Reply]):
    """Replies by client.

    Args:
        replies: what clients answered, by id.

    Attributes:
        failures: by client, why those that were called and are not here did not reply.
    """

    failures: dict[str, Failure]

    def __init__(self, replies: Mapping[str, Reply], failures: dict[str, Failure] | None = None):
        super().__init__(replies)
        self.failures = failures or {}
