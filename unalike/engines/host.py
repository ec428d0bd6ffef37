"""Holds clients for an engine: builds their runtimes, answers messages and stores states."""

import logging
import warnings
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NotRequired, TypedDict

from unalike.base.errors import Refusal
from unalike.base.lockstep import run_in_lockstep
from unalike.base.message import MAX_BYTES, MessageError, Value, decode, encode, encoded_size
from unalike.base.tracebacks import is_bug, is_debugging
from unalike.core.client import Client, ClientInfo
from unalike.core.client_stack import StackedReplies
from unalike.core.incidents import Incident
from unalike.core.lazy_clients import clients_by_id
from unalike.core.operations import find_stacked_form
from unalike.core.runtime import ClientRuntime
from unalike.core.signatures import validator_for
from unalike.core.stacking import Mode, Stacks
from unalike.engines.store import Store

log = logging.getLogger(__name__)

MAX_TOGETHER = 256  # clients that run in lockstep
MAX_TRACEBACK = 20_000  # characters of a traceback that are kept, from its end


class Request(TypedDict):
    """What a client is sent."""

    operation: str
    number: int
    round: int
    turn: int
    body: dict


class Answer(TypedDict):
    """What a client sends back: a body, or why it failed."""

    number: int
    body: NotRequired[Any]
    failure: NotRequired[str]
    work: NotRequired[float]


class SimulatedAnswer(Answer):
    """What a client sends back to a server of the same user: a bug brings its traceback."""

    traceback: NotRequired[str]


def counted_bytes(answer: dict[str, Any], size: int) -> int:
    """Bytes that count of an answer whose encoding has `size` bytes.

    A traceback does not count: only a simulation has one, and its length depends on the machine.
    """
    return size if "traceback" not in answer else encoded_size(without_traceback(answer))


