"""A process of the Ray engine that holds clients. Knows nothing of the server."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from unalike.base.message import encode
from unalike.core.client import Client
from unalike.core.runtime import ClientRuntime
from unalike.engines.host import Host
from unalike.engines.process import EngineError
from unalike.engines.store import Store

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

TAKE_OVER_TIMEOUT = 60.0  # seconds that a new server waits for actors of the one before it
# Seconds of work after which clients are stored in the middle of a round. That much may have to be
# done again when the process dies.
STORE_EVERY = 2.0
STORE_SHARE = 10  # work at least this many times as long as storing takes


class ClientActor:
    """A Ray actor with a host of some clients, which come with `take_clients`.

    Args:
        folder: where states of clients are stored.
        token: of the server that started this actor (`FencedStore`).
        max_loaded_clients: clients in memory at once.
        limit: bytes a message may have.
        threads: that torch may use.
    """

    host: Host

    def __init__(
        self, folder: Path, token: str, max_loaded_clients: int, limit: int, threads: int
    ) -> None:
        torch.set_num_threads(threads)
        self.store = FencedStore(folder, token)
        self.store.check_token()
        self.max_loaded_clients = max_loaded_clients
        self.limit = limit
        self.unstored_work = 0.0  # seconds of work since clients were stored
        self.store_after = STORE_EVERY

    def take_clients(
        self, contents: tuple[list[Client], Callable[[Client], ClientRuntime]]
    ) -> tuple[bytes, str, int]:
        """Hold these clients from now on.

        Args:
            contents: the clients, and what builds their runtimes.
        Returns: what the clients announce, encoded; the id of this machine in Ray; this process.
        """
        import ray

        clients, build_runtime = contents
        self.host = Host(clients, build_runtime, self.store, self.max_loaded_clients)
        infos = encode({id: info.as_dict() for id, info in self.host.infos().items()})
        return bytes(infos), ray.get_runtime_context().get_node_id(), os.getpid()

    def handle(
        self, client: str, operation: str, data: Any, tensors: Any = None
    ) -> tuple[Any, str]:
        """Answer one message.

        Args:
            data: the encoded message, or what comes before its tensors.
            tensors: the encoded tensors, where they are apart.
        Returns: the encoded reply; and whether the client changed: "yes", "no", or "stored" where
            every change of clients here is on disk.
        """
        start = time.monotonic()
        tensor_bytes = memoryview(tensors) if tensors is not None else None
        reply = self.host.answer(client, memoryview(data), self.limit, tensor_bytes)
        changed = "yes" if self.host.changes(client, operation) else "no"
        self.unstored_work += time.monotonic() - start
        if changed == "yes" and self.unstored_work > self.store_after:
            self._store_clients()
            changed = "stored"
        return np.frombuffer(reply, dtype=np.uint8), changed

    def _store_clients(self) -> None:
        start = time.monotonic()
        for client in list(self.host.changed):
            self.host.store_client(client)
        self.unstored_work = 0.0
        self.store_after = max(STORE_EVERY, STORE_SHARE * (time.monotonic() - start))

    def save(self, round: int) -> None:
        """Store all clients as of the end of a round."""
        self.host.adopt_stored()
        self.host.save(round)
        self.unstored_work = 0.0

    def forget(self) -> None:
        """Drop what is in memory: clients go on from what is stored."""
        self.host.forget()


class FencedStore(Store):
    """A store to which only actors of the newest server can write.

    Actors of a server that was killed may still be at work. So each server writes a token of its
    own beside the store, and an actor checks it before it writes.
    """

    def __init__(self, folder: Path, token: str):
        super().__init__(folder, snapshots=3)
        self.token = token

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Check the token, and keep it as it is inside.

        A server that takes the run over waits until whatever was begun is written. Without that,
        an actor that is slow could write into what the new server has already rewound.
        """
        with _open_token(self.folder) as file:
            if fcntl is not None:
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(file, fcntl.LOCK_SH)
            self.check_token()
            yield

    def check_token(self) -> None:
        """Raise EngineError where another server has taken the run over."""
        with _open_token(self.folder) as file:
            token = file.read()
        if token != self.token:
            raise EngineError("another server has taken this run over")

    def write_current(self, name: str, state: Any) -> None:
        """Write a client's state in the middle of a round (`Store.write_current`)."""
        with self.writing():
            super().write_current(name, state)

    def snapshot(self, name: str, state: Any | None, round: int) -> None:
        """Write the state of a client at the end of a round (`Store.snapshot`)."""
        with self.writing():
            super().snapshot(name, state, round)


def _open_token(folder: Path) -> IO[str]:
    try:
        return token_path(folder).open()
    except OSError:
        raise EngineError(
            f"the run's folder, {folder}, is not the same on the machine of this actor; "
            "on a cluster of several machines it must lie where all of them see it (--out)"
        ) from None


def take_over(folder: Path, token: str) -> None:
    """Let only actors with this token write to a store, once those at work have written.

    Raises: EngineError where an actor of an earlier server does not end.
    """
    deadline = time.monotonic() + TAKE_OVER_TIMEOUT
    with token_path(folder).open("a+") as file:
        while fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"an actor of an earlier server still writes to {folder}, for more than "
                        f"{TAKE_OVER_TIMEOUT:g} s: end it, then resume the run"
                    ) from None
                time.sleep(0.05)
            except OSError:  # a file system without locks
                break
        file.truncate(0)
        file.write(token)


def token_path(folder: Path) -> Path:
    """The file beside a store with the token of the server that may write to it."""
    return folder.with_name(f"{folder.name}.token")
