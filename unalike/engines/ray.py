"""The Ray engine: clients are held by actors of a Ray cluster. Knows nothing of methods.

An actor that dies, or does not answer for too long, is replaced: its clients continue from what is
stored, and messages that changed them since are sent again. That is harmless because messages are
numbered, and exact because random streams are named.
"""

import logging
import math
import os
import secrets
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field

from unalike.base.errors import UserError
from unalike.base.message import Value, decode, require_dict
from unalike.core.admission import parse_info
from unalike.core.client import Client, ClientInfo
from unalike.core.engine import Arrival, EngineSettings
from unalike.core.runtime import ClientRuntime
from unalike.engines.host import SimulatedAnswer, counted_bytes
from unalike.engines.process import EngineError
from unalike.engines.ray_actor import ClientActor, take_over
from unalike.engines.realtime import RealTimeEngine, pack_messages, parse_reply
from unalike.engines.store import Store

START_TIMEOUT = 300.0  # seconds until an actor must be up, its clients where they were
# Deaths of an actor, without an answer in between, until the client it was busy with has failed.
MAX_DEATHS = 3
Positive = Annotated[float, Field(gt=0)]
DEFAULTS = EngineSettings()


class RayEngine(RealTimeEngine):
    """Carries messages to Ray actors, which share the clients among them.

    Args:
        clients, build_runtime, folder, settings: see `HostingEngine`.
        address: of a cluster; "auto": the one of this machine. Without it one is started here.
        actors: how many. Default: as many as fit, at most one a client.
        cpus, gpus: what each actor gets; fractions, too.
        timeout: seconds after which an actor that has something to do and answers nothing is
            replaced; the client it was busy with has failed.
        spare: keep a process in reserve from the first checkpoint on, with all imports made (most
            of the time a new one takes). Only where actors have no GPU.
    """

    hosts_clients: ClassVar[bool] = True
    uses_this_machine: ClassVar[bool] = False

    @classmethod
    def shares_process(cls, options: Mapping[str, Any]) -> bool:
        """Clients are always in other processes."""
        return False

    def __init__(
        self,
        clients: list[Client],
        build_runtime: Callable[[Client], ClientRuntime],
        folder: Path,
        settings: EngineSettings = DEFAULTS,
        *,
        address: str | None = None,
        actors: Annotated[int, Field(ge=1)] | None = None,
        cpus: Positive = 1.0,
        gpus: Annotated[float, Field(ge=0)] = 0.0,
        timeout: Positive = 600.0,
        spare: bool = True,
    ):
        check_devices(clients, gpus)
        super().__init__()
        self.ray = connect(address)
        self.limit = settings.max_message_bytes
        self.timeout = timeout
        self.folder = Path(folder).resolve()
        self.token = secrets.token_hex(8)
        # one snapshot more than the server keeps, which is saved after the clients
        self.store = Store(self.folder, snapshots=3)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        take_over(self.folder, self.token)
        fit = count_actors(self.ray.cluster_resources(), actors, cpus, gpus)
        count = min(len(clients), fit)
        self.actor_arguments = (
            self.folder,
            self.token,
            math.ceil(settings.max_loaded_clients / count),
            self.limit,
            max(1, int(cpus)),
        )
        remote = self.ray.remote
        self.actor_class = remote(num_cpus=cpus, num_gpus=gpus, max_restarts=0)(ClientActor)
        self.spare_class = remote(num_cpus=0, num_gpus=gpus, max_restarts=0)(ClientActor)
        self.keeps_spare = spare and not gpus
        self.spare: Any = None
        self.actors: list[Actor] = []
        self.actor_of: dict[str, Actor] = {}
        for i in range(count):
            actor = self._build_actor(clients[i::count], build_runtime)
            self.actors.append(actor)
            self.actor_of |= dict.fromkeys(actor.clients, actor)
        try:
            self.client_infos = self._wait_for_start(clients)
        except BaseException:
            self.close()
            raise

    def _build_actor(
        self, clients: list[Client], build_runtime: Callable[[Client], ClientRuntime]
    ) -> "Actor":
        ids = [client.id for client in clients]
        try:
            contents = self.ray.put((clients, build_runtime))
        except (TypeError, AttributeError) as error:
            raise UserError(
                f"clients {', '.join(ids)} cannot be sent to another process: {error}"
            ) from None
        return Actor(ids, contents, self._start_process())

    def _start_process(self) -> Any:
        return self.actor_class.remote(*self.actor_arguments)

    def _start_spare(self) -> Any:
        return self.spare_class.remote(*self.actor_arguments) if self.keeps_spare else None

    def _wait_for_start(self, clients: list[Client]) -> dict[str, ClientInfo]:
        """Wait until all actors hold their clients; returns what these announce."""
        refs = [actor.hello for actor in self.actors]
        _, late = self.ray.wait(refs, num_returns=len(refs), timeout=START_TIMEOUT)
        if late:
            raise EngineError(
                f"{len(late)} of {len(refs)} Ray actors did not start within {START_TIMEOUT:g} s: "
                "the cluster may be busy; ask for fewer (engine.actors) or smaller ones "
                "(engine.cpus, engine.gpus)"
            )
        infos: dict[str, Any] = {}
        for ref in refs:
            try:
                data, _, _ = self.ray.get(ref)
            except self.ray.exceptions.RayError as error:
                raise EngineError(f"a Ray actor could not start: {error_text(error)}") from None
            infos |= require_dict(decode(data, self.limit))
        for actor in self.actors:
            actor.up = True
        return {client.id: parse_info(infos[client.id]) for client in clients}

    def send(self, messages: dict[str, dict[str, Value]]) -> dict[str, int]:
        """Send one message to each of some clients; returns their sizes in bytes.

        Tensors that go to several clients are in Ray's shared memory once.
        """
        sizes: dict[str, int] = {}
        shared: dict[int, Any] = {}  # references to tensors in Ray's memory
        for message in pack_messages(messages, self.limit):
            tensors = None
            if message.tensors is not None:
                key = id(message.tensors)
                if key not in shared:
                    shared[key] = self.ray.put(np.frombuffer(message.tensors, dtype=np.uint8))
                tensors = shared[key]
            data = np.frombuffer(message.data, dtype=np.uint8)
            call = (message.client, message.operation, data, tensors)
            self.actor_of[message.client].post(message.number, call, self.now)
            sizes[message.client] = message.size
        return sizes

    def _in_flight(self) -> set[int]:
        numbers: set[int] = set()
        for actor in self.actors:
            numbers |= actor.in_flight.keys()
        return numbers

    def drop(self, numbers: set[int]) -> None:
        """Deliver no replies to these messages."""
        for actor in self.actors:
            actor.dropped |= actor.in_flight.keys() & numbers
        super().drop(numbers)

    def _wait_for_replies(self, until: float = math.inf) -> None:
        """Wait for replies, not beyond `until` or the time limit of an actor; replace late ones."""
        replies: dict[Any, tuple[Actor, int]] = {}
        for actor in self.actors:
            for number, call in actor.in_flight.items():
                replies[call.reply] = (actor, number)
        starting = {actor.ready: actor for actor in self.actors if not actor.up}
        busy = [actor for actor in self.actors if actor.in_flight]
        deadline = min(actor.last_sign + self._time_limit(actor) for actor in busy)
        refs = [*starting, *replies]
        seconds = max(0.0, min(until, deadline) - self.now)
        ready, _ = self.ray.wait(refs, num_returns=1, timeout=seconds)
        if ready:
            ready, _ = self.ray.wait(refs, num_returns=len(refs), timeout=0)
        for ref in ready:
            if ref in starting:
                starting[ref].up = True
                starting[ref].last_sign = self.now
                continue
            actor, number = replies[ref]
            current = actor.in_flight.get(number)
            if current is not None and current.reply == ref:  # or it was sent again meanwhile
                self._take_reply(actor, number)
        for actor in self.actors:
            limit = self._time_limit(actor)
            if actor.in_flight and self.now >= actor.last_sign + limit:
                self._replace(actor, f"did not answer within {limit:g} s")

    def _time_limit(self, actor: "Actor") -> float:
        return self.timeout if actor.up else START_TIMEOUT

    def _take_reply(self, actor: "Actor", number: int) -> None:
        """Take the reply to a message, which is the client's, or Ray's where an actor failed."""
        call = actor.in_flight[number]
        try:
            data, changed = self.ray.get(call.reply)
            reply = parse_reply(data, number, self.limit, SimulatedAnswer)
            size = counted_bytes(reply, len(data))
        except self.ray.exceptions.RayActorError as error:
            actor.deaths += 1
            reason = None
            if actor.deaths >= MAX_DEATHS:
                reason = f"its process died {MAX_DEATHS} times over this: {error_text(error)}"
            self._replace(actor, reason)
            return
        except self.ray.exceptions.RayError as error:
            size = 0
            reply = {"number": number, "failure": error_text(error)}
            changed = "no"
        actor.last_sign = self.now
        actor.deaths = 0
        del actor.in_flight[number]
        # Replies of one actor may come in another order than it answered in.
        if changed == "stored":
            actor.stored_up_to = max(actor.stored_up_to, number)
            actor.unstored = {n: m for n, m in actor.unstored.items() if n > number}
        elif changed == "yes" and number > actor.stored_up_to:
            actor.unstored[number] = call.message
        if number in actor.dropped:
            actor.dropped.discard(number)
        else:
            self.arrivals[number] = Arrival(call.message[0], self.now, size, reply)

    def _replace(self, actor: "Actor", reason: str | None = None) -> None:
        """Move an actor's clients to a new process and send it what they have to know.

        Args:
            reason: if given, the client the old process was busy with has failed because of it.
        """
        actor.kill(self.ray)
        if reason is not None and actor.in_flight:
            number = next(iter(actor.in_flight))
            client = actor.in_flight.pop(number).message[0]
            actor.deaths = 0
            if number not in actor.dropped:
                failure = {"number": number, "failure": reason}
                self.arrivals[number] = Arrival(client, self.now, 0, failure)
        process = self.spare or self._start_process()
        self.spare = None
        actor.start(process)
        self.spare = self._start_spare()
        unanswered = actor.in_flight
        actor.in_flight = {}
        unstored = [message for _, message in sorted(actor.unstored.items())]
        again = [*unstored, *(call.message for call in unanswered.values())]
        self.repeated += [(client, operation) for client, operation, *_ in again]
        for message in unstored:
            actor.ready = actor.process.handle.remote(*message)
        for number, call in unanswered.items():
            actor.post(number, call.message, self.now)

    def save(self, round: int) -> None:
        """Store all clients as of the end of a round."""
        self._call_all("save", round)
        for actor in self.actors:
            actor.unstored = {}
        self.spare = self.spare or self._start_spare()

    def load(self, round: int, now: float, pending: list[dict[str, Any]]) -> None:
        """Go back to what was stored after a round."""
        self.restore_pending(now, pending)
        self.store.rewind(round)
        for actor in self.actors:
            actor.in_flight = {}
            actor.unstored = {}
            actor.stored_up_to = 0
            actor.dropped = set()
        self._call_all("forget")

    def _call_all(self, method: str, *arguments: int) -> None:
        """Call a method of every actor. One that dies, or is late, is replaced and called again."""

        def call(actor: Actor) -> Any:
            return getattr(actor.process, method).remote(*arguments)

        unfinished = {i: call(actor) for i, actor in enumerate(self.actors)}
        for _ in range(MAX_DEATHS):
            for i, ref in list(unfinished.items()):
                try:
                    self.ray.get(ref, timeout=self.timeout)
                    del unfinished[i]
                except (self.ray.exceptions.RayActorError, self.ray.exceptions.GetTimeoutError):
                    self._replace(self.actors[i])
                    unfinished[i] = call(self.actors[i])
                except self.ray.exceptions.RayError as error:
                    reason = error_text(error)
                    raise EngineError(f"a Ray actor could not {method}: {reason}") from None
            if not unfinished:
                return
        names = ", ".join(", ".join(self.actors[i].clients) for i in unfinished)
        raise EngineError(
            f"the Ray actor of {names} could not {method} in {MAX_DEATHS} attempts; "
            "look at Ray's logs, then resume the run"
        )

    def close(self) -> None:
        """End the actors. A cluster that was started here ends with this program."""
        processes = [actor.process for actor in self.actors]
        if self.spare:
            processes.append(self.spare)
        for process in processes:
            self.ray.kill(process)


