"""The local engine: clients in this process, or alive in N worker processes, on a virtual clock. Knows nothing of methods."""

import heapq
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from unalike.base.message import (
    MessageError,
    Value,
    copy_value,
    decode,
    encode,
    encoded_size,
    require_dict,
)
from unalike.core.client import Client, ClientInfo
from unalike.core.engine import Arrival, EngineSettings
from unalike.core.runtime import ClientRuntime
from unalike.engines.host import Host
from unalike.engines.process import Worker, collect
from unalike.engines.store import Store

DEFAULTS = EngineSettings()


class LocalEngine:
    """Carries calls on this machine. `workers=0`: clients run here, messages are copied and their size computed; N > 0: every
    message is really encoded and goes to one of N processes that keep the clients alive.

    A call lasts, on the virtual clock, latency + bytes / link each way + work / speed of the client; real time plays no part. With a
    `tick` replies arrive at its next multiple, so that clients of about the same pace arrive, and are computed, together.
    """

    hosts_clients: ClassVar[bool] = True
    uses_this_machine: ClassVar[bool] = True

    @classmethod
    def shares_process(cls, options: Mapping[str, Any]) -> bool:
        return not options.get("workers")

    def __init__(
        self,
        clients: list[Client],
        build_runtime: Callable[[Client], ClientRuntime],
        folder: Path,
        settings: EngineSettings = DEFAULTS,
        *,
        workers: Annotated[int, Field(ge=0)] = 0,
    ):
        self.now = 0.0
        self.limit = settings.max_message_bytes
        self.tick = settings.tick
        self.device = (
            None if len({str(client.device) for client in clients}) == 1 else "cpu"
        )  # where clients of several devices meet
        self.store = Store(folder, keeps=3)  # one more than the server's, who is saved after them
        self.sent: dict[
            str, tuple[int, dict[str, Value]]
        ] = {}  # not yet computed: bytes down, message
        self.queue: list[
            tuple[float, int, str, int, dict]
        ] = []  # not yet delivered: instant, order, client, bytes up, reply
        self.order = 0
        self.repeated: list[tuple[str, str]] = []  # a process that dies ends the run
        count = min(workers, len(clients))
        hosts = [
            Host(
                clients,
                build_runtime,
                self.store,
                math.ceil(settings.max_loaded_clients / max(count, 1)),
            )
            for _ in range(max(count, 1))
        ]
        self.told: dict[str, ClientInfo] = {c.id: c.info() for c in clients}
        self.home = {
            c.id: i % max(count, 1) for i, c in enumerate(clients)
        }  # which worker keeps a client
        self.host = None if count else hosts[0]
        self.workers: list[Worker] = []
        for host in hosts if count else ():
            self.workers.append(Worker(host, self.limit, self.workers))

    def infos(self) -> dict[str, ClientInfo]:
        return self.told

    def send(self, messages: dict[str, dict[str, Value]]) -> dict[str, int]:
        if self.sent.keys() & messages.keys():
            self._settle()  # one message a client at a time
        self._balance(list(messages))
        for client, message in messages.items():
            if self.host is None:
                data = encode(message, self.limit)
                self.workers[self.home[client]].post(client, data)
                self.sent[client] = (len(data), message)
            else:
                self.sent[client] = (
                    encoded_size(message, self.limit),
                    require_dict(copy_value(message, self.device)),
                )
        return {client: self.sent[client][0] for client in messages}

    def _balance(self, called: list[str]) -> None:
        """Move clients through the store so that every worker has as many of the called ones, give or take one."""
        if len(self.workers) < 2 or any(worker.busy is not None for worker in self.workers):
            return
        at: list[list[str]] = [[] for _ in self.workers]
        for client in called:
            at[self.home[client]].append(client)
        while len(most := max(at, key=len)) > len(least := min(at, key=len)) + 1:
            client = most.pop()
            self.workers[self.home[client]].tell("release", client=client)
            self.workers[self.home[client]].done()
            self.home[client] = at.index(least)
            least.append(client)

    def receive(self, numbers: set[int] | None = None, until: float = math.inf) -> list[Arrival]:
        """All replies of the earliest instant, once everything under way has been computed; none if nothing is.

        With `numbers`, only replies to these messages: others stay under way. Those after `until` come too, and tell when they did.
        """
        self._settle()
        arrivals: list[Arrival] = []
        others = []
        while self.queue and (not arrivals or self.queue[0][0] == arrivals[0].at):
            entry = heapq.heappop(self.queue)
            at, _, client, up, reply = entry
            if numbers is None or reply["number"] in numbers:
                arrivals.append(Arrival(client, at, up, reply))
            else:
                others.append(entry)
        for entry in others:
            heapq.heappush(self.queue, entry)
        self.now = max(self.now, arrivals[0].at) if arrivals else self.now
        return arrivals

    def rewind_clock(self, at: float) -> None:
        self.now = min(self.now, at)

    def drop(self, numbers: set[int]) -> None:
        self.queue = [entry for entry in self.queue if entry[4]["number"] not in numbers]
        heapq.heapify(self.queue)

    def _settle(self) -> None:
        """Compute what was sent, without letting time pass."""
        for client, down, up, reply in self._compute():
            info = self.told[client]
            lasts = 2 * info.latency + (down + up) / info.link + reply.get("work", 0.0) / info.speed
            at = self.now + lasts
            at = self.tick * math.ceil(at / self.tick - 1e-9) if self.tick else at
            heapq.heappush(self.queue, (at, self.order, client, up, reply))
            self.order += 1

    def _compute(self) -> list[tuple[str, int, int, dict]]:
        sent, self.sent = self.sent, {}
        if self.host is not None:
            answers = self.host.handle_all(
                {client: message for client, (_, message) in sent.items()}
            )
            return [
                (client, down, *self._measured(answers[client]))
                for client, (down, _) in sent.items()
            ]
        replies = {
            client: (len(data), require_dict(decode(data, self.limit)))
            for client, data in collect(self.workers, len(sent))
        }
        return [(client, down, *replies[client]) for client, (down, _) in sent.items()]

    def _measured(self, reply: dict[str, Any]) -> tuple[int, dict]:
        try:
            return encoded_size(reply, self.limit), require_dict(copy_value(reply, self.device))
        except MessageError as error:
            reply = {"number": reply["number"], "failure": str(error)}
            return encoded_size(reply), reply

    # what is saved after a round

    def pending(self) -> list[dict[str, Any]]:
        self._settle()
        return [
            {"at": at, "order": order, "client": client, "size": up, "reply": reply}
            for at, order, client, up, reply in sorted(self.queue, key=lambda entry: entry[:2])
        ]

    def save(self, round: int) -> None:
        if self.host is not None:
            self.host.save(round)
        for worker in self.workers:
            worker.tell("save", round=round)
        for worker in self.workers:
            worker.done()

    def load(self, round: int, now: float, pending: list[dict[str, Any]]) -> None:
        self.now = now
        self.store.rewind(round)
        self.queue = [(p["at"], p["order"], p["client"], p["size"], p["reply"]) for p in pending]
        self.order = 1 + max((p["order"] for p in pending), default=-1)
        heapq.heapify(self.queue)
        if self.host is not None:
            self.host.forget()
        for worker in self.workers:
            worker.tell("forget")
        for worker in self.workers:
            worker.done()

    def close(self) -> None:
        for worker in self.workers:
            worker.stop()
