"""The clients as the server sees them: whom it can call, what came back and what is remembered. Knows nothing of methods."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass, field
from typing import Any

import torch

from unalike.base.errors import RunError
from unalike.base.ledger import MEASUREMENTS, Ledger
from unalike.base.message import Value, find_nonfinite
from unalike.base.randomness import stream
from unalike.core.client import VERSION
from unalike.core.engine import Arrival, Engine, Sent
from unalike.core.participation import Failure, FederationConfig, QuorumError, Replies
from unalike.core.replay import Replay
from unalike.core.signatures import Declared, spec_mismatch, tensor_spec
from unalike.data.public_order import PublicOrder
from unalike.training.loop import Training

Messages = dict[str, dict[str, Value]]
Ask = tuple[str, dict[str, Value]]  # an operation and what goes with it


@dataclass
class Federation:
    """Clients behind an engine, with what the server remembers of the run in `state`."""

    engine: Engine
    training: Training = field(default_factory=Training)
    federation: FederationConfig = field(default_factory=FederationConfig)
    seed: int = 0
    log_event: Callable[..., None] = lambda event, **facts: None
    evaluator: Callable[["Federation"], Replies] | None = None
    figures: Callable[["Federation", dict], dict[str, Any]] | None = (
        None  # of everyone, from each client's metrics
    )
    guarded: bool = False  # clients keep shadows (safeguard.py): what is sent must let them do the same as their client
    archive: Any = field(
        default_factory=dict
    )  # large things the server keeps, by name: in a run they are on disk, not in memory
    counts: Callable[[str, dict[str, Any]], int] | None = (
        None  # with privacy: how many releases an answer to an operation is
    )
    replay: Replay | None = None  # in `drive`: an earlier run whose order of arrivals is to be kept
    declared: Callable[[str], Declared] | None = (
        None  # what the method says of an operation; a reply that is not so stays outside
    )
    lengths: Mapping[str, int] = field(
        default_factory=dict
    )  # what axes in that are called, and how long they are
    unasked: frozenset[str] = (
        frozenset()
    )  # operations that nobody would answer: there are no replies to them
    server: Any = None  # the side of a model that the server trains itself, where the method and the run have one

    def __post_init__(self) -> None:
        self.infos = self.engine.infos()
        for info in self.infos.values():
            if info.version != VERSION:
                raise ValueError(
                    f"client {info.id} speaks version {info.version} of the protocol, this server {VERSION}"
                )
        rows = {
            info.id: info.public_rows for info in self.infos.values() if info.public is not None
        }
        if len(set(rows.values())) > 1:
            raise ValueError(
                f"clients hold public sets of different length: {rows}; row i must be the same thing for everyone"
            )
        prints: dict[tuple, str] = {}
        for info in self.infos.values():
            if (
                info.public is not None
                and prints.setdefault((info.modalities, info.public_shape), info.public)
                != info.public
            ):
                raise ValueError(
                    f"client {info.id} holds another public set than others of its kind; row i must be the same for everyone"
                )
        self.public_rows = next(iter(rows.values()), 0)
        self.state: dict[str, Any] = {}
        self.scratch: dict[
            str, Any
        ] = {}  # what can be found again: gone when the server starts anew
        self.ledger = Ledger()
        self.released: dict[str, int] = {
            c: 0 for c in self.infos
        }  # how often each client's data were spoken of, whatever came of it
        self.round = 0  # the round under way; 0 before the first
        self.finished = 0  # the last finished one
        self.clock = 0.0  # simulated seconds
        self.numbered = 0  # messages sent so far
        self.in_flight: dict[int, Sent] = {}  # those not yet answered, by number
        self.overdue: dict[
            int, Sent
        ] = {}  # those nobody waits for any more; what comes is counted, then dropped
        self.turns: dict[
            tuple[int, str, str], int
        ] = {}  # how often a client was sent an operation this round: names its randomness
        self.quarantined: dict[str, Failure] = {}  # out for the rest of the run
        self.failures: list[Failure] = []
        self.failed_rounds: list[
            int
        ] = []  # rounds that ended early, for want of clients that were only away
        self.absent: set[str] = set()  # out for this round
        self.drawn: list[str] = list(self.infos)
        self.visits: dict[str, int] = {}  # in `drive`: how many each client has had
        self.waiting: list[str] = []  # in `drive`: whose next visit may begin
        self.instants = 0  # in `drive`: how often somebody arrived

    # who is there

    @property
    def clients(self) -> list[str]:
        """All clients but the quarantined ones, drawn for this round or not."""
        return [c for c in self.infos if c not in self.quarantined]

    @property
    def active(self) -> list[str]:
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
        self.require_clients()
        self.round, self.absent, self.turns = number, set(), {}
        self.drawn = self.federation.drawn(list(self.infos), self.seed, number)

    def require_clients(self) -> None:
        """Where nobody is left nothing that comes of it is a result, unless a quorum of 0 says so."""
        if not self.clients and self.federation.quorum:
            raise QuorumError(
                f"after round {self.finished}",
                0,
                len(self.infos),
                1,
                list(self.quarantined.values()),
            )

    # calling them

    def call(
        self,
        operation: str,
        *,
        per_client: Messages | None = None,
        clients: list[str] | None = None,
        quorum: float | None = None,
        sizes: Mapping[str, int] | None = None,
        per_client_operation: Mapping[str, str] | None = None,
        **shared: Value,
    ) -> Replies:
        """Run one operation on many clients and wait for their replies.

        Args:
            operation: name of a method of the program marked `@operation` or `@query`.
            per_client: arguments that differ, by client. Only clients named here are called,
                unless `clients` says otherwise.
            clients: call these, sampled for this round or not; default: the active ones. Clients
                named so are not subject to simulated dropout.
            quorum: share of the called clients that must reply; default: the federation's.
            sizes: lengths of axes that the operation declares by a name (`Shape`).
            per_client_operation: another operation for some of the clients.
            shared: arguments that are the same for all.

        Returns: replies by client, in the order of registration. A client that failed is in
            `failures` instead, and takes no further part in the round or the run.

        Raises:
            QuorumError: fewer clients replied than the quorum requires.
        """
        if operation in self.unasked:
            return Replies({}, {})
        if clients is None and per_client is None:
            chosen = self.active
        elif clients is None:
            active = set(self.active)
            chosen = [client for client in per_client or {} if client in active]
        else:
            chosen = clients
        requests: dict[str, Ask] = {}
        failures: dict[str, Failure] = {}
        for client in chosen:
            if client in self.quarantined:
                continue
            name = (per_client_operation or {}).get(client, operation)
            if clients is None and self.federation.drops(client, self.seed, self.round):
                failures[client] = Failure(client, name, self.round, "dropped out", lasting=False)
            else:
                requests[client] = (name, {**shared, **(per_client or {}).get(client, {})})
        measured = operation in MEASUREMENTS
        deadline = None if measured else self.federation.deadline
        start = self.engine.now
        replies = self._exchange(requests, deadline, sizes, failures)
        if measured:
            self.engine.rewind_clock(start)
        elif deadline is not None:
            self.engine.rewind_clock(start + deadline)
        self.clock = max(self.clock, self.engine.now)
        for failure in failures.values():
            self._fail(failure)
        required = self.federation.quorum if quorum is None else quorum
        self._check_quorum(operation, len(replies), failures, required)
        return Replies({c: replies[c] for c in self.infos if c in replies}, failures)

    def _exchange(
        self,
        requests: dict[str, Ask],
        deadline: float | None,
        sizes: Mapping[str, int] | None,
        failures: dict[str, Failure],
    ) -> dict[str, Value]:
        """Send requests and wait for the replies, at most until the deadline.

        Returns: replies by client. Clients without one are added to `failures`.
        """
        limit = math.inf if deadline is None else deadline
        until = self.engine.now + limit
        replies: dict[str, Value] = {}
        awaited = self._send(requests, {client: self.round for client in requests})
        while awaited and (arrivals := self.engine.receive(awaited, until)):
            for arrival in arrivals:
                awaited.discard(arrival.reply["number"])
                reply = self._open(arrival, sizes=sizes)
                if isinstance(reply, Failure):
                    failures[arrival.client] = reply
                else:
                    replies[arrival.client] = reply
        if deadline is None:
            reason = "the engine lost what it was asked"
        else:
            reason = f"late: the deadline is {deadline:g} s"
        for number in awaited:
            sent = self.in_flight.pop(number)
            self.overdue[number] = sent
            failures[sent.client] = Failure(
                sent.client, sent.operation, sent.round, reason, lasting=False
            )
        return replies

    def relay(self, operation: str, clients: list[str]) -> Value:
        """The operation on one client after another: each gets as `given` what the one before gave back, the first nothing."""
        given: Value = {}
        failures: dict[str, Failure] = {}
        for client in clients:
            replies = self.call(operation, clients=[client], quorum=0, given=given)
            given = replies.get(client, given)
            failures |= replies.failures
        self._check_quorum(
            operation, len(clients) - len(failures), failures, self.federation.quorum
        )
        return given

    def _check_quorum(
        self, operation: str, there: int, failures: dict[str, Failure], quorum: float
    ) -> None:
        asked = there + len(failures)
        if there < (needed := math.ceil(quorum * asked - 1e-9)):
            raise QuorumError(
                f"{operation}, round {self.round}", there, asked, needed, list(failures.values())
            )

    def run_async(
        self,
        invite: Callable[[str], Ask],
        take: Callable[[Replies], dict[str, Ask]],
        rest: bool = True,
    ) -> Iterator[int]:
        """The asynchronous form: nobody waits for anybody. `invite(client)` says what begins a visit; `take(replies)` gets all replies
        of one instant and says what is asked next in these visits. A visit ends where nothing more is asked, and the next begins.

        Everyone is visited `training.rounds` times; without `rest`, quick clients go on until the slowest has had as many. Who drops out
        or is late has had its visit, and has the next. `participation` is the share of clients that are visited at a time; `quorum` the
        share that must be left. Yields a number whenever everyone could have had so many visits: there the run can be saved, with what
        is under way.
        """
        self.drawn = list(self.infos)
        if not self.visits:
            order = torch.randperm(len(self.infos), generator=stream(self.seed, "participation"))
            self.visits = {c: 0 for c in self.infos}
            self.waiting = (
                [list(self.infos)[i] for i in order]
                if self.federation.participation < 1
                else list(self.infos)
            )
        while True:
            self._send(*self._invitations(invite, rest))
            arrivals, past = self._next() if self.in_flight else ([], {})
            self.clock = self.engine.now
            got = {}
            for arrival in arrivals:
                sent = self.in_flight[arrival.reply["number"]]
                got[sent.client] = opened = self._open(arrival, past.get(sent.client))
                why = (
                    {"reason": opened.reason, "lasting": opened.lasting}
                    if isinstance(opened, Failure)
                    else {}
                )
                self.log_event(
                    "arrival",
                    at=self.clock,
                    instant=self.instants,
                    client=sent.client,
                    round=sent.round,
                    operation=sent.operation,
                    **why,
                )
            failures = {c: f for c, f in got.items() if isinstance(f, Failure)}
            for failure in failures.values():
                self._fail(failure)
            onward = (
                take(
                    Replies(
                        {c: got[c] for c in self.infos if c in got and c not in failures}, failures
                    )
                )
                if got
                else {}
            )
            onward = {c: onward[c] for c in got if c in onward and c not in failures}
            self._send(onward, {c: self.visits[c] + 1 for c in onward})
            for client in (c for c in got if c not in onward):
                self._finish_visit(client)
            if len(self.clients) < (
                needed := math.ceil(self.federation.quorum * len(self.infos) - 1e-9)
            ):
                gone = list(self.quarantined.values())
                raise QuorumError(
                    f"visit {self.finished + 1}", len(self.clients), len(self.infos), needed, gone
                )
            if (
                done := sum(self.visits[c] for c in self.clients) // max(len(self.clients), 1)
            ) > self.finished:
                self.round = done
                yield done
            if not self.in_flight and not self.waiting:
                return

    def _next(self) -> tuple[list[Arrival], dict[str, dict[str, Any]]]:
        """Who arrives next: whoever does, or whoever did in the run that is replayed, and then what became of it."""
        self.instants += 1
        if self.replay is not None:
            return self.replay.next(self.instants, set(self.in_flight), self.engine.receive)
        if not (arrivals := self.engine.receive(set(self.in_flight))):
            raise RunError(
                f"the engine lost what {', '.join(sent.client for sent in self.in_flight.values())} were asked; resume the run"
            )
        return arrivals, {}

    def _invitations(
        self, invite: Callable[[str], Ask], rest: bool
    ) -> tuple[dict[str, Ask], dict[str, int]]:
        """What begins a visit, for each client that waits for one and has a place; and the number of its visit."""
        places = self.federation.places(len(self.infos)) - len(
            {sent.client for sent in self.in_flight.values()}
        )
        asks: dict[str, Ask] = {}
        behind = lambda: (
            min((self.visits[c] for c in self.clients), default=0) < self.training.rounds
        )
        while self.waiting and len(asks) < places:
            client = self.waiting.pop(0)
            number = self.visits[client] + 1
            if client in self.quarantined or not (
                number <= self.training.rounds or (not rest and behind())
            ):
                continue
            if self.federation.drops(client, self.seed, number):
                self._fail(Failure(client, "visit", number, "dropped out", lasting=False))
                self._finish_visit(client)
            else:
                asks[client] = invite(client)
        return asks, {c: self.visits[c] + 1 for c in asks}

    def _finish_visit(self, client: str) -> None:
        self.visits[client] += 1
        self.waiting.append(client)
        self.absent.discard(client)
        self.turns = {key: turn for key, turn in self.turns.items() if key[1] != client}

    def evaluate(self, when: str = "end") -> Replies | None:
        """Everyone's metrics, recorded; only in the rounds that are to be points of the learning curves."""
        every = max(1, self.training.rounds // self.federation.evaluations)
        if self.evaluator is None or (
            self.round % every and self.round != self.training.rounds and self.round != 1
        ):
            return None
        replies = self.evaluator(self)
        figures = {"figures": self.figures(self, dict(replies))} if self.figures else {}
        self.log_event(
            "evaluation",
            round=self.round,
            when=when,
            who="together",
            values=dict(replies),
            **figures,
        )
        return replies

    def log_metrics(self, name: str, values: Mapping[str, float | None]) -> None:
        """A figure per client for the curves in the report, e.g. a method's own loss."""
        self.log_event(
            "note",
            round=self.round,
            name=name,
            values={c: value for c, value in values.items() if value is not None},
        )

    def log_figure(self, name: str, **material: Any) -> None:
        """What a picture in the report is made of, as it is now: `points` (n, width) and their `classes` (n,), drawn at a few moments of
        the run; or a `matrix` (n, m) with the names of its `rows` and `columns`, drawn as it was last. Called where a method measures: it
        does not travel, and whatever is large is thinned."""
        self.log_event("picture", round=self.round, name=name, **material)

    def _send(self, asks: dict[str, Ask], rounds: dict[str, int]) -> set[int]:
        """Numbers of the messages sent."""
        if not asks:
            return set()
        self.log_event("call", operation=next(iter(asks.values()))[0], round=self.round)
        messages: Messages = {}
        before = self.numbered
        for client, (operation, body) in asks.items():
            self.numbered += 1
            key = (rounds[client], client, operation)
            turn = self.turns[key] = self.turns.get(key, -1) + 1
            messages[client] = {
                "operation": operation,
                "number": self.numbered,
                "round": rounds[client],
                "turn": turn,
                "body": body,
            }
            self.in_flight[self.numbered] = Sent(
                client, operation, rounds[client], self.engine.now, tensor_spec(body) or {}
            )
        for client, size in self.engine.send(messages).items():
            self.ledger.add(rounds[client], client, "down", asks[client][0], size)
        return set(range(before + 1, self.numbered + 1))

    def _open(
        self,
        arrival: Arrival,
        past: dict[str, Any] | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> Value | Failure:
        """The door: count it, then see whether it is a reply that may come in. `past` is what became of it in the run that is replayed."""
        sent = self.in_flight.pop(arrival.reply["number"])
        self._count(sent, arrival.size, arrival.reply)

        def fail(
            reason: str, lasting: bool = sent.operation not in MEASUREMENTS
        ) -> Failure:  # what cannot be measured can still take part
            return Failure(
                sent.client, sent.operation, sent.round, " ".join(reason.split())[:500], lasting
            )

        if past:
            return fail(**past)
        if "failure" in arrival.reply:
            return fail(str(arrival.reply["failure"]))
        if "body" not in arrival.reply or sent.client != arrival.client:
            return fail("its reply is none to what it was asked")
        deadline = (
            self.federation.deadline
            if sent.operation not in MEASUREMENTS and past is None
            else None
        )
        if deadline is not None and (took := arrival.at - sent.at) > deadline:
            return fail(f"late: {took:.3g} s, the deadline is {deadline:g} s", lasting=False)
        if (quota := self.federation.round_bytes) is not None and (
            told := self.ledger.upload_bytes(sent.round, sent.client)
        ) > quota:
            return fail(
                f"it sent {told:,} bytes in this round, and may send {quota:,} (federation.round_bytes)",
                lasting=True,
            )
        reply = arrival.reply["body"]
        if wrong := self._reply_problem(sent, reply, sizes):
            return fail(wrong)
        if (path := find_nonfinite(reply)) is not None:
            return fail(f"its reply holds NaN or infinity ({path})")
        return reply

    def _reply_problem(
        self, sent: Sent, reply: Value, sizes: Mapping[str, int] | None
    ) -> str | None:
        """What is wrong with a reply, by what its operation declares and what was sent with it."""
        if self.declared is None:
            return None
        info, declared = self.infos[sent.client], self.declared(sent.operation)
        known = {
            **self.lengths,
            "clients": len(self.infos),
            "samples": info.samples,
            "labels": len(info.labels),
            "public_rows": self.public_rows,
            **(sizes or {}),
        }
        whole = self.counts is None or (
            sent.operation in MEASUREMENTS and not self.unasked
        )  # seeded noise hides nothing of what is measured
        return (declared.reply if whole else declared.hidden)(
            reply, known, "its reply"
        ) or spec_mismatch(reply, sent.like)

    def _count(self, sent: Sent, size: int, reply: dict[str, Any]) -> None:
        if size:  # the engine's own word on a client that never answered has none
            self.ledger.add(sent.round, sent.client, "up", sent.operation, size)
        if self.counts is not None and (count := self.counts(sent.operation, reply)):
            self.release(sent.client, count)

    def release(self, client: str, count: int) -> None:
        """So much more was said of a client's data."""
        self.released[client] += count
        self.log_event("released", client=client, releases=self.released[client])

    def _pending(self) -> list[dict[str, Any]]:
        """Replies that wait to be heard. Those that came after a deadline on a real clock were sent too: they count, and go."""
        told = {
            p["reply"]["number"]: p
            for p in [*(self.replay.pending() if self.replay else []), *self.engine.pending()]
        }
        for number, sent in self.overdue.items():
            if (late := told.pop(number, None)) is not None:
                self._count(sent, late["size"], late["reply"])
        self.engine.drop(set(self.overdue))
        self.overdue = {}
        return list(told.values())

    def refuse(self, client: str, operation: str, reason: str) -> None:
        """A reply that came in and cannot be used: its client is named and left out."""
        self._fail(Failure(client, operation, self.round, reason))

    def _fail(self, failure: Failure) -> None:
        if failure.lasting:
            self.quarantined[failure.client] = failure
        self.absent.add(failure.client)
        self.failures.append(failure)
        self.log_event(
            "failure",
            round=failure.round,
            client=failure.client,
            operation=failure.operation,
            reason=failure.reason,
            lasting=failure.lasting,
        )

    # what is saved after a round

    def memory(self) -> dict[str, Any]:
        pending = self._pending()
        return {
            "state": self.state,
            "finished": self.finished,
            "clock": self.clock,
            "numbered": self.numbered,
            "pending": pending,
            "lost": self.failed_rounds,
            "released": self.released,
            "visits": self.visits,
            "waiting": self.waiting,
            "instants": self.instants,
            "flying": [[number, *astuple(sent)] for number, sent in self.in_flight.items()],
            "turns": [[*key, turn] for key, turn in self.turns.items()] if self.in_flight else [],
            "failures": [
                [f.client, f.operation, f.round, f.reason, f.lasting] for f in self.failures
            ],
        }

    def remember(self, saved: dict[str, Any]) -> None:
        self.state, self.finished, self.clock = saved["state"], saved["finished"], saved["clock"]
        self.numbered, self.failed_rounds = saved["numbered"], saved["lost"]
        self.visits, self.waiting = saved["visits"], saved["waiting"]
        self.released, self.instants = saved["released"], saved["instants"]
        self.in_flight = {number: Sent(*sent) for number, *sent in saved["flying"]}
        self.turns = {
            (round, client, operation): turn for round, client, operation, turn in saved["turns"]
        }
        self.failures = [Failure(*f) for f in saved["failures"]]
        self.quarantined = {f.client: f for f in self.failures if f.lasting}
        self.engine.load(self.finished, self.clock, saved["pending"])
