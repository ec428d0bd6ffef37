"""What engines on a real clock share: replies are kept as they arrive until the server wants them.

Knows no transport.
"""

import math
import time
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from unalike.base.message import MessageError, decode, encode_header, encode_tensors
from unalike.core.client import ClientInfo
from unalike.core.engine import Arrival
from unalike.core.signatures import validator_for
from unalike.engines.host import Answer

# Messages up to this many bytes are sent in one piece. Tensors of larger ones are encoded apart,
# once for all clients that get the same ones.
ONE_PIECE_BYTES = 100_000


class RealTimeEngine:
    """Base class of engines whose clients take real time.

    A subclass says which messages are in flight (`_in_flight`), waits for what comes next
    (`_wait_for_replies`) and puts it into `arrivals`.
    """

    def __init__(self) -> None:
        self.start_time = time.monotonic()
        self.client_infos: Mapping[str, ClientInfo] = {}
        self.arrivals: dict[int, Arrival] = {}  # not yet delivered, by message number
        self.repeated: list[tuple[str, str]] = []

    def _in_flight(self) -> Set[int]:
        """Numbers of messages that are not answered."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say which messages are in flight: write _in_flight()"
        )

    def _wait_for_replies(self, until: float = math.inf) -> None:
        """Wait for at least one reply, not beyond `until`; put what comes into `arrivals`."""
        raise NotImplementedError(
            f"{type(self).__name__} does not wait for replies: write _wait_for_replies(until)"
        )

    @property
    def now(self) -> float:
        """Seconds since the engine was made, or since the run began where it was resumed."""
        return time.monotonic() - self.start_time

    def rewind_clock(self, at: float) -> None:
        """Do nothing: real time goes on."""

    def infos(self) -> Mapping[str, ClientInfo]:
        """What each client announces, by id."""
        return self.client_infos

    def receive(self, numbers: set[int], until: float = math.inf) -> list[Arrival]:
        """Wait until there are replies to some of these messages and return them in order."""
        while not self.arrivals.keys() & numbers:
            if self.now >= until or not self._in_flight() & numbers:
                return []
            self._wait_for_replies(until)
        arrivals = [self.arrivals.pop(number) for number in self.arrivals.keys() & numbers]
        return sorted(arrivals, key=lambda arrival: arrival.at)

    def drop(self, numbers: set[int]) -> None:
        """Deliver no replies to these messages."""
        for number in self.arrivals.keys() & numbers:
            del self.arrivals[number]

    def pending(self) -> list[dict[str, Any]]:
        """Replies that were not delivered.

        All messages in flight are waited for, so that states of clients and of the server are
        saved as of one moment.
        """
        while self._in_flight():
            self._wait_for_replies()
        return [
            {"at": a.at, "order": i, "client": a.client, "size": a.size, "reply": a.reply}
            for i, a in enumerate(self.arrivals.values())
        ]

    def restore_pending(self, now: float, pending: list[dict[str, Any]]) -> None:
        """Set the clock to `now` and take back what `pending` returned."""
        self.start_time = time.monotonic() - now
        self.arrivals = {}
        for entry in pending:
            number = entry["reply"]["number"]
            self.arrivals[number] = Arrival(
                client=entry["client"], at=entry["at"], size=entry["size"], reply=entry["reply"]
            )


@dataclass(frozen=True)
class PackedMessage:
    """An encoded message.

    Attributes:
        size: bytes in all.
        data: all of them, or those before the tensors.
        tensors: the bytes of the tensors, where they are apart; the same object for all clients
            that get the same tensors.
    """

    client: str
    number: int
    operation: str
    size: int
    data: bytearray
    tensors: bytearray | None


def pack_messages(messages: dict[str, dict[str, Any]], limit: int) -> Iterator[PackedMessage]:
    """Encode messages to several clients; large tensors they have in common are encoded once.

    Args:
        messages: by client.
        limit: bytes a message may have.
    """
    encoded: dict[tuple[int, ...], bytearray] = {}  # by the identity of the tensors
    for client, message in messages.items():
        data, tensors, size = encode_header(message, limit)
        tensor_bytes = None
        if size <= ONE_PIECE_BYTES:
            data += encode_tensors(tensors)
        else:
            key = tuple(map(id, tensors))
            if key not in encoded:
                encoded[key] = encode_tensors(tensors)
            tensor_bytes = encoded[key]
        yield PackedMessage(
            client=client,
            number=message["number"],
            operation=message["operation"],
            size=size,
            data=data,
            tensors=tensor_bytes,
        )


def parse_reply(data: Any, number: int, limit: int, form: Any = Answer) -> dict[str, Any]:
    """Decode the reply to message `number`; where it is not one, return a failure instead."""
    try:
        reply: Any = decode(memoryview(data), limit)
        problem = validator_for(form)(reply, {}, "it")
        if problem:
            raise MessageError(problem)
        if reply["number"] != number:
            raise MessageError(f"it answers message {str(reply['number'])[:20]}, not {number}")
        if "body" not in reply and "failure" not in reply:
            raise MessageError("it has neither a body nor a failure")
    except (MessageError, TypeError) as error:
        return {"number": number, "failure": f"its reply is no message: {error}"}
    return reply
