"""The clients as the server sees them: whom it can call, what came back and what is remembered. Knows nothing of methods."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from unalike.client import VERSION, Card
from unalike.data.public import PublicOrder
from unalike.ledger import FREE, Ledger
from unalike.message import Value, broken
from unalike.randomness import stream
from unalike.training import Training

Share = Annotated[float, Field(ge=0, le=1)]


class Terms(BaseModel):
    """Who takes part in a round and when a round counts; `federation:` in a scenario."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    participation: Annotated[float, Field(gt=0, le=1)] = 1.0     # share of the clients drawn for a round
    dropout: Share = 0.0                                         # chance that a drawn client is gone for the round
    deadline: Annotated[float, Field(gt=0)] | None = None        # simulated seconds a call may take; later replies are lost
    quorum: Share = 0.5                                          # share of the called clients that must reply
    evaluations: Annotated[int, Field(ge=1)] = 10                # points on the learning curves


    @property
    def partial(self) -> bool:
        """Whether somebody may miss a round."""
        return self.participation < 1 or self.dropout > 0 or self.deadline is not None


class QuorumError(RuntimeError):
    """Too few clients replied."""


@dataclass(frozen=True)
class Failure:
    client: str
    operation: str
    round: int
    reason: str
    lasting: bool = True         # True: the client is left out for the rest of the run; False: for the round

    def __str__(self) -> str:
        return f"{self.client} failed in {self.operation}, round {self.round}: {self.reason}"


class Replies(dict):
    """Replies by client; `failures` names who did not reply and why."""

    failures: dict[str, Failure]

    def __init__(self, replies: dict[str, Any], failures: dict[str, Failure] | None = None):
        super().__init__(replies)
        self.failures = failures or {}


@dataclass(frozen=True)
class Arrival:
    """A reply as an engine delivers it: `at` is the engine's clock in seconds, `size` the bytes it has (or would have) encoded."""

    client: str
    at: float
    size: int
    reply: dict[str, Any]


class Engine(Protocol):
    """What carries calls."""

    now: float                                 # seconds; the server puts it back where nobody waits for the late

    def cards(self) -> dict[str, Card]: ...
    def send(self, messages: dict[str, dict[str, Value]]) -> dict[str, int]: ...      # sizes in bytes
    def receive(self, numbers: set[int] | None = None) -> list[Arrival]: ...           # all of the next instant, to these messages
    def pending(self) -> list[dict[str, Any]]: ...                                     # replies computed but not delivered
    def save(self, round: int) -> None: ...
    def load(self, round: int, now: float, pending: list[dict[str, Any]]) -> None: ...
    def close(self) -> None: ...


Messages = dict[str, dict[str, Value]]