# client, operation, bytes of the message (or those before its tensors), reference to the tensors
CallMessage = tuple[str, Any, Any, Any]


@dataclass
class Call:
    """A message in flight to an actor."""

    message: CallMessage
    reply: Any  # Ray's reference


class Actor:
    """The server's view of one Ray actor.

    Args:
        clients: their ids.
        contents: Ray's reference to the clients and to what builds their runtimes.
        process: Ray's handle of the actor.
    """

    def __init__(self, clients: list[str], contents: Any, process: Any):
        self.clients = clients
        self.contents = contents
        self.in_flight: dict[int, Call] = {}  # by message number, in the order they were sent
        # Messages that changed clients since they were stored, by number; and the last number
        # that is known to be stored.
        self.unstored: dict[int, CallMessage] = {}
        self.stored_up_to = 0
        self.dropped: set[int] = set()  # messages whose reply nobody waits for
        self.last_sign = 0.0  # when it last answered, or was given something to do
        self.deaths = 0  # since it last answered
        self.start(process)

    def start(self, process: Any) -> None:
        """Hold the clients in this process from now on."""
        self.process = process
        self.hello = process.take_clients.remote(self.contents)
        self.up = False
        self.ready = self.hello  # Ray's reference to the last thing it does before it is up

    def post(self, number: int, message: CallMessage, now: float) -> None:
        """Send a message."""
        if not self.in_flight:
            self.last_sign = now
        self.in_flight[number] = Call(message, self.process.handle.remote(*message))

    def kill(self, ray: Any) -> None:
        """End the process, also where it is frozen and does not react to Ray."""
        ray.kill(self.process)
        with suppress(ray.exceptions.RayError, OSError):
            _, node, pid = ray.get(self.hello, timeout=0)
            if node == ray.get_runtime_context().get_node_id():
                os.kill(pid, signal.SIGKILL)


