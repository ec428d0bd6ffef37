"""Where clients live: builds their sides when first called, answers messages, keeps states. Every engine has one or more.

Knows sides only as things with operations and a state.
"""

import os
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NotRequired, TypedDict

from unalike.base.errors import Refusal
from unalike.base.message import MAX_BYTES, MessageError, Value, decode, encode, encoded_size
from unalike.core.client import Client, ClientInfo
from unalike.core.incidents import Incident
from unalike.core.signatures import look
from unalike.engines.store import Store


class Request(TypedDict):
    """What a client is sent."""

    operation: str
    number: int
    round: int
    turn: int
    body: dict


class Answer(TypedDict):
    """What it sends back."""

    number: int
    body: NotRequired[Any]
    failure: NotRequired[str]
    work: NotRequired[float]


class Host:
    """Some clients of a federation in one process; those idle longest are spilled to disk when more than `alive` are in memory.

    Where the server is another organisation's, `report` keeps what fails: it is told that something did and under which number, never
    why. Without, on one machine, it is told the reason.
    """

    def __init__(
        self,
        clients: list[Client],
        program: Callable[[Client], Any],
        store: Store,
        alive: int = 256,
        report: Callable[[Incident], None] | None = None,
    ):
        self.report = report
        self.incidents: deque[Incident] = deque(
            maxlen=100
        )  # the last failures, with their tracebacks
        self.clients = {client.id: client for client in clients}
        self.program, self.store, self.alive = program, store, alive
        self.programs: OrderedDict[str, Any] = OrderedDict()
        self.changed: set[str] = set()  # since the last snapshot
        self.spilled: set[str] = set()  # changed, and on disk
        self.answered: dict[
            str, tuple[Any, dict[str, Any] | None]
        ] = {}  # number of the last message; reply, where it may be asked for

    def infos(self) -> dict[str, ClientInfo]:
        return {id: client.info() for id, client in self.clients.items()}

    def handle(self, client: str, message: dict[str, Value]) -> dict[str, Any]:
        """Run one operation. A message seen before gets the same answer and changes nothing, be it that the client was on disk since."""
        if wrong := look(Request)(message, {}, "the message"):
            told: Any = message.get("number") if isinstance(message, dict) else None
            return {
                "number": told if isinstance(told, int) else 0,
                "failure": f"it refuses what it was sent: {wrong}",
            }
        number: Any = message["number"]
        try:
            self.wake(client)
            if self._seen(client, number):
                last, reply = self.answered[client]
                old = {"number": number, "failure": f"message {number} was answered before"}
                return reply if number == last and reply is not None else old
            reply = {"number": number, **self._run(client, message)}
        except Exception as error:
            if os.environ.get("UNALIKE_DEBUG"):
                raise
            reply = {
                "number": number,
                "failure": self._failure(client, message["operation"], error),
            }
        self.answered[client] = (number, reply)
        return reply

    def answer(self, client: str, data: Any, limit: int = MAX_BYTES, rest: Any = None) -> bytearray:
        """`handle` for a message that came as bytes, whole or in two parts, or for bytes that are none; the answer leaves as bytes."""
        try:
            message: Any = decode(data, limit, rest)
        except MessageError as error:
            return encode({"number": 0, "failure": str(error)})
        reply = self.handle(client, message)
        try:
            return encode(reply, limit)
        except MessageError as error:
            return encode(
                {
                    "number": reply["number"],
                    "failure": self._failure(client, message["operation"], error),
                }
            )

    def _failure(self, client: str, operation: Any, error: Exception) -> str:
        """What the server is told of a failure."""
        if isinstance(error, Refusal):
            return str(error)
        incident = Incident.of(error, client, operation)
        self.incidents.append(incident)
        if self.report is None:
            return (
                f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            )
        self.report(incident)
        return incident.sentence

    def _note(self, client: str, operation: str, error: BaseException) -> None:
        """A failure that privacy keeps from the server; here it is said."""
        incident = Incident.of(error, client, operation)
        self.incidents.append(incident)
        if self.report is not None:
            self.report(incident)
        else:
            warnings.warn(
                f"client {client} failed at {operation}, with privacy it sends an update of nothing instead: {incident.reason}",
                RuntimeWarning,
                stacklevel=2,
            )

    def handle_all(self, messages: dict[str, dict[str, Value]]) -> dict[str, dict[str, Any]]:
        """Answers of several clients. Those who are alike and are asked the same thing, in an operation written for several, are asked
        at once; should that fail, one by one, so that only the culprit does."""
        replies: dict[str, dict[str, Any]] = {}
        for alike in self._groups(messages):
            if len(alike) > 1:
                with suppress(Exception):
                    replies |= self._run_together({client: messages[client] for client in alike})
        return {
            client: replies[client] if client in replies else self.handle(client, message)
            for client, message in messages.items()
        }

    def _groups(self, messages: dict[str, dict[str, Value]]) -> list[list[str]]:
        groups: dict[Any, list[str]] = {}
        for client, message in messages.items():
            name, body = message["operation"], message["body"]
            if len(messages) > self.alive or not isinstance(body, dict):
                continue
            program = self.wake(client)
            if not self._seen(client, message["number"]) and hasattr(
                getattr(type(program), str(name), None), "together"
            ):
                groups.setdefault((name, tuple(sorted(body)), program.kind), []).append(client)
        return list(groups.values())

    def _seen(self, client: str, number: Any) -> bool:
        """Whether a client's state has this message in it: they come in the order of their numbers."""
        return client in self.answered and number <= self.answered[client][0]

    def _run_together(self, messages: dict[str, dict[str, Value]]) -> dict[str, dict[str, Any]]:
        programs = [self.wake(client) for client in messages]
        asked = list(messages.values())
        name: Any = asked[0]["operation"]
        if getattr(type(programs[0]), name).operation == "changes":
            self.changed |= messages.keys()
            self.spilled -= messages.keys()
        bodies = type(programs[0]).perform_together(
            programs, name, *([m[key] for m in asked] for key in ("round", "turn", "body"))
        )
        replies = {}
        for (client, message), program, body in zip(
            messages.items(), programs, bodies, strict=True
        ):
            replies[client] = {"number": message["number"], "body": body, "work": program.work}
            program.work = 0.0
            self.answered[client] = (message["number"], replies[client])
        return replies

    def changes(self, client: str, operation: str) -> bool:
        """Whether an operation of a client, which is awake, may change it."""
        return (
            client in self.programs
            and getattr(getattr(type(self.programs[client]), operation, None), "operation", None)
            == "changes"
        )

    def _run(self, client: str, message: dict[str, Value]) -> dict[str, Any]:
        program, body = self.wake(client), message["body"]
        name: Any = message["operation"]
        method = getattr(type(program), name, None) if isinstance(name, str) else None
        kind = getattr(method, "operation", None)
        if kind is None:
            raise Refusal(
                f"this client has no operation {name!r}; it has: {', '.join(operations(type(program)))}"
            )
        if kind == "changes":
            self.changed.add(client)
            self.spilled.discard(client)
        private = getattr(program, "privacy", None) is not None
        body = program.perform(name, message["round"], message["turn"], body)
        if private and program.failure is not None:
            self._note(client, name, program.failure)
            program.failure = None
        work, program.work = program.work, 0.0
        return {
            "body": body,
            "work": 0.0 if private and self.report is not None else work,
        }  # who fails does less of it

    def wake(self, client: str) -> Any:
        """Its side, in memory; from the store, or new, where it was not."""
        if client in self.programs:
            self.programs.move_to_end(client)
            return self.programs[client]
        program = self.program(self.clients[client])
        if (state := self.store.newest(client)) is not None:
            if (last := state.pop("answered", None)) is not None:
                self.answered[client] = (last["number"], last["reply"])
            program.restore(state)
        if self.store.unsettled(
            client
        ):  # spilled here or released elsewhere in the middle of a round
            self.changed.add(client)
            self.spilled.discard(client)
        self.programs[client] = program
        while len(self.programs) > self.alive:
            idle, sleeper = self.programs.popitem(last=False)
            if idle in self.changed:
                self._spill(idle, sleeper)
            self.answered.pop(idle, None)
        return program

    def keep(self, client: str) -> None:
        """The client as it is, to the store, with its last reply: should this process die, another goes on from here."""
        if client in self.changed and client not in self.spilled:
            self._spill(client, self.programs[client])

    def _spill(self, client: str, program: Any) -> None:
        if (state := program.state()) is not None:
            self.store.keep(client, {**state, "answered": self._last(client)})
            self.spilled.add(client)
        else:
            self.changed.discard(client)

    def _last(self, client: str) -> dict[str, Any]:
        number, reply = self.answered[client]
        with suppress(MessageError):
            encoded_size(reply)
            return {"number": number, "reply": reply}
        return {"number": number, "reply": None}  # it cannot be sent: nor kept

    def save(self, round: int) -> None:
        """Snapshots of those that changed since the last one. The server has all replies by now: the number of the last is enough."""
        for client in sorted(self.changed):
            if client in self.spilled:
                self.store.snapshot(client, None, round)
            elif (state := self.programs[client].state()) is not None:
                self.store.snapshot(
                    client,
                    {**state, "answered": {"number": self.answered[client][0], "reply": None}},
                    round,
                )
        self.changed.clear()
        self.spilled.clear()

    def release(self, client: str) -> None:
        """Let another host have this client: its state goes to the store."""
        self.keep(client)
        self.programs.pop(client, None)
        self.answered.pop(client, None)
        self.changed.discard(client)
        self.spilled.discard(client)

    def forget(self) -> None:
        """Memory is a cache: drop it, and go on from the store."""
        self.programs.clear()
        self.changed.clear()
        self.spilled.clear()
        self.answered.clear()


def operations(program: type) -> list[str]:
    return sorted(
        name for name in dir(program) if getattr(getattr(program, name), "operation", None)
    )
