"""A process of the Ray engine where clients live: answers bytes with bytes and stores clients often enough. Knows nothing of the server."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unalike.base.message import encode
from unalike.core.client import Client
from unalike.engines.host import Host
from unalike.engines.process import EngineError
from unalike.engines.store import Store

KEEP = 2.0  # seconds of work until clients are stored in the middle of a round: that much may have to be done again


class Place:
    """A host of some clients, once they are given, and the folder they are stored in."""

    host: Host

    def __init__(self, folder: Path, token: str, alive: int, limit: int, threads: int):
        torch.set_num_threads(threads)
        self.store, self.alive, self.limit = Fenced(folder, token), alive, limit
        self.store.check_token()
        self.worked, self.pause = (
            0.0,
            KEEP,
        )  # seconds since clients were stored, and until they are stored again

    def settle(self, given: tuple[list[Client], Callable[[Client], Any]]) -> tuple[bytes, str, int]:
        """These clients live here now, with their sides: what they tell at the door, and where it is."""
        import ray

        clients, build = given
        self.host = Host(clients, build, self.store, self.alive)
        told = encode({id: info.as_dict() for id, info in self.host.infos().items()})
        return bytes(told), ray.get_runtime_context().get_node_id(), os.getpid()

    def handle(self, client: str, operation: str, data: Any, rest: Any = None) -> tuple[Any, str]:
        """A reply, and whether the client changed: "yes", "no", or "kept" where all that changed here is in the store already."""
        begun = time.monotonic()
        reply = self.host.answer(
            client, memoryview(data), self.limit, memoryview(rest) if rest is not None else None
        )
        changed = "yes" if self.host.changes(client, operation) else "no"
        self.worked += time.monotonic() - begun
        if changed == "yes" and self.worked > self.pause:
            begun = time.monotonic()
            for each in list(self.host.changed):
                self.host.keep(each)
            self.worked, self.pause, changed = (
                0.0,
                max(KEEP, 10 * (time.monotonic() - begun)),
                "kept",
            )
        return np.frombuffer(reply, dtype=np.uint8), changed

    def save(self, round: int) -> None:
        self.host.save(round)
        self.worked = 0.0

    def forget(self) -> None:
        self.host.forget()


class Fenced(Store):
    """A store that only the actors of the newest server write to: those of one that was killed may still be at work."""

    def __init__(self, folder: Path, token: str):
        super().__init__(folder, keeps=3)
        self.token = token

    def check_token(self) -> None:
        try:
            found = seal(self.folder).read_text()
        except OSError:
            raise EngineError(
                f"the run's folder, {self.folder}, is not the same on the machine of this actor; on a cluster of several "
                "machines it must lie where all of them see it (--out)"
            ) from None
        if found != self.token:
            raise EngineError("another server has taken this run over")

    def keep(self, name: str, state: Any) -> None:
        self.check_token()
        super().keep(name, state)

    def snapshot(self, name: str, state: Any | None, round: int) -> None:
        self.check_token()
        super().snapshot(name, state, round)


def seal(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.token")
