"""The clients of a federation as the server sees them: which take part, calls, replies and logs.

A method's server program gets a `Federation`, samples rounds and calls clients:

    for round in fed.rounds():
        replies = fed.call("update", parameters=parameters)
        parameters = mean(replies)
        yield round
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, astuple, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from unalike.base.errors import describe_error
from unalike.base.ledger import Ledger
from unalike.base.message import Value, find_nonfinite
from unalike.base.randomness import stream
from unalike.base.tracebacks import format_traceback, is_bug, is_debugging
from unalike.core.admission import find_misfits
from unalike.core.asynchronous import Act, Ask, Invite, run_visits
from unalike.core.client import ClientInfo
from unalike.core.client_stack import StackedReplies
from unalike.core.engine import Arrival, Engine, Sent
from unalike.core.lazy_clients import MEASURED, LazyInfos
from unalike.core.operations import (
    feature_measurements,
    is_protected,
    list_measurements,
    unanswered_measurements,
)
from unalike.core.participation import (
    Failure,
    FederationConfig,
    QuorumError,
    Replies,
    one_line,
)
from unalike.core.privacy import Privacy
from unalike.core.program import ClientProgram
from unalike.core.replay import Replay
from unalike.core.runtime import ClientRuntime
from unalike.core.signatures import signature_of, spec_mismatch, tensor_spec
from unalike.data.public_order import PublicOrder
from unalike.training.loop import Training

if TYPE_CHECKING:
    from unalike.core.algorithm import Algorithm

# Of real numbers in a reply. Larger ones come from models that diverged, or from an attack: in a
# mean they would make the models of everyone diverge.
MAX_MAGNITUDE = 1e15
Messages = dict[str, dict[str, Value]]
Evaluate = Callable[["Federation"], Replies]
# Releases of private data in a reply: count(operation, reply) -> number.
CountReleases = Callable[[str, dict[str, Any]], int]


def _ignore(event: str, **facts: Any) -> None:
    """Log nothing."""


@dataclass
class Federation:
    """The clients behind an engine, and what the server keeps of a run.

    Attributes:
        engine: carries calls to the clients and their replies back.
        training: the budget, among others the number of rounds.
        config: participation, dropout, deadline, quorum and limits.
        seed: of the run.
        algorithm: the method that is served. Replies are checked against the signatures of its
            operations; `evaluate` measures as it says. None: replies are not checked.
        privacy: how clients protect their replies; None: not at all.
        guarded: whether clients keep fold replicas for the safeguard. Then the same request must
            be usable by all replicas of a client.
        archive: large things the server keeps, by name. In a run they are on disk.
        replay: for `run_async`: an earlier run whose order of arrivals is repeated.
        server: a model that the server trains itself, where the method and the run have one.
        log_event: `log_event(event, **facts)` is called for everything that happens.
        evaluator: measures all clients instead of the algorithm.
        count_releases: with privacy: how many releases of private data a reply is.
    """

    engine: Engine
    training: Training = field(default_factory=Training)
    config: FederationConfig = field(default_factory=FederationConfig)
    seed: int = 0
    _: KW_ONLY
    algorithm: "Algorithm | None" = None
    privacy: Privacy | None = None
    guarded: bool = False
    archive: Any = field(default_factory=dict)
    replay: Replay | None = None
    server: ClientRuntime | None = None
    log_event: Callable[..., None] = _ignore
    evaluator: Evaluate | None = None
    count_releases: CountReleases | None = None

    def __post_init__(self) -> None:
        # By client. Of lazy clients, iteration covers those that were sampled so far.
        self.infos: Mapping[str, ClientInfo] = self.engine.infos()
        self.population: Sequence[str] = list(self.infos)  # ids of all clients
        examples = self.infos
        if isinstance(self.infos, LazyInfos):
            self.population = self.infos.ids
            examples = {id: self.infos[id] for id in (self.population[0], self.population[-1])}
        self.public_rows = _check_infos(examples, self.algorithm)
        program = ClientProgram if self.algorithm is None else self.algorithm.Program
        # Operations that only measure, and those of them that no client would answer.
        self.measurements = list_measurements(program)
        self.unanswered = unanswered_measurements(program, self.privacy)
        if not getattr(self.engine, "shares_features", True):
            self.unanswered |= feature_measurements(program)
        self.ledger = Ledger(measurements=self.measurements)
        # What the server program keeps; saved with every round.
        self.state: dict[str, Any] = {}
        # What it can compute again: gone when the server restarts.
        self.scratch: dict[str, Any] = {}
        # Releases of each client's data so far, also in replies that came to nothing.
        self.released: dict[str, int] = {client: 0 for client in self.infos}

        self.round = 0  # the current round; 0 before the first
        self.finished = 0  # the last finished round
        self.clock = 0.0  # seconds of the engine's clock, without measurements
        self.sampled: list[str] = list(self.infos)  # for the current round
        self.dropped: set[str] = set()  # for the rest of the current round
        # For the rest of the run, or until a later round in which they are asked again.
        self.quarantined: dict[str, Failure] = {}
        # Rounds, or visits, in a row in which a client failed and may be better in the next.
        self.ill: dict[str, list[int]] = {}
        self.failures: list[Failure] = []
        # Clients that are measured, where these are not all; see `measured`.
        self.panel: list[str] = []
        self._extend_panel(list(self.infos))
        self._reached: list[str] | None = None  # `clients` is limited to these; None: it is not
        # Rounds that ended early because too few clients were reachable.
        self.failed_rounds: list[int] = []

        self.last_number = 0  # of the last message sent
        self.in_flight: dict[int, Sent] = {}  # messages without a reply yet, by number
        # Messages nobody waits for any more: replies to them are counted, then dropped.
        self.overdue: dict[int, Sent] = {}
        # How often (round, client, operation) was requested: names the client's randomness.
        self.turns: dict[tuple[int, str, str], int] = {}

        # Of `run_async`: visits each client has had, clients whose next visit may start, and the
        # number of instants at which replies arrived.
        self.visits: dict[str, int] = {}
        self.waiting: list[str] = []
        self.instants = 0

    # which clients take part

    @property
    def clients(self) -> list[str]:
        """All clients but the quarantined ones, sampled for this round or not.

        Of lazy clients: those that were sampled in this round or an earlier one.
        """
        ids = self.infos if self._reached is None else self._reached
        return [client for client in ids if client not in self.quarantined]

    @property
    def lazy(self) -> bool:
        """Whether clients are built when they first take part (`LazyClients`)."""
        return isinstance(self.infos, LazyInfos)

    @property
    def listed(self) -> list[str]:
        """Clients that the results list: all, or the measured ones of lazy clients."""
        return self._in_order(self.panel) if self.lazy else list(self.infos)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Inside, `clients` are only those that are measured (`config.evaluation_clients`)."""
        before = self._reached
        if self._panel_size() is not None:
            self._reached = self._in_order(self.panel)
        try:
            yield
        finally:
            self._reached = before

    def _panel_size(self) -> int | None:
        """How many clients are measured, at most; None: all."""
        return self.config.evaluation_clients or (MEASURED if self.lazy else None)

    def _extend_panel(self, clients: list[str]) -> None:
        """Draw from these clients until as many are measured as the settings say."""
        size = self._panel_size()
        known = set(self.panel)
        new = [client for client in clients if client not in known]
        if size is None or len(self.panel) >= size or not new:
            return
        generator = stream(self.seed, "measured", len(self.panel))
        order = torch.randperm(len(new), generator=generator).tolist()
        self.panel += [new[i] for i in order[: size - len(self.panel)]]

    def _in_order(self, clients: list[str]) -> list[str]:
        chosen = set(clients)
        return [client for client in self.infos if client in chosen]

    def _join(self, clients: list[str]) -> None:
        """Have lazy clients that take part for the first time announce themselves.

        One that cannot be built is left out of the run.
        """
        if not isinstance(self.infos, LazyInfos):
            return
        joined = []
        for client in clients:
            if client in self.quarantined:
                continue
            try:
                self.infos[client]
                joined.append(client)
            except Exception as error:  # a user's function may raise anything
                if is_debugging():
                    raise
                bug = format_traceback(error) if is_bug(error) else ""
                reason = describe_error(error)
                self.fail(Failure(client, "build", self.round, reason, traceback=bug))
        self.infos.join(joined)
        _check_infos(self.infos, self.algorithm)
        self._extend_panel(joined)
        for client in joined:
            self.released.setdefault(client, 0)

    @property
    def active(self) -> list[str]:
        """Clients sampled for this round that have not failed in it."""
        out = self.quarantined.keys() | self.dropped
        return [client for client in self.sampled if client not in out]

    def public(self, batch: int) -> PublicOrder:
        """Batches of the public set; their order depends on the round and is the same for all."""
        return PublicOrder(self.public_rows, batch, self.seed)

    def rounds(self) -> Iterator[int]:
        """Round numbers from the first unfinished one; samples the clients of each."""
        for number in range(self.finished + 1, self.training.rounds + 1):
            self.start_round(number)
            yield number

    def start_round(self, number: int) -> None:
        """Make this the current round and sample its clients."""
        for client in list(self.ill):
            self.ask_again(client, number)
        if not self.lazy:
            self.require_clients()
        self.round = number
        self.dropped = set()
        self.turns = {}
        self.sampled = self.config.sample(self.population, self.seed, number)
        self._join(self.sampled)
        self.require_clients()

    def ask_again(self, client: str, number: int) -> None:
        """Let a client that failed before this round, or visit, take part again.

        It stays out once it has failed in `federation.retries` rounds in a row after the first.
        """
        rounds = self.ill.get(client, [])
        if not rounds or rounds[-1] >= number:
            return
        if client not in self.quarantined:
            del self.ill[client]  # it took part since, and did not fail
        elif len(rounds) <= self.config.retries:
            del self.quarantined[client]
            self.log_event("again", round=number, client=client, failures=len(rounds))

    def is_ill(self, client: str) -> bool:
        """Whether a client failed in this round and would be asked again."""
        return self.round in self.ill.get(client, [])

    def forgive(self, client: str) -> None:
        """Let a client take part again in this round: its failure was not its fault."""
        self.quarantined.pop(client, None)
        self.ill.pop(client, None)
        self.dropped.discard(client)

    def require_clients(self) -> None:
        """Raise QuorumError if no client is left, unless a quorum of 0 allows it."""
        if not self.clients and self.config.quorum:
            failures = list(self.quarantined.values())
            raise QuorumError(f"after round {self.finished}", 0, len(self.population), 1, failures)

    def report_sharing(self) -> None:
        """Log which clients work with each other, once the method knows."""
        groups = self.algorithm.sharing(self) if self.algorithm is not None else None
        if groups is not None:
            clients = list(self.infos)
            self.log_event("sharing", round=self.round, groups=groups, clients=clients)

    def refuse(self, client: str, operation: str, reason: str) -> None:
        """Quarantine a client whose reply passed all checks but cannot be used, for good."""
        self.ill.pop(client, None)
        self.fail(Failure(client, operation, self.round, reason))

    def fail(self, failure: Failure) -> None:
        """Leave a client out, for this round or for the run, and log why."""
        if failure.lasting:
            self.quarantined[failure.client] = failure
        self.dropped.add(failure.client)
        self.failures.append(failure)
        self.log_event(
            "failure",
            round=failure.round,
            client=failure.client,
            operation=failure.operation,
            reason=failure.reason,
            lasting=failure.lasting,
            **failure.bug_report(),
        )

    # calls

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
    ) -> Replies[Any]:
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
        if operation in self.unanswered:
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
        bodies: dict[tuple, dict[str, Value]] = {}  # equal arguments are one dict
        for client in chosen:
            if client in self.quarantined:
                continue
            name = (per_client_operation or {}).get(client, operation)
            if clients is None and self.config.drops_out(client, self.seed, self.round):
                failures[client] = Failure(client, name, self.round, "dropped out", lasting=False)
            else:
                own = (per_client or {}).get(client, {})
                same = tuple([(key, id(value)) for key, value in own.items()])
                if same not in bodies:
                    bodies[same] = {**shared, **own}
                requests[client] = (name, bodies[same])
        measures = operation in self.measurements
        deadline = None if measures else self.config.deadline
        start = self.engine.now
        replies = self._exchange(requests, deadline, sizes, failures)
        if measures:
            self.engine.rewind_clock(start)
        elif deadline is not None:
            self.engine.rewind_clock(start + deadline)
        self.clock = max(self.clock, self.engine.now)
        for failure in failures.values():
            self.fail(failure)
        required = self.config.quorum if quorum is None else quorum
        self.check_quorum(operation, len(replies), failures, required)
        return Replies({c: replies[c] for c in self.infos if c in replies}, failures)

    def relay(self, operation: str, clients: list[str]) -> Value:
        """Run an operation on one client after another, e.g. to train one model in turns.

        Each client gets as `given` what the one before replied; the first gets `{}`.

        Returns: the reply of the last client that did not fail.
        """
        reply: Value = {}
        failures: dict[str, Failure] = {}
        for client in clients:
            replies = self.call(operation, clients=[client], quorum=0, given=reply)
            reply = replies.get(client, reply)
            failures |= replies.failures
        replied = len(clients) - len(failures)
        self.check_quorum(operation, replied, failures, self.config.quorum)
        return reply

    def run_async(self, invite: Invite, act: Act, even: bool = True) -> Iterator[int]:
        """Visit clients again and again without waiting for the slow ones.

        Each client has `training.rounds` visits. A client that drops out or is late has had its
        visit and gets the next. Of the federation's settings `participation` is the share of
        clients that are visited at a time and `quorum` the share that must not be quarantined.

        Args:
            invite: `invite(client)` returns the operation and arguments that start a visit.
            act: `act(replies)` gets all replies of one instant and returns, by client, what is
                requested next in these visits. A visit ends where nothing more is requested.
            even: every client has equally many visits. Otherwise fast clients have more, until
                the slowest has had its visits.

        Yields: a number, whenever the mean client has had so many visits. The run can be saved
            there, with all messages in flight.
        """
        return run_visits(self, invite, act, even)

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
        until = self.engine.now + (math.inf if deadline is None else deadline)
        replies: dict[str, Value] = {}
        awaited = self.send(requests, {client: self.round for client in requests})
        while awaited and (arrivals := self.engine.receive(awaited, until)):
            for arrival in arrivals:
                awaited.discard(arrival.reply["number"])
                reply = self.accept(arrival, sizes=sizes)
                if isinstance(reply, Failure):
                    failures[arrival.client] = reply
                else:
                    replies[arrival.client] = reply
        if deadline is None:
            reason = "the engine lost the request"
        else:
            reason = f"late: the deadline is {deadline:g} s"
        for number in awaited:
            sent = self.in_flight.pop(number)
            self.overdue[number] = sent
            failures[sent.client] = Failure(
                sent.client, sent.operation, sent.round, reason, lasting=False
            )
        return replies

    def send(self, requests: dict[str, Ask], rounds: dict[str, int]) -> set[int]:
        """Send one request to each of some clients, of these rounds or visits.

        Returns: the numbers of the messages.
        """
        if not requests:
            return set()
        self.log_event("call", operation=next(iter(requests.values()))[0], round=self.round)
        messages: Messages = {}
        numbers = set()
        specs: dict[int, Any] = {}  # by body: most clients are sent the same
        for client, (operation, body) in requests.items():
            self.last_number += 1
            numbers.add(self.last_number)
            key = (rounds[client], client, operation)
            self.turns[key] = self.turns.get(key, -1) + 1
            messages[client] = {
                "operation": operation,
                "number": self.last_number,
                "round": rounds[client],
                "turn": self.turns[key],
                "body": body,
            }
            if id(body) not in specs:
                specs[id(body)] = tensor_spec(body) or {}
            self.in_flight[self.last_number] = Sent(
                client, operation, rounds[client], self.engine.now, specs[id(body)]
            )
        for client, size in self.engine.send(messages).items():
            self.ledger.add(rounds[client], client, "down", requests[client][0], size)
        return numbers

    # replies

    def accept(
        self,
        arrival: Arrival,
        past: dict[str, Any] | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> Value | Failure:
        """Count a reply and check it.

        Args:
            past: in a replay, what became of this reply in the earlier run: `{}` or the reason of
                a failure.
            sizes: lengths of axes that the operation declares by a name.

        Returns: the body of the reply, or why it is not usable.
        """
        sent = self.in_flight.pop(arrival.reply["number"])
        self._count(sent, arrival.size, arrival.reply)
        # A client that cannot be measured can still take part.
        measures = sent.operation in self.measurements

        def failure(reason: str, lasting: bool = not measures, passing: bool = False) -> Failure:
            text = one_line(reason)
            bug = str(arrival.reply.get("traceback", ""))
            if lasting and passing and not bug:
                self.ill.setdefault(sent.client, []).append(sent.round)
            return Failure(sent.client, sent.operation, sent.round, text, lasting, bug)

        if past:
            return failure(**past)
        if "failure" in arrival.reply:
            return failure(str(arrival.reply["failure"]), passing=True)
        if "body" not in arrival.reply or sent.client != arrival.client:
            return failure("its reply does not match the request")
        took = arrival.at - sent.at
        deadline = self.config.deadline
        if deadline is not None and took > deadline and not measures and past is None:
            return failure(f"late: {took:.3g} s, the deadline is {deadline:g} s", lasting=False)
        limit = self.config.round_bytes
        uploaded = self.ledger.upload_bytes(sent.round, sent.client)
        if limit is not None and uploaded > limit:
            return failure(
                f"it sent {uploaded:,} bytes in this round, and may send {limit:,} "
                "(federation.round_bytes)",
                lasting=True,
            )
        body = arrival.reply["body"]
        problem = self._reply_problem(sent, body, sizes, arrival.stack)
        if problem is not None:
            return failure(problem)
        if (
            arrival.stack is not None
            and arrival.stack[0].magnitudes[arrival.stack[1]] <= MAX_MAGNITUDE
        ):
            return body
        path = find_nonfinite(body, MAX_MAGNITUDE)
        if path is not None:
            nonfinite = find_nonfinite(body)
            if nonfinite is not None:
                return failure(f"its reply holds NaN or infinity ({nonfinite})", passing=True)
            return failure(f"its reply holds a number beyond {MAX_MAGNITUDE:g} ({path})")
        return body

    def _reply_problem(
        self,
        sent: Sent,
        body: Value,
        sizes: Mapping[str, int] | None,
        stack: tuple[StackedReplies, int] | None = None,
    ) -> str | None:
        """How a reply differs from what its operation declares, or from what was sent with it."""
        if self.algorithm is None:
            return None
        if stack is not None:
            # Replies of a stack have one form: it is looked at once for equal lengths of axes.
            info = self.infos[sent.client]
            key = (sent.operation, id(sent.like), info.samples, len(info.labels))
            problems = stack[0].problems
            if key not in problems:
                problems[key] = self._reply_problem(sent, body, sizes)
            return problems[key]
        program = self.algorithm.Program
        signature = signature_of(getattr(program, sent.operation))
        protected = is_protected(program, sent.operation, self.privacy)
        validate = signature.hidden if protected else signature.reply
        info = self.infos[sent.client]
        lengths = {
            **self.algorithm.axis_lengths(),
            "clients": len(self.population),
            "samples": info.samples,
            "labels": len(info.labels),
            "public_rows": self.public_rows,
            **(sizes or {}),
        }
        return validate(body, lengths, "its reply") or spec_mismatch(body, sent.like)

    def _count(self, sent: Sent, size: int, reply: dict[str, Any]) -> None:
        """Count the bytes and the releases of a reply."""
        # An engine's own report that a client never answered has no size.
        if size:
            self.ledger.add(sent.round, sent.client, "up", sent.operation, size)
        if self.count_releases is not None:
            count = self.count_releases(sent.operation, reply)
            if count:
                self.release(sent.client, count)

    def release(self, client: str, count: int) -> None:
        """Add so many releases of a client's data to what it has spent."""
        self.released[client] += count
        self.log_event("released", client=client, releases=self.released[client])

    def check_quorum(
        self, operation: str, replied: int, failures: dict[str, Failure], quorum: float
    ) -> None:
        """Raise QuorumError if fewer clients replied than this share of those called."""
        called = replied + len(failures)
        needed = math.ceil(quorum * called - 1e-9)
        if replied < needed:
            where = f"{operation}, round {self.round}"
            raise QuorumError(where, replied, called, needed, list(failures.values()))

    # evaluation and logs

    def evaluate(self, when: str = "end") -> Replies[Any] | None:
        """Measure clients and log it, in rounds that are points of the learning curves.

        All clients are measured, unless the settings limit their number.

        Args:
            when: the moment of the round, for the log.

        Returns: metrics by client; None in other rounds.
        """
        every = max(1, self.training.rounds // self.config.evaluations)
        is_point = self.round in (1, self.training.rounds) or self.round % every == 0
        if not is_point:
            return None
        figures: dict[str, Any] = {}
        with self.measured():
            if self.evaluator is not None:
                replies = self.evaluator(self)
            elif self.algorithm is not None:
                replies = self.algorithm.evaluate(self)
                figures = {"figures": self.algorithm.figures(self, dict(replies))}
            else:
                return None
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
        """Log a number per client, e.g. a method's own loss, for the curves in the report."""
        known = {client: value for client, value in values.items() if value is not None}
        self.log_event("note", round=self.round, name=name, values=known)

    def log_figure(self, name: str, **material: Any) -> None:
        """Log what a figure in the report shows, as it is now. Nothing travels.

        Args:
            material: `points` (n, width) and their `classes` (n,), drawn at a few moments of the
                run; or a `matrix` (n, m) with the names of its `rows` and `columns`, drawn as it
                was last. Large arrays are subsampled.
        """
        self.log_event("picture", round=self.round, name=name, **material)

    # checkpoints

    def _take_pending(self) -> list[dict[str, Any]]:
        """Replies that wait to be delivered.

        Replies that came after a deadline on a real clock were sent, too: they are counted, then
        dropped.
        """
        pending = [*(self.replay.pending() if self.replay else []), *self.engine.pending()]
        by_number = {entry["reply"]["number"]: entry for entry in pending}
        for number, sent in self.overdue.items():
            late = by_number.pop(number, None)
            if late is not None:
                self._count(sent, late["size"], late["reply"])
        self.engine.drop(set(self.overdue))
        self.overdue = {}
        return list(by_number.values())

    def checkpoint(self) -> dict[str, Any]:
        """What is saved after a round, as plain values that `restore` takes back."""
        return {
            "pending": self._take_pending(),
            "state": self.state,
            "finished": self.finished,
            "clock": self.clock,
            "numbered": self.last_number,
            "lost": self.failed_rounds,
            "released": self.released,
            "visits": self.visits,
            "waiting": self.waiting,
            "instants": self.instants,
            "flying": [[number, *astuple(sent)] for number, sent in self.in_flight.items()],
            "turns": [[*key, turn] for key, turn in self.turns.items()] if self.in_flight else [],
            "failures": [failure.to_list() for failure in self.failures],
            "ill": self.ill,
            "quarantined": list(self.quarantined),
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Go back to a checkpoint, with the engine."""
        self.state = saved["state"]
        self.finished = saved["finished"]
        self.clock = saved["clock"]
        self.last_number = saved["numbered"]
        self.failed_rounds = saved["lost"]
        self.released = saved["released"]
        self.visits = saved["visits"]
        self.waiting = saved["waiting"]
        self.instants = saved["instants"]
        self.in_flight = {number: Sent(*fields) for number, *fields in saved["flying"]}
        self.turns = {
            (round, client, operation): turn for round, client, operation, turn in saved["turns"]
        }
        self.failures = [Failure(*fields) for fields in saved["failures"]]
        self.ill = saved["ill"]
        lasting = {f.client: f for f in self.failures if f.lasting}
        out = saved["quarantined"]
        self.quarantined = {client: f for client, f in lasting.items() if client in out}
        if self.lazy:
            for number in range(1, self.finished + 1):
                self._join(self.config.sample(self.population, self.seed, number))
        self.engine.load(self.finished, self.clock, saved["pending"])


def _check_infos(infos: Mapping[str, ClientInfo], algorithm: "Algorithm | None") -> int:
    """Rows of the public set of all clients that hold one; 0: none.

    Raises: ValueError that names a client which does not fit the others. An engine of several
        organisations has refused such clients before.
    """
    needs_public = algorithm is None or algorithm.needs_public
    for client, reason in find_misfits(infos, needs_public=needs_public).items():
        raise ValueError(f"client {client} {reason}")
    rows = [info.public_rows for info in infos.values() if info.public is not None]
    return rows[0] if rows else 0
