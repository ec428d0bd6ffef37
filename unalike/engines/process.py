"""A process that keeps some clients alive for the local engine. Talks in bytes of our codec over a pipe; knows nothing else."""

import ctypes
import json
import multiprocessing
import signal
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import NoReturn

import torch

from unalike.base.errors import RunError
from unalike.engines.host import Host


class EngineError(RunError):
    """The engine itself broke, not a client. What was saved is safe."""


class Worker:
    """The parent's end. One message is under way at a time, so that neither end ever waits for the other to read."""

    def __init__(self, host: Host, limit: int, siblings: list["Worker"]):
        if torch.cuda.is_initialized():
            raise EngineError(
                "worker processes must start before CUDA is used in this one; run with workers=0 on a GPU"
            )
        context = multiprocessing.get_context("fork")  # clients are inherited, never pickled
        self.pipe, theirs = context.Pipe()
        inherited = [*(s.pipe for s in siblings), self.pipe]
        self.process = context.Process(
            target=_live, args=(host, theirs, limit, inherited), daemon=True
        )
        self.process.start()
        theirs.close()
        self.waiting: deque[tuple[str, bytes | bytearray]] = deque()
        self.busy: str | None = None

    def post(self, client: str, data: bytes | bytearray) -> None:
        self.waiting.append((client, data))
        self.next()

    def next(self) -> None:
        if self.busy is None and self.waiting:
            self.busy, data = self.waiting.popleft()
            self._send({"do": "handle", "client": self.busy}, data)

    def take(self) -> tuple[str, bytes]:
        client, self.busy = self.busy, None
        if client is None:
            raise EngineError("a worker process was asked for a reply with no message under way")
        data = self._receive()
        self.next()
        return client, data

    def tell(self, do: str, **what: int | str) -> None:
        self._send({"do": do, **what})

    def done(self) -> None:
        if problem := self._receive():
            raise EngineError(bytes(problem).decode())

    def stop(self) -> None:
        with suppress(EngineError):
            self._send({"do": "stop"})
        self.pipe.close()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()

    def _send(self, order: dict, data: bytes | bytearray | None = None) -> None:
        try:
            self.pipe.send_bytes(json.dumps(order).encode())
            if data is not None:
                self.pipe.send_bytes(data)
        except OSError:
            self._died()

    def _receive(self) -> bytes:
        try:
            return self.pipe.recv_bytes()
        except (EOFError, OSError):
            self._died()

    def _died(self) -> NoReturn:
        self.process.join(1)
        raise EngineError(
            f"a worker process died (exit code {self.process.exitcode}); resume the run from its last round"
        ) from None


def collect(workers: list[Worker], count: int) -> Iterator[tuple[str, bytes]]:
    """The next `count` replies, in the order they are ready."""
    pipes: dict[object, Worker] = {worker.pipe: worker for worker in workers}
    while count:
        for pipe in wait([worker.pipe for worker in workers if worker.busy is not None]):
            yield pipes[pipe].take()
            count -= 1


def _live(host: Host, pipe: Connection, limit: int, inherited: list[Connection]) -> None:
    """The child's end: answer until told to stop or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # die with the parent, even when it is killed
    for other in inherited:
        other.close()
    torch.set_num_threads(1)
    while True:
        try:
            order = json.loads(pipe.recv_bytes())
            if order["do"] == "stop":
                return
            if order["do"] == "handle":
                pipe.send_bytes(host.answer(order["client"], pipe.recv_bytes(), limit))
                continue
        except (EOFError, OSError):
            return
        try:
            getattr(host, order.pop("do"))(**order)  # save, release or forget
            pipe.send_bytes(b"")
        except Exception as error:
            pipe.send_bytes(f"{type(error).__name__}: {error}".encode())
