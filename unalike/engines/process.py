"""Worker processes of the local engine, which hold clients and talk over a pipe.

Messages and replies are bytes of our codec. Other commands are JSON: {"action": name, ...}.
"""

import ctypes
import json
import multiprocessing
import os
import pickle
import signal
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import NoReturn

import torch

from unalike.base.errors import RunError, UserError
from unalike.engines.host import Host

STOP_TIMEOUT = 5.0  # seconds a process has to end by itself
START_METHOD = "UNALIKE_START_METHOD"  # how processes start: "fork", "spawn" or "forkserver"
PR_SET_PDEATHSIG = 1  # option of Linux's prctl: a signal when the parent dies


class EngineError(RunError):
    """The engine itself broke, not a client. What was saved is safe."""


def start_method() -> str:
    """How worker processes start: as the environment says, else by fork, else by spawn.

    A forked process inherits the clients. Where there is no fork (Windows), or another method is
    asked for, they are pickled.
    """
    known = multiprocessing.get_all_start_methods()
    method = os.environ.get(START_METHOD) or ("fork" if "fork" in known else "spawn")
    if method not in known:
        raise UserError(f"{START_METHOD} must be one of {', '.join(known)}, got {method!r}")
    return method


def pickle_host(host: Host) -> bytes:
    """The clients' host as bytes, for a process that does not inherit it.

    Raises: UserError where a client, its data or its model cannot be pickled.
    """
    try:
        return pickle.dumps(host)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"worker processes that are not forked need clients that can be pickled ({error}); "
            "use functions and classes of a module in place of lambdas and local ones, leave lazy "
            "out, or run with workers=0"
        ) from error


class Worker:
    """The engine's end of a worker process.

    Only one message is in the pipe at a time, so that neither end ever waits for the other to
    read.

    Args:
        host: of the clients; the process inherits it, or gets a copy (`start_method`).
        limit: bytes a message may have.
        siblings: workers started before, whose pipes the process must not keep open.
    """

    def __init__(self, host: Host, limit: int, siblings: list["Worker"]):
        method = start_method()
        forks = method == "fork"
        if forks and torch.cuda.is_initialized():
            raise EngineError(
                "worker processes must start before CUDA is used in this one; "
                "run with workers=0 on a GPU"
            )
        context = multiprocessing.get_context(method)
        self.pipe, child_pipe = context.Pipe()
        inherited = [*(sibling.pipe for sibling in siblings), self.pipe] if forks else []
        self.process = context.Process(  # type: ignore[attr-defined]
            target=_run_worker,
            args=(host if forks else pickle_host(host), child_pipe, limit, inherited),
            daemon=True,
        )
        self.process.start()
        child_pipe.close()
        self.waiting: deque[tuple[str, bytes | bytearray]] = deque()
        self.busy: str | None = None  # the client whose message is in the pipe

    def post(self, client: str, data: bytes | bytearray) -> None:
        """Send a message to a client once those before it are answered."""
        self.waiting.append((client, data))
        self._send_next()

    def _send_next(self) -> None:
        if self.busy is None and self.waiting:
            self.busy, data = self.waiting.popleft()
            self._send({"action": "handle", "client": self.busy}, data)

    def take(self) -> tuple[str, bytes]:
        """Wait for the reply to the message in the pipe; returns its client and its bytes."""
        client = self.busy
        if client is None:
            raise EngineError("a worker process was asked for a reply with no message in the pipe")
        self.busy = None
        data = self._receive()
        self._send_next()
        return client, data

    def command(self, action: str, **arguments: int | str) -> None:
        """Have the process call a method of its host; `await_done` waits for the end."""
        self._send({"action": action, **arguments})

    def await_done(self) -> None:
        """Wait until a command is done; raises EngineError where it failed."""
        problem = self._receive()
        if problem:
            raise EngineError(bytes(problem).decode())

    def stop(self) -> None:
        """End the process."""
        with suppress(EngineError):
            self._send({"action": "stop"})
        self.pipe.close()
        self.process.join(STOP_TIMEOUT)
        if self.process.is_alive():
            self.process.kill()

    def _send(self, command: dict, data: bytes | bytearray | None = None) -> None:
        try:
            self.pipe.send_bytes(json.dumps(command).encode())
            if data is not None:
                self.pipe.send_bytes(data)
        except OSError:
            self._raise_died()

    def _receive(self) -> bytes:
        try:
            return self.pipe.recv_bytes()
        except (EOFError, OSError):
            self._raise_died()

    def _raise_died(self) -> NoReturn:
        self.process.join(1)
        raise EngineError(
            f"a worker process died (exit code {self.process.exitcode}); "
            "resume the run from its last round"
        ) from None


def collect(workers: list[Worker], count: int) -> Iterator[tuple[str, bytes]]:
    """Wait for the next `count` replies and yield (client, bytes) in the order they come."""
    by_pipe: dict[object, Worker] = {worker.pipe: worker for worker in workers}
    while count:
        for pipe in wait([worker.pipe for worker in workers if worker.busy is not None]):
            yield by_pipe[pipe].take()
            count -= 1


def _run_worker(
    content: Host | bytes, pipe: Connection, limit: int, inherited: list[Connection]
) -> None:
    """The process: answer until told to stop or the parent is gone.

    Args:
        content: the host of its clients, perhaps pickled.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for connection in inherited:
        connection.close()
    torch.set_num_threads(1)
    host: Host = pickle.loads(content) if isinstance(content, bytes) else content
    while True:
        try:
            command = json.loads(pipe.recv_bytes())
            action = command.pop("action")
            if action == "stop":
                return
            if action == "handle":
                pipe.send_bytes(host.answer(command["client"], pipe.recv_bytes(), limit))
                continue
        except (EOFError, OSError):
            return
        try:
            getattr(host, action)(**command)  # save, release or forget
            pipe.send_bytes(b"")
        except Exception as error:
            pipe.send_bytes(f"{type(error).__name__}: {error}".encode())