def check_devices(clients: list[Client], gpus: float) -> None:
    """Raise UserError where a client computes on a GPU and actors have none."""
    for client in clients:
        if gpus == 0 and torch.device(client.device).type != "cpu":
            raise UserError(
                f"client {client.id} computes on {client.device}: say what part of a GPU an actor "
                "has, engine.gpus=0.25"
            )


def connect(address: str | None) -> Any:
    """Connect to a Ray cluster and return the module `ray`.

    A connection this program has already is used. Otherwise: the cluster at `address`, or, with
    None, a new one on this machine.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # keeps Ray from warning about a variable that will change its meaning
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # keeps Ray from writing about dead actors to stdout, which is for results
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    import ray

    if ray.is_initialized():
        return ray
    try:
        ray.init(
            address=address or "local",
            log_to_driver=False,
            logging_level=logging.ERROR,
            include_dashboard=None if address else False,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        problem = "no Ray cluster could be started here"
        if address:
            problem = f"no Ray cluster answers at {address}"
        raise UserError(f"{problem}: {str(error).splitlines()[0]}") from None
    return ray


def count_actors(
    resources: Mapping[str, float], actors: int | None, cpus: float, gpus: float
) -> int:
    """How many actors to start: `actors`, or as many as the cluster has room for.

    Raises: UserError where there is not enough room.
    """
    all_cpus, all_gpus = resources.get("CPU", 0), resources.get("GPU", 0)
    by_gpus = all_gpus / gpus if gpus else math.inf
    fit = int(min(all_cpus / cpus, by_gpus) + 1e-9)
    if not fit or (actors or 0) > fit:
        raise UserError(
            f"there is room for {fit} actors of {cpus:g} CPUs and {gpus:g} GPUs each; the cluster "
            f"has {all_cpus:g} CPUs and {all_gpus:g} GPUs: set engine.actors, .cpus, .gpus"
        )
    return actors or fit


def error_text(error: Exception) -> str:
    """What Ray says in many lines, in one: the exception in an actor, or how the actor ended."""
    inner = getattr(error, "cause", None)
    if isinstance(inner, EngineError | ValueError):
        return str(inner)
    if inner is not None:
        return f"{type(inner).__name__}: {inner}"
    text = str(error).strip()
    if "Worker exit detail:" in text:
        return text.split("Worker exit detail:")[1].strip().split(" Some common causes")[0]
    lines = text.splitlines()
    return lines[-1 if "creation task" in lines[0] else 0].strip()
