"""The local engine: clients on this machine, on a simulated clock. Knows nothing of methods."""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from unalike.base.message import (
    EncodedSizes,
    Forms,
    MessageError,
    Value,
    copy_values,
    decode,
    encode,
    encoded_size,
    require_dict,
)
from unalike.core.client import Client, ClientInfo
from unalike.core.client_stack import StackedReplies
from unalike.core.engine import Arrival, EngineSettings
from unalike.core.lazy_clients import LazyClients, announced_infos, examples_of
from unalike.core.runtime import ClientRuntime
from unalike.core.stacking import Mode
from unalike.engines.host import Host, counted_bytes, without_traceback
from unalike.engines.process import Worker, collect
from unalike.engines.store import Store

DEFAULTS = EngineSettings()
QueueEntry = tuple[float, int, str, int, dict]  # arrival, order, client, bytes, reply


class WorkerOf(dict[str, int]):
    """The worker that holds each client: at first in turn, later where it was moved to."""

    def __init__(self, clients: Sequence[Client], workers: int):
        self.workers = workers
        self.lazy_clients = clients if isinstance(clients, LazyClients) else None
        if self.lazy_clients is None:
            self.update({client.id: i % workers for i, client in enumerate(clients)})

    def __missing__(self, client: str) -> int:
        if self.lazy_clients is None:
            raise KeyError(client)
        return self.lazy_clients.number(client) % self.workers


