"""The engine contract: what carries the server's calls to the clients and their replies back.

`Federation` uses an `Engine`. Engines a user can name are listed in `unalike.engines.ENGINES` and
are of one of two kinds, told apart by the class attribute `hosts_clients`:

- a `HostingEngine` holds the clients itself and is used by a server in this process;
- a `RemoteLauncher` starts the server's program where the server of a federation of several
  organisations is. The clients are with their owners.

Options a user may set are the keyword-only arguments of the constructor; their annotations are
checked (pydantic) before anything is built.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from unalike.base.message import MAX_BYTES, Value
from unalike.core.client import Client, ClientInfo

if TYPE_CHECKING:
    from unalike.core.client_stack import StackedReplies
    from unalike.core.runtime import ClientRuntime

Watch = Callable[..., None]  # watch(event, **facts): follows a run


@dataclass(frozen=True)
class Sent:
    """A message in flight.

    Attributes:
        at: when it was sent, in seconds of the engine's clock.
        like: names and shapes of its tensors; a reply field of the same name must have them too.
    """

    client: str
    operation: str
    round: int
    at: float
    like: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Arrival:
    """A reply as an engine delivers it.

    Attributes:
        at: when it arrived, in seconds of the engine's clock.
        size: bytes of the encoded reply, also where it was never encoded.
        reply: `{"number", "body"}`, or `{"number", "failure"}` where the client failed.
        stack: where clients of this process replied as one: all these replies, and its number.
    """

    client: str
    at: float
    size: int
    reply: dict[str, Any]
    stack: "tuple[StackedReplies, int] | None" = None


@dataclass(frozen=True)
class EngineSettings:
    """What a run asks of every hosting engine, whatever the engine's own options are.

    Attributes:
        max_loaded_clients: clients in memory at once; those idle longest wait on disk.
        max_message_bytes: longer messages are refused.
        tick: seconds; on a simulated clock replies arrive at the next multiple. 0: at once.
    """

    max_loaded_clients: int = 256
    max_message_bytes: int = MAX_BYTES
    tick: float = 0.0


class Engine(Protocol):
    """Carries messages to clients and replies back.

    Every message is answered: for a client that does not answer within the engine's own time
    limit, the engine answers with a failure.

    Attributes:
        repeated: (client, operation) of everything a client had to do again because its process
            died; whoever counts privacy releases takes entries out.
    """

    repeated: list[tuple[str, str]]

    @property
    def now(self) -> float:
        """The engine's clock in seconds, simulated or real."""

    def rewind_clock(self, at: float) -> None:
        """Set a simulated clock back to `at`: nobody waited longer. A real clock ignores it."""

    def infos(self) -> Mapping[str, ClientInfo]:
        """What each client announces, by id."""

    def send(self, messages: dict[str, dict[str, Value]]) -> dict[str, int]:
        """Send one message to each of some clients.

        Args:
            messages: `{"operation", "number", "round", "turn", "body"}` by client.
        Returns: the size of each in bytes, by client.
        """

    def receive(self, numbers: set[int], until: float = math.inf) -> list[Arrival]:
        """Wait for replies to the messages with these numbers.

        Returns: all replies of the next instant; on a real clock, those that have come. None
            where nothing is in flight, or once `now` is past `until` (a simulated clock need not
            stop there).
        """

    def drop(self, numbers: set[int]) -> None:
        """Deliver no replies to these messages: nobody waits for them any more."""

    def pending(self) -> list[dict[str, Any]]:
        """Replies computed but not delivered, as plain values that `load` takes back."""

    def save(self, round: int) -> None:
        """Write the state of every client as of the end of this round."""

    def load(self, round: int, now: float, pending: list[dict[str, Any]]) -> None:
        """Go back to what was saved after `round` (0: nothing), with the clock at `now`."""

    def close(self) -> None:
        """End all processes of this engine. States that were saved stay."""


class HostingEngine(Engine, Protocol):
    """An engine that holds the clients of a run. Its class is listed in `ENGINES`."""

    hosts_clients: ClassVar[bool] = True
    # Whether clients compute on this machine, so that their device must exist here.
    uses_this_machine: ClassVar[bool] = False
    # Whether it takes `LazyClients`, building each when it first takes part.
    takes_lazy_clients: ClassVar[bool] = False

    def __init__(
        self,
        clients: Sequence[Client],
        build_runtime: Callable[[Client], "ClientRuntime"],
        folder: Path,
        settings: EngineSettings,
    ) -> None:
        """Take the clients in.

        Args:
            clients: at least one; their ids differ.
            build_runtime: makes what runs a client's operations, when it is first called.
            folder: where states of clients are stored.
            settings: limits of the run.
            **: keyword-only arguments are the engine's own options.
        Raises: UserError where an option does not fit the clients or the machine.
        """

    @classmethod
    def shares_process(cls, options: Mapping[str, Any]) -> bool:
        """Whether, with these options, clients compute in this process, which may then use CUDA."""
        return False


class RunFolder(Protocol):
    """What a launcher needs of a run's folder (`unalike.runs.run_folder.Folder`)."""

    path: Path

    @property
    def config(self) -> dict[str, Any]:
        """The run's config.yaml."""


class RemoteLauncher(Protocol):
    """Runs a federation whose clients are with other organisations. Listed in `ENGINES`, too."""

    hosts_clients: ClassVar[bool] = False
    uses_this_machine: ClassVar[bool] = False
    # Whether a message takes seconds, however small it is (`Algorithm.for_engine`).
    slow_messages: ClassVar[bool] = False

    def __init__(self, folder: RunFolder) -> None:
        """Prepare what is described in the run's folder; options are keyword-only arguments."""

    def launch(self, watch: Watch) -> dict[str, Any]:
        """Start the server's program, follow it to its end and return the run's results."""
