"""The server's end of a cross-silo engine: messages leave as bytes on a `Transport`.

Knows nothing of what is behind the transport (FLARE, Flower, or a function call in tests).
"""

import math
import queue
from collections.abc import Callable, Mapping, Set
from concurrent.futures import Future
from functools import partial
from typing import Any, ClassVar, Protocol

from unalike.base.errors import UserError
from unalike.base.message import MAX_BYTES, MessageError, Value, decode, encode, require_dict
from unalike.core.admission import parse_info
from unalike.core.client import VERSION, ClientInfo
from unalike.core.engine import Arrival
from unalike.core.participation import one_line
from unalike.engines.process import EngineError
from unalike.engines.realtime import RealTimeEngine, pack_messages, parse_reply

POLL = 0.5  # seconds between checks whether the transport still works


class Transport(Protocol):
    """Carries bytes to clients and back."""

    def names(self) -> list[str]:
        """Names of the clients that can be reached, as the transport knows them."""

    def admit(self, name: str, id: str) -> None:
        """Let the client of that name take part as `id`, which `request` takes from then on.

        Raises: ValueError where it may not be called so.
        """

    def request(
        self,
        client: str,
        action: str,
        data: bytes,
        run: str,
        place: str,
        timeout: float,
        tensors: bytearray | None = None,
    ) -> "Future[bytes]":
        """Send a request to a client; the future is its answer.

        Args:
            client: its id, or its name where it was not admitted.
            action: what to do: hello, begin, call or save (`ClientEndpoint`).
            data: the message.
            run: id of the run.
            place: "clients" in the federated run, "alone" in the local baseline.
            timeout: seconds until the future must have failed.
            tensors: the tensors of a large message; the same object where it goes to several.
        """

    def check(self) -> None:
        """Raise EngineError where the transport is broken for good."""


class RemoteEngine(RealTimeEngine):
    """An engine whose clients are at the other end of a transport.

    Args:
        transport: to clients that a `handshake` admitted.
        run: id of the run.
        place: "clients" in the federated run, "alone" in the local baseline.
        infos: what the clients announced.
        begin: what they are sent before the first round: method, training and seed.
        limit: bytes a message may have.
        timeout: seconds until a client that does not answer has failed.
    """

    shares_features: ClassVar[bool] = False

    def __init__(
        self,
        transport: Transport,
        run: str,
        place: str,
        infos: Mapping[str, ClientInfo],
        begin: dict[str, Value],
        limit: int = MAX_BYTES,
        timeout: float = 600.0,
    ):
        super().__init__()
        self.transport = transport
        self.run = run
        self.place = place
        self.client_infos = infos
        self.begin = begin
        self.limit = limit
        self.timeout = timeout
        self.unanswered: dict[int, str] = {}  # client of each message in flight
        self.dropped: set[int] = set()
        # Why a client refused the run; it is left out since.
        self.left_out: dict[str, str] = {}
        # Why a client could not save; it is asked nothing until it can.
        self.unsaved: dict[str, str] = {}
        self.inbox: queue.Queue[tuple[int, Future[bytes]]] = queue.Queue()

    def send(self, messages: dict[str, dict[str, Value]]) -> dict[str, int]:
        """Send one message to each of some clients; returns their sizes in bytes."""
        sizes = {}
        for message in pack_messages(messages, self.limit):
            client = message.client
            sizes[client] = message.size
            self.unanswered[message.number] = client
            reason = self.left_out.get(client) or self.unsaved.get(client)
            if reason:
                answer: Future[bytes] = Future()
                answer.set_exception(EngineError(reason))
            else:
                answer = self._request(client, "call", bytes(message.data), message.tensors)
            answer.add_done_callback(partial(self._put_into_inbox, message.number))
        return sizes

    def _request(
        self, client: str, action: str, data: bytes, tensors: bytearray | None = None
    ) -> "Future[bytes]":
        return self.transport.request(
            client, action, data, self.run, self.place, self.timeout, tensors
        )

    def _put_into_inbox(self, number: int, answer: "Future[bytes]") -> None:
        self.inbox.put((number, answer))

    def _in_flight(self) -> Set[int]:
        return self.unanswered.keys()

    def drop(self, numbers: set[int]) -> None:
        """Deliver no replies to these messages."""
        self.dropped |= self.unanswered.keys() & numbers
        super().drop(numbers)

    def _wait_for_replies(self, until: float = math.inf) -> None:
        seconds = max(0.0, min(POLL, until - self.now))
        try:
            self._take_answer(*self.inbox.get(timeout=seconds))
        except queue.Empty:
            self.transport.check()
            return
        while not self.inbox.empty():
            self._take_answer(*self.inbox.get())

    def _take_answer(self, number: int, answer: "Future[bytes]") -> None:
        """Parse one answer. Its bytes, which may be many, are freed when this returns."""
        client = self.unanswered.pop(number, None)
        if client is None:
            return  # a message of before the engine went back to a checkpoint
        try:
            data = answer.result()
            size = len(data)
            reply = parse_reply(data, number, self.limit)
        except Exception as error:
            self.transport.check()
            size = 0
            reply = {"number": number, "failure": str(error)}
        if number in self.dropped:
            self.dropped.discard(number)
        else:
            self.arrivals[number] = Arrival(client, self.now, size, reply)

    def save(self, round: int) -> None:
        """Have every client save its state. One that cannot is asked nothing until it can."""
        self.unsaved = self._request_all("save", {"round": round})

    def load(self, round: int, now: float, pending: list[dict[str, Any]]) -> None:
        """Have every client go back to its state after a round. One that refuses is left out.

        Raises: UserError where all refuse the run.
        """
        self.restore_pending(now, pending)
        self.unanswered = {}
        self.dropped = set()
        self.left_out = {}
        self.unsaved = {}
        problems = self._request_all("begin", {**self.begin, "round": round})
        if len(problems) == len(self.client_infos):
            raise UserError("; ".join(f"client {c}: {reason}" for c, reason in problems.items()))
        self.left_out = problems

    def _request_all(self, action: str, content: dict[str, Value]) -> dict[str, str]:
        """Have every client do something.

        Returns: why it failed, by client, for those where it did.
        """
        data = bytes(encode(content))
        clients = [client for client in self.client_infos if client not in self.left_out]
        answers = {client: self._request(client, action, data) for client in clients}
        failures = {}
        for client, answer in answers.items():
            reply = await_reply(answer, self.transport.check)
            if "failure" in reply:
                failures[client] = one_line(reply["failure"])
        return failures

    def close(self) -> None:
        """Do nothing: clients are in processes of their owners."""