class LocalEngine:
    """Carries messages on this machine.

    On the simulated clock a call lasts latency + bytes / link each way, plus work / speed of the
    client; real time plays no part. With `settings.tick` replies arrive at its next multiple, so
    that clients of about the same pace arrive, and are computed, together.

    Args:
        clients, build_runtime, folder, settings: see `HostingEngine`.
        workers: 0: clients are in this process; messages are copied and their size is computed.
            N > 0: messages are encoded and go to one of N processes that hold the clients.
        stack: clients of one kind train and are measured as a stack of models: "always", "never",
            or "auto", on a GPU and for many small models. Needs clients in this process. Results
            are those of clients one by one, up to rounding.
    """

    hosts_clients: ClassVar[bool] = True
    uses_this_machine: ClassVar[bool] = True
    takes_lazy_clients: ClassVar[bool] = True

    @classmethod
    def shares_process(cls, options: Mapping[str, Any]) -> bool:
        """Whether clients are in this process."""
        return not options.get("workers")

    def __init__(
        self,
        clients: Sequence[Client],
        build_runtime: Callable[[Client], ClientRuntime],
        folder: Path,
        settings: EngineSettings = DEFAULTS,
        *,
        workers: Annotated[int, Field(ge=0)] = 0,
        stack: Mode = "auto",
    ):
        self.now = 0.0
        self.limit = settings.max_message_bytes
        self.encoded_sizes = EncodedSizes(self.limit)
        self.tick = settings.tick
        # Messages between clients on several devices go through the CPU.
        devices = {str(client.device) for client in examples_of(clients)}
        self.device = None if len(devices) == 1 else "cpu"
        # one snapshot more than the server keeps, which is saved after the clients
        self.store = Store(folder, snapshots=3)
        self.client_infos = announced_infos(clients)
        # Messages that no reply was computed to, with their size.
        self.sent: dict[str, tuple[int, dict[str, Value]]] = {}
        self.queue: list[QueueEntry] = []  # replies not yet delivered, a heap
        self.order = 0
        # By the number of the message: replies that clients gave as one, and the client's place.
        self.stacked_replies: dict[int, tuple[StackedReplies, int]] = {}
        self.repeated: list[tuple[str, str]] = []  # stays empty: a dead process ends the run
        processes = min(workers, len(clients))
        hosts = max(processes, 1)
        loaded = math.ceil(settings.max_loaded_clients / hosts)
        self.worker_of = WorkerOf(clients, hosts)
        self.host: Host | None = None
        self.workers: list[Worker] = []
        if not processes:
            self.host = Host(clients, build_runtime, self.store, loaded, stack=stack)
        for _ in range(processes):
            host = Host(clients, build_runtime, self.store, loaded)
            self.workers.append(Worker(host, self.limit, self.workers))

    def infos(self) -> Mapping[str, ClientInfo]:
        """What each client announces, by id."""
        return self.client_infos

    def send(self, messages: dict[str, dict[str, Value]]) -> dict[str, int]:
        """Send one message to each of some clients; returns their sizes in bytes.

        In this process nothing is computed before `receive`.
        """
        if self.sent.keys() & messages.keys():
            self._compute_replies()  # a client has one message at a time
        self._balance_workers(list(messages))
        if self.host is not None:
            self._keep_copies(messages)
        else:
            for client, message in messages.items():
                data = encode(message, self.limit)
                self.workers[self.worker_of[client]].post(client, data)
                self.sent[client] = (len(data), message)
        return {client: self.sent[client][0] for client in messages}

    def _keep_copies(self, messages: dict[str, dict[str, Value]]) -> None:
        """Keep copies of messages until replies are computed; equal bodies are copied once."""
        forms = Forms()
        sizes: dict[Hashable, int] = {}  # by operation and body: the rest are whole numbers
        for message in messages.values():
            form = message["operation"], id(message["body"])
            if form not in sizes:
                sizes[form] = self.encoded_sizes.of(message, forms)
        bodies = {id(message["body"]): message["body"] for message in messages.values()}
        copied = copy_values(list(bodies.values()), self.device, forms)
        copies = dict(zip(bodies, copied, strict=True))
        for client, message in messages.items():
            body = message["body"]
            size = sizes[message["operation"], id(body)]
            self.sent[client] = (size, {**message, "body": copies[id(body)]})

    def _balance_workers(self, called: list[str]) -> None:
        """Move clients between idle workers, through the store, to share the calls evenly."""
        if len(self.workers) < 2 or any(worker.busy is not None for worker in self.workers):
            return
        calls: list[list[str]] = [[] for _ in self.workers]
        for client in called:
            calls[self.worker_of[client]].append(client)
        while True:
            most, least = max(calls, key=len), min(calls, key=len)
            if len(most) <= len(least) + 1:
                return
            client = most.pop()
            worker = self.workers[self.worker_of[client]]
            worker.command("release", client=client)
            worker.await_done()
            self.worker_of[client] = calls.index(least)
            least.append(client)

    def receive(self, numbers: set[int] | None = None, until: float = math.inf) -> list[Arrival]:
        """Compute all replies, then return those of the earliest instant.

        Args:
            numbers: only replies to these messages; others stay in flight. None: to all.
            until: ignored; a reply says when it arrived.
        Returns: nothing if nothing is in flight.
        """
        self._compute_replies()
        arrivals: list[Arrival] = []
        not_wanted = []
        while self.queue and (not arrivals or self.queue[0][0] == arrivals[0].at):
            entry = heapq.heappop(self.queue)
            at, _, client, size, reply = entry
            if numbers is None or reply["number"] in numbers:
                stack = self.stacked_replies.pop(reply["number"], None)
                arrivals.append(Arrival(client, at, size, reply, stack))
            else:
                not_wanted.append(entry)
        for entry in not_wanted:
            heapq.heappush(self.queue, entry)
        if arrivals:
            self.now = max(self.now, arrivals[0].at)
        return arrivals

    def rewind_clock(self, at: float) -> None:
        """Set the clock back to `at`, if it is later."""
        self.now = min(self.now, at)

    def drop(self, numbers: set[int]) -> None:
        """Deliver no replies to these messages."""
        self.queue = [entry for entry in self.queue if entry[4]["number"] not in numbers]
        for number in numbers:
            self.stacked_replies.pop(number, None)
        heapq.heapify(self.queue)

    def _compute_replies(self) -> None:
        """Compute replies to all messages sent and put them into the queue; no time passes."""
        sent = self.sent
        self.sent = {}
        if self.host is not None:
            replies = self._compute_here(sent)
        else:
            replies = {}
            for client, data in collect(self.workers, len(sent)):
                reply = require_dict(decode(data, self.limit))
                replies[client] = (counted_bytes(reply, len(data)), reply)
        for client, (bytes_down, _) in sent.items():
            bytes_up, reply = replies[client]
            at = self.now + self._duration(client, bytes_down + bytes_up, reply)
            if self.tick:
                at = self.tick * math.ceil(at / self.tick - 1e-9)
            heapq.heappush(self.queue, (at, self.order, client, bytes_up, reply))
            self.order += 1

    def _duration(self, client: str, size: int, reply: dict[str, Any]) -> float:
        """Simulated seconds of a call with `size` bytes both ways together."""
        info = self.client_infos[client]
        return 2 * info.latency + size / info.link + reply.get("work", 0.0) / info.speed

    def _compute_here(
        self, sent: dict[str, tuple[int, dict[str, Value]]]
    ) -> dict[str, tuple[int, dict]]:
        """Replies of clients in this process, by client, each with its size in bytes."""
        assert self.host is not None
        messages = {client: message for client, (_, message) in sent.items()}
        replies = self._compute_stacks(messages)
        messages = {c: message for c, message in messages.items() if c not in replies}
        self._copy_equal_bodies(messages)
        answers = self.host.handle_all(messages)
        sizes: dict[str, int] = {}
        forms = Forms()
        for client in messages:
            reply = answers[client]
            try:
                sizes[client] = self.encoded_sizes.of(without_traceback(reply), forms)
            except MessageError as error:
                failure = {"number": reply["number"], "failure": str(error)}
                replies[client] = (encoded_size(failure), failure)
        copies = copy_values([answers[client] for client in sizes], self.device, forms)
        for (client, size), copied in zip(sizes.items(), copies, strict=True):
            replies[client] = (size, require_dict(copied))
        return replies

    def _compute_stacks(self, messages: dict[str, dict[str, Value]]) -> dict[str, tuple[int, dict]]:
        """Replies of clients that give them as one; their tensors are of nobody else."""
        assert self.host is not None
        replies: dict[str, tuple[int, dict]] = {}
        if self.device is not None:
            return replies
        sizes: dict[int, int] = {}
        for client, (answer, stack, place) in self.host.handle_stacks(messages).items():
            if id(stack) not in sizes:
                try:
                    sizes[id(stack)] = encoded_size(answer, self.limit)
                except MessageError as error:
                    failure = {"number": answer["number"], "failure": str(error)}
                    replies[client] = (encoded_size(failure), failure)
                    continue
            replies[client] = (sizes[id(stack)], answer)
            self.stacked_replies[answer["number"]] = stack, place
        return replies

    @staticmethod
    def _copy_equal_bodies(messages: dict[str, dict[str, Value]]) -> None:
        """Give each client a body of its own, where several have the same dict."""
        counts = Counter(id(message["body"]) for message in messages.values())
        shared = [c for c, message in messages.items() if counts[id(message["body"])] > 1]
        copies = copy_values([messages[client]["body"] for client in shared])
        for client, body in zip(shared, copies, strict=True):
            messages[client] = {**messages[client], "body": body}

    def pending(self) -> list[dict[str, Any]]:
        """Replies computed but not delivered, as plain values that `load` takes back."""
        self._compute_replies()
        return [
            {"at": at, "order": order, "client": client, "size": size, "reply": reply}
            for at, order, client, size, reply in sorted(self.queue, key=lambda entry: entry[:2])
        ]

    def save(self, round: int) -> None:
        """Store all clients as of the end of a round."""
        if self.host is not None:
            self.host.save(round)
        self._command_all("save", round=round)

    def load(self, round: int, now: float, pending: list[dict[str, Any]]) -> None:
        """Go back to what was stored after a round, with the clock at `now`."""
        self.now = now
        self.store.rewind(round)
        self.queue = [(p["at"], p["order"], p["client"], p["size"], p["reply"]) for p in pending]
        self.order = 1 + max((p["order"] for p in pending), default=-1)
        heapq.heapify(self.queue)
        if self.host is not None:
            self.host.forget()
        self._command_all("forget")

    def _command_all(self, action: str, **arguments: int | str) -> None:
        for worker in self.workers:
            worker.command(action, **arguments)
        for worker in self.workers:
            worker.await_done()

    def close(self) -> None:
        """End the worker processes."""
        for worker in self.workers:
            worker.stop()