@dataclass
class Federation:
    """Clients behind an engine, with what the server remembers of the run in `state`."""

    engine: Engine
    training: Training = field(default_factory=Training)
    terms: Terms = field(default_factory=Terms)
    seed: int = 0
    record: Callable[..., None] = lambda event, **facts: None
    evaluator: Callable[["Federation"], Replies] | None = None
    guarded: bool = False           # clients keep shadows (safeguard.py): what is sent must let them do the same as their client

    def __post_init__(self) -> None:
        self.cards = self.engine.cards()
        for card in self.cards.values():
            if card.version != VERSION:
                raise ValueError(f"client {card.id} speaks version {card.version} of the protocol, this server {VERSION}")
        rows = {card.id: card.public_rows for card in self.cards.values() if card.public is not None}
        if len(set(rows.values())) > 1:
            raise ValueError(f"clients hold public sets of different length: {rows}; row i must be the same thing for everyone")
        prints: dict[tuple, str] = {}
        for card in self.cards.values():
            if card.public is not None and prints.setdefault((card.modalities, card.public_shape), card.public) != card.public:
                raise ValueError(f"client {card.id} holds another public set than others of its kind; row i must be the same for everyone")
        self.public_rows = next(iter(rows.values()), 0)
        self.state: dict[str, Any] = {}
        self.ledger = Ledger()
        self.round = 0                              # the round under way; 0 before the first
        self.finished = 0                           # the last finished one
        self.clock = 0.0                            # simulated seconds
        self.numbered = 0                           # messages sent so far
        self.turns: dict[tuple[int, str, str], int] = {}      # how often a client was sent an operation this round: names its randomness
        self.quarantined: dict[str, Failure] = {}   # out for the rest of the run
        self.failures: list[Failure] = []
        self.absent: set[str] = set()               # out for this round
        self.drawn: list[str] = list(self.cards)

    # who is there

    @property
    def everyone(self) -> list[str]:
        """All clients but the quarantined ones, drawn for this round or not."""
        return [c for c in self.cards if c not in self.quarantined]

    @property
    def here(self) -> list[str]:
        """Clients drawn for this round that have not failed in it."""
        return [c for c in self.drawn if c not in self.quarantined and c not in self.absent]

    def public(self, batch: int) -> PublicOrder:
        """The public set in batches; the order belongs to the round and is the same for server and clients."""
        return PublicOrder(self.public_rows, batch, self.seed)

    def rounds(self) -> Iterator[int]:
        """Round numbers from the first unfinished one; draws who takes part in each."""
        for number in range(self.finished + 1, self.training.rounds + 1):
            self.begin(number)
            yield number

    def begin(self, number: int) -> None:
        self.round, self.absent, self.turns = number, set(), {}
        order = list(self.cards)
        if self.terms.participation < 1:
            count = max(1, round(self.terms.participation * len(order)))
            picks = torch.randperm(len(order), generator=stream(self.seed, "participation", number))[:count]
            order = [order[i] for i in sorted(picks.tolist())]
        self.drawn = order

    # calling them

    def call(self, operation: str, *, each: Messages | None = None, clients: list[str] | None = None,
             quorum: float | None = None, **same: Value) -> Replies:
        """One operation on many clients: `same` for all, `each` what differs. Replies come in the order of the cards.

        Without `clients` or `each` it goes to everyone who is here. Who fails is named in `failures` and left out; fewer
        replies than the quorum asks for is an error.
        """
        chosen = clients if clients is not None else self.here if each is None else [c for c in each if c in set(self.here)]
        chosen = [c for c in chosen if c not in self.quarantined]
        failures = {c: Failure(c, operation, self.round, "dropped out", lasting=False)
                    for c in chosen if clients is None and self._drops(c)}
        chosen = [c for c in chosen if c not in failures]
        start = self.engine.now
        replies: dict[str, Value] = {}
        waiting = self._send(operation, {c: {**same, **(each or {}).get(c, {})} for c in chosen})
        while waiting:
            for arrival in self.engine.receive(waiting):
                waiting.discard(arrival.reply["number"])
                got = self._open(arrival, operation, start)
                if isinstance(got, Failure):
                    failures[arrival.client] = got
                else:
                    replies[arrival.client] = got
        lasts = 0.0 if operation in FREE else math.inf if self.terms.deadline is None else self.terms.deadline
        self.engine.now = min(self.engine.now, start + lasts)
        self.clock = max(self.clock, self.engine.now)
        for failure in failures.values():
            self._fail(failure)
        needed = math.ceil((self.terms.quorum if quorum is None else quorum) * (len(replies) + len(failures)) - 1e-9)
        if len(replies) < needed:
            raise QuorumError(f"{operation}, round {self.round}: {len(replies)} of {len(replies) + len(failures)} clients replied, "
                              f"the quorum is {needed}. " + "; ".join(f"{f.client}: {f.reason}" for f in failures.values()))
        return Replies({c: replies[c] for c in self.cards if c in replies}, failures)

    def drive(self, operation: str, first: Callable[[str], dict[str, Value] | None],
              then: Callable[[Replies], Messages]) -> Iterator[int]:
        """The asynchronous form: nobody waits. `first(client)` gives each client's first message, `then(replies)` gets all
        replies of one instant and returns the next messages, to whom it likes; the end is when no message is under way.

        Yields the number of each instant: a method that yields it on lets the run be saved there, messages under way included.
        """
        self.begin(1)
        self.round = 0
        if not self.state.get("driving"):
            self._send(operation, {c: message for c in self.here if (message := first(c)) is not None})
            self.state["driving"] = True
        while self.state["driving"]:
            arrivals = self.engine.receive()
            if not arrivals:
                break
            self.round, self.turns = self.finished + 1, {}
            self.clock = self.engine.now
            got = {a.client: self._open(a, operation, a.at) for a in arrivals}
            for arrival in arrivals:
                self.record("arrival", at=self.clock, client=arrival.client, round=self.round)
            failures = {c: f for c, f in got.items() if isinstance(f, Failure)}
            for failure in failures.values():
                self._fail(failure)
            onward = then(Replies({c: g for c, g in got.items() if c not in failures}, failures))
            self._send(operation, {c: m for c, m in onward.items() if c not in self.quarantined})
            yield self.round
        self.state["driving"] = False

    def evaluate(self, when: str = "end") -> Replies | None:
        """Everyone's metrics, recorded; only in the rounds that are to be points of the learning curves."""
        every = max(1, self.training.rounds // self.terms.evaluations)
        if self.evaluator is None or (self.round % every and self.round != self.training.rounds and self.round != 1):
            return None
        replies = self.evaluator(self)
        self.record("evaluation", round=self.round, when=when, who="together", values=dict(replies))
        return replies

    def note(self, name: str, values: dict[str, float]) -> None:
        """A figure per client for the curves in the report, e.g. a method's own loss."""
        self.record("note", round=self.round, name=name, values=values)

    def _send(self, operation: str, bodies: Messages) -> set[int]:
        """Numbers of the messages sent."""
        self.record("call", operation=operation, round=self.round)
        messages: Messages = {}
        before = self.numbered
        for client, body in bodies.items():
            self.numbered += 1
            turn = self.turns[self.round, client, operation] = self.turns.get((self.round, client, operation), -1) + 1
            messages[client] = {"operation": operation, "number": self.numbered, "round": self.round, "turn": turn, "body": body}
        for client, size in self.engine.send(messages).items():
            self.ledger.add(self.round, client, "down", operation, size)
        return set(range(before + 1, self.numbered + 1))

    def _open(self, arrival: Arrival, operation: str, start: float) -> Value | Failure:
        """The door: count it, then see whether it is a reply that may come in."""
        self.ledger.add(self.round, arrival.client, "up", operation, arrival.size)

        def fail(reason: str, lasting: bool = operation not in FREE) -> Failure:      # what cannot be measured can still take part
            return Failure(arrival.client, operation, self.round, reason, lasting)

        if "failure" in arrival.reply:
            return fail(arrival.reply["failure"])
        if self.terms.deadline is not None and operation not in FREE and arrival.at - start > self.terms.deadline:
            return fail(f"late: {arrival.at - start:.3g} s, the deadline is {self.terms.deadline:g} s", lasting=False)
        if (path := broken(arrival.reply["body"])) is not None:
            return fail(f"its reply holds NaN or infinity ({path})")
        return arrival.reply["body"]

    def _drops(self, client: str) -> bool:
        if not self.terms.dropout or not self.round:
            return False
        return float(torch.rand((), generator=stream(self.seed, "dropout", self.round, client))) < self.terms.dropout

    def _fail(self, failure: Failure) -> None:
        if failure.lasting:
            self.quarantined[failure.client] = failure
        self.absent.add(failure.client)
        self.failures.append(failure)
        self.record("failure", round=failure.round, client=failure.client, operation=failure.operation, reason=failure.reason)

    # what is saved after a round

    def memory(self) -> dict[str, Any]:
        return {"state": self.state, "finished": self.finished, "clock": self.clock, "numbered": self.numbered,
                "ledger": self.ledger.as_lists(), "pending": self.engine.pending(),
                "failures": [[f.client, f.operation, f.round, f.reason, f.lasting] for f in self.failures]}

    def remember(self, saved: dict[str, Any]) -> None:
        self.state, self.finished, self.clock = saved["state"], saved["finished"], saved["clock"]
        self.numbered, self.ledger = saved["numbered"], Ledger.from_lists(saved["ledger"])
        self.failures = [Failure(*f) for f in saved["failures"]]
        self.quarantined = {f.client: f for f in self.failures if f.lasting}
        self.engine.load(self.finished, self.clock, saved["pending"])


def mean_states(states: dict[str, dict[str, Tensor]], weights: dict[str, float]) -> dict[str, Tensor]:
    """Weighted mean of parameters with equal names and shapes; whole numbers (counters) are rounded."""
    total = sum(weights[c] for c in states)
    clients = list(states)
    merged = {}
    for name, first in states[clients[0]].items():
        sum_ = torch.zeros_like(first, dtype=torch.float64 if first.dtype == torch.float64 else torch.float32)
        for c in clients:
            sum_.add_(states[c][name].to(sum_.dtype), alpha=weights[c] / total)
        merged[name] = sum_.round().to(first.dtype) if not first.is_floating_point() else sum_.to(first.dtype)
    return merged