def handshake(
    transport: Transport,
    about: dict[str, Value],
    timeout: float,
    installed: dict[str, dict[str, str]] | None = None,
) -> tuple[dict[str, ClientInfo], dict[str, str]]:
    """Ask everyone on a transport who it is, and admit those that fit.

    Args:
        about: what clients are told of the run: its name, method and seed.
        timeout: seconds each has to answer.
        installed: filled with the versions of packages that clients tell, by id.
    Returns: what the admitted clients announced, by id; and why others were refused, by name.
    """
    data = bytes(encode({"version": VERSION, "about": about}))
    answers = {}
    for name in transport.names():
        answers[name] = transport.request(name, "hello", data, "", "clients", timeout)
    infos: dict[str, ClientInfo] = {}
    refused: dict[str, str] = {}
    for name, answer in answers.items():
        reply = await_reply(answer, transport.check)
        if "failure" in reply:
            refused[name] = one_line(reply["failure"])
            continue
        version = reply.get("version")
        if type(version) is not int or version != VERSION:
            refused[name] = (
                f"it speaks version {one_line(version)[:20]} of the protocol, "
                f"this server {VERSION}: install the same unalike"
            )
            continue
        try:
            info = parse_info(reply.get("card"))
            transport.admit(name, info.id)
            infos[info.id] = info
            versions = reply.get("versions")
            if installed is not None and isinstance(versions, dict):
                installed[info.id] = {str(k)[:40]: str(v)[:40] for k, v in versions.items()}
        except ValueError as error:
            refused[name] = str(error)
    return infos, refused


def await_reply(answer: "Future[bytes]", check: Callable[[], None]) -> dict[str, Any]:
    """Wait for an answer and decode it; where there is none, return `{"failure": reason}`.

    Args:
        check: raises where waiting has become useless.
    """
    while not answer.done():
        try:
            answer.exception(timeout=POLL)
        except TimeoutError:
            check()
    try:
        return require_dict(decode(answer.result()))
    except MessageError as error:
        return {"failure": f"its reply is no message: {error}"}
    except Exception as error:
        check()
        return {"failure": str(error)}
