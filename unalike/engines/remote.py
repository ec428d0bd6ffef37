"""The server's end of an engine between organisations: calls go out as bytes on a line, replies come back. Knows no transport."""

import math
import queue
from collections.abc import Callable, Set
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from unalike.base.errors import UserError
from unalike.base.message import MAX_BYTES, MessageError, Value, decode, encode, require_dict
from unalike.core.client import VERSION, ClientInfo
from unalike.core.engine import Arrival
from unalike.engines.process import EngineError
from unalike.engines.realtime import RealTime, info, parcels, read

TICK = 0.5  # seconds between looks whether the line is still there


class Line(Protocol):
    """What carries bytes to clients known by name."""

    def names(self) -> list[str]: ...  # who can be reached
    def admit(self, name: str, id: str) -> None:
        """From now on the client `id` is the one reached by that name; ValueError where it may not be called so."""

    def ask(
        self,
        client: str,
        do: str,
        data: bytes,
        run: str,
        place: str,
        timeout: float,
        rest: bytearray | None = None,
    ) -> "Future[bytes]":
        """What the client answers. `rest` are more bytes of a large message, the same ones where they go to several."""

    def check(self) -> None:
        """Raises EngineError where the line is broken for good."""


class RemoteEngine(RealTime):
    """Carries calls over a line. A client that does not answer within `timeout` seconds has failed."""

    def __init__(
        self,
        line: Line,
        run: str,
        place: str,
        infos: dict[str, ClientInfo],
        begin: dict[str, Value],
        limit: int = MAX_BYTES,
        timeout: float = 600.0,
    ):
        super().__init__()
        self.line, self.run, self.place, self.told, self.limit, self.timeout = (
            line,
            run,
            place,
            infos,
            limit,
            timeout,
        )
        self.begin = begin  # what clients are told of the run
        self.asked: dict[int, str] = {}  # not yet answered: message and client
        self.dropped: set[int] = set()
        self.repeated: list[
            tuple[str, str]
        ] = []  # what was done again: nothing, but from a checkpoint on
        self.left: dict[str, str] = {}  # who is not there any more, and why
        self.inbox: queue.Queue[tuple[int, Future[bytes]]] = queue.Queue()

    def send(self, messages: dict[str, dict[str, Value]]) -> dict[str, int]:
        sizes = {}
        for each in parcels(messages, self.limit):
            sizes[each.client], self.asked[each.number] = each.size, each.client
            if each.client in self.left:
                answer: Future[bytes] = Future()
                answer.set_exception(EngineError(self.left[each.client]))
            else:
                answer = self.line.ask(
                    each.client,
                    "call",
                    bytes(each.data),
                    self.run,
                    self.place,
                    self.timeout,
                    each.rest,
                )
            answer.add_done_callback(partial(self._answered, each.number))
        return sizes

    def _answered(self, number: int, answer: "Future[bytes]") -> None:
        self.inbox.put((number, answer))

    def _awaited(self) -> Set[int]:
        return self.asked.keys()

    def drop(self, numbers: set[int]) -> None:
        self.dropped |= self.asked.keys() & numbers
        super().drop(numbers)

    def _listen(self, until: float = math.inf) -> None:
        """The next replies, but not beyond `until`."""
        try:
            self._take(*self.inbox.get(timeout=max(0.0, min(TICK, until - self.now))))
        except queue.Empty:
            self.line.check()
            return
        while not self.inbox.empty():
            self._take(*self.inbox.get())

    def _take(self, number: int, answer: "Future[bytes]") -> None:
        """A reply; its bytes, which may be many, are gone before the next is looked at."""
        if (client := self.asked.pop(number, None)) is None:
            return  # of before a checkpoint was gone back to
        try:
            data = answer.result()
            size, reply = len(data), read(data, number, self.limit)
        except Exception as error:
            self.line.check()
            size, reply = 0, {"number": number, "failure": str(error)}
        if number in self.dropped:
            self.dropped.discard(number)
        else:
            self.arrived[number] = Arrival(client, self.now, size, reply)

    # what is saved after a round

    def save(self, round: int) -> None:
        self.left |= self._all("save", {"round": round})

    def load(self, round: int, now: float, pending: list[dict[str, Any]]) -> None:
        self.restart(now, pending)
        self.asked, self.dropped = {}, set()
        if refused := self._all("begin", {**self.begin, "round": round}):
            raise UserError("; ".join(f"client {client}: {why}" for client, why in refused.items()))

    def _all(self, do: str, what: dict[str, Value]) -> dict[str, str]:
        """Have every client do something; who could not, and why."""
        data = bytes(encode(what))
        answers = {
            c: self.line.ask(c, do, data, self.run, self.place, self.timeout)
            for c in self.told
            if c not in self.left
        }
        replies = {client: heard(answer, self.line.check) for client, answer in answers.items()}
        return {
            client: str(reply["failure"]) for client, reply in replies.items() if "failure" in reply
        }

    def close(self) -> None:
        """Clients stay where they are."""


def greet(
    line: Line, about: dict[str, Value], timeout: float
) -> tuple[dict[str, ClientInfo], dict[str, str]]:
    """Who is there, and who is refused with what sentence."""
    data = bytes(encode({"version": VERSION, "about": about}))
    answers = {name: line.ask(name, "hello", data, "", "clients", timeout) for name in line.names()}
    infos: dict[str, ClientInfo] = {}
    refused: dict[str, str] = {}
    for name, answer in answers.items():
        reply = heard(answer, line.check)
        if "failure" in reply:
            refused[name] = str(reply["failure"])
        elif reply.get("version") != VERSION:
            version = str(reply.get("version"))[:20]
            refused[name] = (
                f"it speaks version {version} of the protocol, this server {VERSION}: install the same unalike"
            )
        else:
            try:
                made = info(require_dict(reply.get("card")))
                line.admit(name, made.id)
                infos[made.id] = made
            except TypeError as error:
                refused[name] = f"its card cannot be read: {error}"
            except ValueError as error:
                refused[name] = str(error)
    return infos, refused


def heard(answer: "Future[bytes]", check: Callable[[], None]) -> dict[str, Any]:
    """What was answered, or a failure."""
    while not answer.done():
        try:
            answer.exception(timeout=TICK)
        except TimeoutError:
            check()
    try:
        return require_dict(decode(answer.result()))
    except MessageError as error:
        return {"failure": f"its reply is no message: {error}"}
    except Exception as error:
        check()
        return {"failure": str(error)}


def members(config: dict[str, Any]) -> list[str]:
    """Ids of the clients of a scenario, in its order."""
    return [
        id
        for group in config.get("clients") or []
        for id in (
            [f"{group['id']}-{i}" for i in range(group["count"])]
            if group.get("count", 1) > 1
            else [group["id"]]
        )
    ]
