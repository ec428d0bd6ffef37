"""What engines share whose clients take real time: replies stay as they came until they are asked for. Knows no transport."""

import math
import time
from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any

from unalike.base.message import MessageError, decode, encode_header, encode_tensors
from unalike.core.client import ClientInfo
from unalike.core.engine import Arrival
from unalike.core.signatures import look
from unalike.engines.host import Answer

SMALL = 100_000  # bytes of a message that is one parcel; of a larger one its tensors go apart, for several at once


class RealTime:
    """An engine says who is awaited (`_awaited`) and waits for what comes next (`_listen`), which it puts in `arrived`."""

    def __init__(self) -> None:
        self.since = time.monotonic()
        self.told: dict[str, ClientInfo] = {}
        self.arrived: dict[int, Arrival] = {}  # not yet delivered, by number

    def _awaited(self) -> Set[int]:
        raise NotImplementedError(
            f"{type(self).__name__} does not say which messages are not yet answered: write _awaited()"
        )

    def _listen(self, until: float = math.inf) -> None:
        raise NotImplementedError(
            f"{type(self).__name__} does not wait for replies: write _listen(until)"
        )

    @property
    def now(self) -> float:
        return time.monotonic() - self.since

    def rewind_clock(self, at: float) -> None:
        """Real time goes on."""

    def infos(self) -> dict[str, ClientInfo]:
        return self.told

    def receive(self, numbers: set[int], until: float = math.inf) -> list[Arrival]:
        while not (here := self.arrived.keys() & numbers):
            if self.now >= until or not self._awaited() & numbers:
                return []
            self._listen(until)
        return [
            self.arrived.pop(number)
            for number in sorted(here, key=lambda number: self.arrived[number].at)
        ]

    def drop(self, numbers: set[int]) -> None:
        for number in self.arrived.keys() & numbers:
            del self.arrived[number]

    def pending(self) -> list[dict[str, Any]]:
        """Everyone under way is waited for: what is saved of clients and of the server is of one moment."""
        while self._awaited():
            self._listen()
        return [
            {"at": a.at, "order": i, "client": a.client, "size": a.size, "reply": a.reply}
            for i, a in enumerate(self.arrived.values())
        ]

    def restart(self, now: float, pending: list[dict[str, Any]]) -> None:
        """As it was when this was pending."""
        self.since = time.monotonic() - now
        self.arrived = {
            p["reply"]["number"]: Arrival(p["client"], p["at"], p["size"], p["reply"])
            for p in pending
        }


@dataclass(frozen=True)
class Parcel:
    """A message as it goes out: its bytes, or of a large one the `head` of them and the `rest`."""

    client: str
    number: int
    operation: str
    size: int
    data: bytearray
    rest: bytearray | None


def parcels(messages: dict[str, dict[str, Any]], limit: int) -> Iterator[Parcel]:
    """Messages as bytes; what is the same for several, and large, is there once."""
    made: dict[tuple[int, ...], bytearray] = {}
    for client, message in messages.items():
        data, tensors, size = encode_header(message, limit)
        rest = None
        if size <= SMALL:
            data += encode_tensors(tensors)
        elif (rest := made.get(same := tuple(map(id, tensors)))) is None:
            rest = made[same] = encode_tensors(tensors)
        yield Parcel(client, message["number"], message["operation"], size, data, rest)


def info(told: dict[str, Any]) -> ClientInfo:
    """A card from what a client's host told: lists are tuples there."""
    fields: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in told.items()
    }
    return ClientInfo(**fields)


def read(data: Any, number: int, limit: int) -> dict[str, Any]:
    """A reply from its bytes; from anything else, a failure."""
    try:
        reply: Any = decode(memoryview(data), limit)
        if wrong := look(Answer)(reply, {}, "it"):
            raise MessageError(wrong)
        if reply["number"] != number or not ("body" in reply or "failure" in reply):
            raise MessageError(
                f"it answers message {str(reply['number'])[:20]}, not {number}, or holds nothing"
            )
    except (MessageError, TypeError) as error:
        return {"number": number, "failure": f"its reply is no message: {error}"}
    return reply
