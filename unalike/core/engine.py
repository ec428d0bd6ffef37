"""What an engine is to the server: it carries messages to clients and their replies back. Knows nothing of how."""

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

from unalike.base.message import Value
from unalike.core.client import ClientInfo


@dataclass(frozen=True)
class Sent:
    """A message under way; `like` is the outline of the tensors in it, which a reply of the same names must have."""

    client: str
    operation: str
    round: int
    at: float
    like: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Arrival:
    """A reply as an engine delivers it: `at` is the engine's clock in seconds, `size` the bytes it has (or would have) encoded."""

    client: str
    at: float
    size: int
    reply: dict[str, Any]


class Engine(Protocol):
    """What carries calls. Every message is answered: who does not within the engine's own time limit is answered for, with a failure."""

    repeated: list[tuple[str, str]]  # clients and operations that had to be done again

    @property
    def now(self) -> float: ...  # seconds, simulated or real
    def back(self, at: float) -> None: ...  # nobody waited longer; a real clock goes on
    def infos(self) -> dict[str, ClientInfo]: ...
    def send(self, messages: dict[str, dict[str, Value]]) -> dict[str, int]: ...  # sizes in bytes
    def receive(self, numbers: set[int], until: float = math.inf) -> list[Arrival]:
        """Replies to these messages: all of the next instant, or, on a real clock, what is there. None once `now` is past `until`
        (a simulated clock needs no such limit), or if nothing is under way."""

    def drop(self, numbers: set[int]) -> None: ...  # nobody waits for these replies any more
    def pending(self) -> list[dict[str, Any]]: ...  # replies computed but not delivered
    def save(self, round: int) -> None: ...
    def load(self, round: int, now: float, pending: list[dict[str, Any]]) -> None: ...
    def close(self) -> None: ...