def without_traceback(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer as it counts: bytes of a traceback are not traffic."""
    if "traceback" not in answer:
        return answer
    return {key: value for key, value in answer.items() if key != "traceback"}


class Host:
    """The clients of a federation that one process holds.

    Args:
        clients: those of this host; a client's program is built at its first request.
        build: the runtime of a client's program, e.g. `build_runtime` with a run's settings.
        store: where states go that must survive.
        alive: how many programs stay in memory. The ones idle longest are spilled to the store.
        report: called with each failure where the server belongs to another organisation, which
            then gets only an incident number. Default: the server gets the reason.
        stack: whether clients of one kind that are called at once train as a stack of models.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        build: Callable[[Client], ClientRuntime],
        store: Store,
        alive: int = 256,
        report: Callable[[Incident], None] | None = None,
        stack: Mode = "never",
    ):
        self.clients = clients_by_id(clients)
        self.build = build
        self.store = store
        self.alive = alive
        self.report = report
        self.stacks = Stacks(stack)
        # The last failures, with their tracebacks.
        self.incidents: deque[Incident] = deque(maxlen=100)
        # In memory, the one idle longest first.
        self.runtimes: OrderedDict[str, ClientRuntime] = OrderedDict()
        # Clients that changed since the last snapshot, and those of them that are on disk.
        self.changed: set[str] = set()
        self.spilled: set[str] = set()
        # Number of each client's last message, and its reply where it may be requested again.
        self.answered: dict[str, tuple[Any, dict[str, Any] | None]] = {}

    @property
    def programs(self) -> dict[str, Any]:
        """Programs in memory, by client."""
        return {client: runtime.program for client, runtime in self.runtimes.items()}

    def infos(self) -> Mapping[str, ClientInfo]:
        """What each client announces."""
        return {id: client.info() for id, client in self.clients.items()}

    def handle(self, client: str, message: dict[str, Value]) -> dict[str, Any]:
        """Run one operation and return the answer.

        A message that was answered before gets the same answer and changes nothing, even if the
        client was on disk since.
        """
        problem = validator_for(Request)(message, {}, "the message")
        if problem is not None:
            number: Any = message.get("number") if isinstance(message, dict) else None
            return {
                "number": number if isinstance(number, int) else 0,
                "failure": f"it refuses what it was sent: {problem}",
            }
        number = message["number"]
        try:
            self.wake(client)
            if self._seen(client, number):
                last, answer = self.answered[client]
                if number == last and answer is not None:
                    return answer
                return {"number": number, "failure": f"message {number} was answered before"}
            answer = {"number": number, **self._run(client, message)}
        except Exception as error:
            if is_debugging():
                raise
            answer = {"number": number, **self._describe_failure(client, message, error)}
        self.answered[client] = (number, answer)
        return answer

    def answer(
        self, client: str, data: Any, limit: int = MAX_BYTES, tensors: Any = None
    ) -> bytearray:
        """Handle an encoded message, or bytes that are none, and return the encoded answer.

        Args:
            data: the message, or what comes before its tensors.
            limit: bytes a message may have, either way.
            tensors: the encoded tensors, where they come apart from the message.
        """
        try:
            message: Any = decode(data, limit, tensors)
        except MessageError as error:
            return encode({"number": 0, "failure": str(error)})
        answer = self.handle(client, message)
        with suppress(MessageError):
            return encode(answer, limit)
        try:
            return encode(without_traceback(answer), limit)
        except MessageError as error:
            failure = self._describe_failure(client, message, error)
            return encode({"number": answer["number"], **failure})

    def _describe_failure(
        self, client: str, message: dict[str, Any], error: Exception
    ) -> dict[str, str]:
        """What the server learns of a failure: `failure` and, of a bug, `traceback`.

        A server of another organisation learns only that there was one, and its number.
        """
        if isinstance(error, Refusal):
            return {"failure": str(error)}
        incident = Incident.of(error, client, message["operation"])
        self.incidents.append(incident)
        if self.report is not None:
            self.report(incident)
            return {"failure": incident.sentence}
        if isinstance(error, ValueError):
            failure = str(error)
        else:
            failure = f"{type(error).__name__}: {error}"
        if not is_bug(error):
            return {"failure": failure}
        return {"failure": failure, "traceback": incident.traceback[-MAX_TRACEBACK:]}

    def _report_hidden_failure(self, client: str, operation: str, error: BaseException) -> None:
        """Report a failure that privacy keeps from the server to the client's owner."""
        incident = Incident.of(error, client, operation)
        self.incidents.append(incident)
        if self.report is not None:
            self.report(incident)
            return
        warnings.warn(
            f"client {client} failed at {operation}; with privacy it sends an update of nothing "
            f"instead: {incident.reason}",
            RuntimeWarning,
            stacklevel=2,
        )

    def handle_all(self, messages: dict[str, dict[str, Value]]) -> dict[str, dict[str, Any]]:
        """Answers of several clients, by client.

        Similar clients that get the same request, of an operation marked `@together`, run it at
        once. If that fails they run it one by one, so that only the culprit fails.
        """
        answers: dict[str, dict[str, Any]] = {}
        for clients in self._groups(messages):
            if len(clients) > 1:
                with suppress(Exception):
                    answers |= self._run_together({c: messages[c] for c in clients})
        remaining = {c: message for c, message in messages.items() if c not in answers}
        answers |= self._handle_in_lockstep(remaining)
        return {client: answers[client] for client in messages}

    def handle_stacks(
        self, messages: dict[str, dict[str, Value]]
    ) -> dict[str, tuple[dict[str, Any], StackedReplies, int]]:
        """Answers of clients that can be one object, each with all replies and its number there.

        Messages must be well-formed, and those with the same body have the same dict.
        """
        answers: dict[str, tuple[dict[str, Any], StackedReplies, int]] = {}
        if self.stacks.mode == "never" or len(messages) > self.alive or self.report is not None:
            return answers
        for clients in self._find_stacks(messages):
            for start in range(0, len(clients), MAX_TOGETHER):
                part = clients[start : start + MAX_TOGETHER]
                try:
                    answers |= self._run_stack({client: messages[client] for client in part})
                except Exception as error:  # one by one, only the culprit fails
                    log.debug("%d clients are not one object: %s", len(part), error)
        return answers

    def _find_stacks(self, messages: dict[str, dict[str, Any]]) -> Iterator[list[str]]:
        """Clients of one class, device and architecture that are asked the same."""
        groups: dict[Hashable, list[str]] = {}
        has_form: dict[Hashable, bool] = {}  # by class and operation
        for client, message in messages.items():
            try:
                runtime = self.wake(client)
            except Exception:  # a client that cannot be built will fail by name
                continue
            name = message["operation"]
            program: Any = type(runtime.program)
            if (program, name) not in has_form:
                has_form[program, name] = find_stacked_form(program, name) is not None
            if has_form[program, name] and not self._seen(client, message["number"]):
                body = id(message["body"])
                key = (name, message["round"], message["turn"], body, runtime.batching_key)
                groups.setdefault(key, []).append(client)
        for clients in groups.values():
            model = self.runtimes[clients[0]].program.model
            if len(clients) > 1 and self.stacks.is_worthwhile(model, len(clients)):
                yield clients

    def _run_stack(
        self, messages: dict[str, dict[str, Any]]
    ) -> dict[str, tuple[dict[str, Any], StackedReplies, int]]:
        clients = list(messages)
        first = messages[clients[0]]
        runtimes = [self.runtimes[client] for client in clients]
        replies = ClientRuntime.perform_stack(
            runtimes, first["operation"], first["round"], first["body"], self.stacks
        )
        self.changed.update(clients)
        self.spilled.difference_update(clients)
        answers = {}
        for i, (client, runtime) in enumerate(zip(clients, runtimes, strict=True)):
            number = messages[client]["number"]
            answer = {"number": number, "body": replies.bodies[i], "work": runtime.take_work()}
            self.answered[client] = (number, answer)
            answers[client] = (answer, replies, i)
        return answers

    def _handle_in_lockstep(self, messages: dict[str, dict[str, Value]]) -> dict[str, Any]:
        """Answers of clients that train and are measured at once where they are of one kind."""
        answers: dict[str, Any] = {}
        clients = list(messages)
        together = min(self.alive, MAX_TOGETHER)
        for start in range(0, len(clients), together):
            present = clients[start : start + together]  # none of them is spilled meanwhile
            functions = [partial(self.handle, client, messages[client]) for client in present]
            if self._may_stack(present):
                replies = run_in_lockstep(functions, self.stacks)
            else:
                replies = [function() for function in functions]
            answers |= zip(present, replies, strict=True)
        return answers

    def _may_stack(self, clients: list[str]) -> bool:
        """Whether enough of these clients are alike to train as a stack."""
        if self.stacks.mode == "never" or len(clients) < 2:
            return False
        try:
            kinds = Counter(self.wake(client).batching_key for client in clients)
        except Exception:  # a client that cannot be built will fail by name
            return False
        kind, count = kinds.most_common(1)[0]
        alike = next(c for c in clients if self.runtimes[c].batching_key == kind)
        return count > 1 and self.stacks.is_worthwhile(self.runtimes[alike].program.model, count)

    def _groups(self, messages: dict[str, dict[str, Value]]) -> list[list[str]]:
        groups: dict[Any, list[str]] = {}
        for client, message in messages.items():
            name, body = message["operation"], message["body"]
            if len(messages) > self.alive or not isinstance(body, dict):
                continue
            runtime = self.wake(client)
            method = getattr(type(runtime.program), str(name), None)
            if hasattr(method, "together") and not self._seen(client, message["number"]):
                key = (name, tuple(sorted(body)), runtime.batching_key)
                groups.setdefault(key, []).append(client)
        return list(groups.values())

    def _seen(self, client: str, number: Any) -> bool:
        """Whether a message was answered: messages come in the order of their numbers."""
        return client in self.answered and number <= self.answered[client][0]

    def _run_together(self, messages: dict[str, dict[str, Value]]) -> dict[str, dict[str, Any]]:
        runtimes = [self.wake(client) for client in messages]
        requests: list[Any] = list(messages.values())
        name = requests[0]["operation"]
        if runtimes[0].changes_client(name):
            self.changed |= messages.keys()
            self.spilled -= messages.keys()
        bodies = ClientRuntime.perform_together(
            runtimes,
            name,
            rounds=[request["round"] for request in requests],
            turns=[request["turn"] for request in requests],
            bodies=[request["body"] for request in requests],
        )
        replies = {}
        for client, request, runtime, body in zip(
            messages, requests, runtimes, bodies, strict=True
        ):
            number = request["number"]
            replies[client] = {"number": number, "body": body, "work": runtime.take_work()}
            self.answered[client] = (number, replies[client])
        return replies

    def changes(self, client: str, operation: str) -> bool:
        """Whether an operation may change a client that is in memory."""
        return client in self.runtimes and self.runtimes[client].changes_client(operation)

    def _run(self, client: str, message: dict[str, Any]) -> dict[str, Any]:
        runtime = self.wake(client)
        name = message["operation"]
        runtime.find_operation(name)  # refused before the client counts as changed
        if runtime.changes_client(name):
            self.changed.add(client)
            self.spilled.discard(client)
        body = runtime.perform(name, message["round"], message["turn"], message["body"])
        failure = runtime.take_hidden_failure()
        if failure is not None:
            self._report_hidden_failure(client, name, failure)
        work = runtime.take_work()
        if runtime.privacy is not None and self.report is not None:
            work = 0.0  # a client that failed did less: the number would reveal the failure
        return {"body": body, "work": work}

    def wake(self, client: str) -> ClientRuntime:
        """A client's runtime; one that is not in memory is built and restored from the store."""
        if client in self.runtimes:
            self.runtimes.move_to_end(client)
            return self.runtimes[client]
        runtime = self.build(self.clients[client])
        state = self.store.read_latest(client)
        if state is not None:
            last = state.pop("answered", None)
            if last is not None:
                self.answered[client] = (last["number"], last["reply"])
            runtime.restore(state)
        if self.store.has_current(client):
            # Spilled here, or released elsewhere, in the middle of a round.
            self.changed.add(client)
            self.spilled.discard(client)
        self.runtimes[client] = runtime
        while len(self.runtimes) > self.alive:
            idle, idle_runtime = self.runtimes.popitem(last=False)
            if idle in self.changed:
                self._spill(idle, idle_runtime)
            self.answered.pop(idle, None)
        return runtime

    def store_client(self, client: str) -> None:
        """Store a changed client with its last answer, so that another process could continue."""
        if client in self.changed and client not in self.spilled:
            self._spill(client, self.runtimes[client])

    def _spill(self, client: str, runtime: ClientRuntime) -> None:
        state = runtime.state()
        if state is not None:
            self.store.write_current(client, {**state, "answered": self._last_answer(client)})
            self.spilled.add(client)
        else:
            self.changed.discard(client)

    def _last_answer(self, client: str) -> dict[str, Any]:
        number, reply = self.answered[client]
        with suppress(MessageError):
            encoded_size(reply)
            return {"number": number, "reply": reply}
        return {"number": number, "reply": None}  # a reply that cannot be encoded

    def adopt_stored(self) -> None:
        """Count clients as changed that another process stored in the middle of a round.

        That process died, and nobody has asked them for anything since.
        """
        for client in self.clients:
            if client not in self.runtimes and self.store.has_current(client):
                self.changed.add(client)
                self.spilled.add(client)

    def save(self, round: int) -> None:
        """Store a snapshot of every client that changed since the last one.

        The server has all answers by now, so that only the number of the last one is stored.
        """
        for client in sorted(self.changed):
            if client in self.spilled:
                self.store.snapshot(client, None, round)
                continue
            state = self.runtimes[client].state()
            if state is not None:
                last = {"number": self.answered[client][0], "reply": None}
                self.store.snapshot(client, {**state, "answered": last}, round)
        self.changed.clear()
        self.spilled.clear()

    def release(self, client: str) -> None:
        """Store a client and drop it here, so that another host can hold it."""
        self.store_client(client)
        self.runtimes.pop(client, None)
        self.answered.pop(client, None)
        self.changed.discard(client)
        self.spilled.discard(client)

    def forget(self) -> None:
        """Drop all clients from memory; their next request continues from the store."""
        self.runtimes.clear()
        self.changed.clear()
        self.spilled.clear()
        self.answered.clear()
