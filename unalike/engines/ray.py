"""The Ray engine: clients live in actors of a Ray cluster, their messages are bytes of our codec. Knows nothing of methods.

An actor that dies or says nothing for too long is replaced: its clients go on from the store, and what they were told since then is
told again. Numbered messages make that harmless, named randomness makes it exact.
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
from unalike.core.client import Client, ClientInfo
from unalike.core.engine import Arrival, EngineSettings
from unalike.core.runtime import ClientRuntime
from unalike.engines.process import EngineError
from unalike.engines.ray_actor import Place, seal
from unalike.engines.realtime import RealTime, info, parcels, read
from unalike.engines.store import Store

START = 300.0  # seconds an actor may take until it is up and its clients are where they were
DEATHS = 3  # of an actor, with no answer in between, until the client it was busy with is given up
Positive = Annotated[float, Field(gt=0)]
DEFAULTS = EngineSettings()


class RayEngine(RealTime):
    """Carries calls to `actors` Ray actors with `cpus` and `gpus` each (parts of one, too), which share the clients among them.

    `address` is that of a cluster, "auto" the one of this machine; without it a cluster is started here. An actor with something to do
    that answers nothing for `timeout` seconds is replaced, and the client it was busy with has failed. A `spare` process, which imported
    everything (most of what a new one takes), stands by from the first checkpoint on where actors have no GPU.
    """

    hosts_clients: ClassVar[bool] = True
    uses_this_machine: ClassVar[bool] = False

    @classmethod
    def shares_process(cls, options: Mapping[str, Any]) -> bool:
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
        if gpus == 0 and (there := [c for c in clients if torch.device(c.device).type != "cpu"]):
            raise UserError(
                f"client {there[0].id} computes on {there[0].device}: say what part of a GPU an actor has, engine.gpus=0.25"
            )
        self.ray = connected(address)
        self.limit, self.timeout = settings.max_message_bytes, timeout
        super().__init__()
        self.folder, self.token = Path(folder).resolve(), secrets.token_hex(8)
        self.store = Store(
            self.folder, keeps=3
        )  # one more than the server's, who is saved after them
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        seal(self.folder).write_text(self.token)
        count = min(len(clients), room(self.ray.cluster_resources(), actors, cpus, gpus))
        make, idle = (
            self.ray.remote(num_cpus=share, num_gpus=gpus, max_restarts=0)(Place)
            for share in (cpus, 0)
        )
        loaded = math.ceil(settings.max_loaded_clients / count)
        how = (self.folder, self.token, loaded, self.limit, max(1, int(cpus)))
        self.start, self.stand_by = (
            (lambda: make.remote(*how)),
            (lambda: idle.remote(*how) if spare and not gpus else None),
        )
        self.spare: Any = None
        self.actors = []
        for own in (clients[i::count] for i in range(count)):
            try:
                self.actors.append(
                    Actor([c.id for c in own], self.ray.put((own, build_runtime)), self.start())
                )
            except (TypeError, AttributeError) as error:
                raise UserError(
                    f"clients {', '.join(c.id for c in own)} cannot be sent to another process: {error}"
                ) from None
        self.home = {client: actor for actor in self.actors for client in actor.clients}
        self.repeated: list[tuple[str, str]] = []
        try:
            self.told = self._cards(clients)
        except BaseException:
            self.close()
            raise

    def _cards(self, clients: list[Client]) -> dict[str, ClientInfo]:
        refs = [actor.hello for actor in self.actors]
        _, late = self.ray.wait(refs, num_returns=len(refs), timeout=START)
        if late:
            raise EngineError(
                f"{len(late)} of {len(refs)} Ray actors did not start within {START:g} s: the cluster may be busy; "
                "ask for fewer (engine.actors) or smaller ones (engine.cpus, engine.gpus)"
            )
        told: dict[str, Any] = {}
        for ref in refs:
            try:
                data, _, _ = self.ray.get(ref)
            except self.ray.exceptions.RayError as error:
                raise EngineError(f"a Ray actor could not start: {cause(error)}") from None
            told |= require_dict(decode(data, self.limit))
        for actor in self.actors:
            actor.up = True
        return {client.id: info(told[client.id]) for client in clients}

    # the server's side of it

    def send(self, messages: dict[str, dict[str, Value]]) -> dict[str, int]:
        """What goes to several lies in Ray's memory once."""
        sizes: dict[str, int] = {}
        put: dict[int, Any] = {id(None): None}
        for each in parcels(messages, self.limit):
            if each.rest is not None and id(each.rest) not in put:
                put[id(each.rest)] = self.ray.put(np.frombuffer(each.rest, dtype=np.uint8))
            sent = (
                each.client,
                each.operation,
                np.frombuffer(each.data, dtype=np.uint8),
                put[id(each.rest)],
            )
            self.home[each.client].post(each.number, sent, self.now)
            sizes[each.client] = each.size
        return sizes

    def _awaited(self) -> set[int]:
        return {number for actor in self.actors for number in actor.asked}

    def drop(self, numbers: set[int]) -> None:
        for actor in self.actors:
            actor.dropped |= actor.asked.keys() & numbers
        super().drop(numbers)

    def _listen(self, until: float = math.inf) -> None:
        """Wait for the next replies, but not beyond `until` and what patience with each actor is left."""
        waiting = {
            asked.reply: (actor, number)
            for actor in self.actors
            for number, asked in actor.asked.items()
        }
        starting = {actor.ready: actor for actor in self.actors if not actor.up}
        ends = min(actor.heard + self._patience(actor) for actor in self.actors if actor.asked)
        refs = [*starting, *waiting]
        ready, _ = self.ray.wait(refs, num_returns=1, timeout=max(0.0, min(until, ends) - self.now))
        if ready:
            ready, _ = self.ray.wait(refs, num_returns=len(refs), timeout=0)
        for ref in ready:
            if ref in starting:
                starting[ref].up, starting[ref].heard = True, self.now
                continue
            actor, number = waiting[ref]
            if (
                number in actor.asked and actor.asked[number].reply == ref
            ):  # it may have been asked again meanwhile
                self._take(actor, number)
        for actor in self.actors:
            if actor.asked and self.now >= actor.heard + self._patience(actor):
                self._replace(actor, f"did not answer within {self._patience(actor):g} s")

    def _patience(self, actor: "Actor") -> float:
        return self.timeout if actor.up else START

    def _take(self, actor: "Actor", number: int) -> None:
        """A reply: of the client, or of Ray for it."""
        asked = actor.asked[number]
        try:
            data, changed = self.ray.get(asked.reply)
            size, reply = len(data), read(data, number, self.limit)
        except self.ray.exceptions.RayActorError as error:
            actor.deaths += 1
            return self._replace(
                actor,
                f"its process died {DEATHS} times over this: {cause(error)}"
                if actor.deaths >= DEATHS
                else None,
            )
        except self.ray.exceptions.RayError as error:
            size, reply, changed = 0, {"number": number, "failure": cause(error)}, "no"
        actor.heard, actor.deaths = self.now, 0
        del actor.asked[number]
        if changed == "kept":
            actor.told = []
        elif changed == "yes":
            actor.told.append(asked.message)
        if number in actor.dropped:
            actor.dropped.discard(number)
        else:
            self.arrived[number] = Arrival(asked.message[0], self.now, size, reply)

    def _replace(self, actor: "Actor", reason: str | None = None) -> None:
        """Another process for the same clients, told what they must know. With a reason: the client the old one was busy with failed."""
        actor.kill(self.ray)
        if reason is not None and actor.asked:
            number = next(iter(actor.asked))
            asked = actor.asked.pop(number)
            actor.deaths = 0
            if number not in actor.dropped:
                self.arrived[number] = Arrival(
                    asked.message[0], self.now, 0, {"number": number, "failure": reason}
                )
        process, self.spare = self.spare or self.start(), None
        actor.begin(process)
        self.spare = self.stand_by()
        again = [*actor.told, *(asked.message for asked in actor.asked.values())]
        self.repeated += [(client, operation) for client, operation, *_ in again]
        for message in actor.told:
            actor.ready = actor.process.handle.remote(*message)
        asked_before, actor.asked = actor.asked, {}
        for number, asked in asked_before.items():
            actor.post(number, asked.message, self.now)

    # what is saved after a round

    def save(self, round: int) -> None:
        self._tell_all("save", round)
        for actor in self.actors:
            actor.told = []
        self.spare = self.spare or self.stand_by()

    def load(self, round: int, now: float, pending: list[dict[str, Any]]) -> None:
        self.restart(now, pending)
        self.store.rewind(round)
        for actor in self.actors:
            actor.asked, actor.told, actor.dropped = {}, [], set()
        self._tell_all("forget")

    def _tell_all(self, do: str, *what: int) -> None:
        """Have every actor do something. One that dies over it, or does not in time, is replaced and told again."""
        left = {i: getattr(actor.process, do).remote(*what) for i, actor in enumerate(self.actors)}
        for _ in range(DEATHS):
            for i, ref in list(left.items()):
                try:
                    self.ray.get(ref, timeout=self.timeout)
                    del left[i]
                except (self.ray.exceptions.RayActorError, self.ray.exceptions.GetTimeoutError):
                    self._replace(self.actors[i])
                    left[i] = getattr(self.actors[i].process, do).remote(*what)
                except self.ray.exceptions.RayError as error:
                    raise EngineError(f"a Ray actor could not {do}: {cause(error)}") from None
            if not left:
                return
        names = ", ".join(client for i in left for client in self.actors[i].clients)
        raise EngineError(
            f"the Ray actor of {names} could not {do} in {DEATHS} attempts; look at Ray's logs, then resume the run"
        )

    def close(self) -> None:
        """Ends the actors; the cluster, where it was started here, ends with this program."""
        for process in [
            *(actor.process for actor in self.actors),
            *([self.spare] if self.spare else []),
        ]:
            self.ray.kill(process)


Posted = tuple[
    str, Any, Any, Any
]  # client, operation, the bytes or their head, and Ray's reference to the rest


@dataclass
class Asked:
    message: Posted
    reply: Any  # Ray's reference


class Actor:
    """The server's end of one."""

    def __init__(self, clients: list[str], data: Any, process: Any):
        self.clients, self.data = (
            clients,
            data,
        )  # their ids; Ray's reference to them and to what makes their sides
        self.asked: dict[int, Asked] = {}  # not yet answered, in order
        self.told: list[Posted] = []  # what changed a client since it was stored, in order
        self.dropped: set[int] = set()  # nobody waits for these
        self.heard = 0.0  # when it last answered, or began to have something to do
        self.deaths = 0
        self.begin(process)

    def begin(self, process: Any) -> None:
        self.process, self.hello, self.up = process, process.settle.remote(self.data), False
        self.ready = self.hello  # the last thing it does before it is up

    def post(self, number: int, message: Posted, now: float) -> None:
        if not self.asked:
            self.heard = now
        self.asked[number] = Asked(message, self.process.handle.remote(*message))

    def kill(self, ray: Any) -> None:
        ray.kill(self.process)
        with suppress(ray.exceptions.RayError, OSError):
            _, node, pid = ray.get(self.hello, timeout=0)
            if node == ray.get_runtime_context().get_node_id():
                os.kill(pid, signal.SIGKILL)  # a frozen process does not hear Ray


def connected(address: str | None) -> Any:
    """The module ray, with a cluster behind it: one this program has already, that of an address, or a new one on this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # or Ray warns of it
    os.environ.setdefault(
        "RAY_DEDUP_LOGS_SKIP_REGEX", "."
    )  # or it writes of dead actors on stdout, which is for results
    import ray

    if not ray.is_initialized():
        try:
            ray.init(
                address=address or "local",
                log_to_driver=False,
                logging_level=logging.ERROR,
                include_dashboard=None if address else False,
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            there = (
                f"no Ray cluster answers at {address}"
                if address
                else "no Ray cluster could be started here"
            )
            raise UserError(f"{there}: {str(error).splitlines()[0]}") from None
    return ray


def room(resources: dict[str, float], actors: int | None, cpus: float, gpus: float) -> int:
    """How many actors there are to be: as many as were asked for, or fit in."""
    fit = int(
        min(resources.get("CPU", 0) / cpus, resources.get("GPU", 0) / gpus if gpus else math.inf)
        + 1e-9
    )
    if not fit or (actors or 0) > fit:
        raise UserError(
            f"there is room for {fit} actors of {cpus:g} CPUs and {gpus:g} GPUs each; the cluster has "
            f"{resources.get('CPU', 0):g} CPUs and {resources.get('GPU', 0):g} GPUs: set engine.actors, .cpus, .gpus"
        )
    return actors or fit


def cause(error: Exception) -> str:
    """Ray's words in one line: the exception in an actor, or how it ended."""
    if (inner := getattr(error, "cause", None)) is not None:
        return (
            f"{inner}"
            if isinstance(inner, EngineError | ValueError)
            else f"{type(inner).__name__}: {inner}"
        )
    told = str(error).strip()
    if "Worker exit detail:" in told:
        return told.split("Worker exit detail:")[1].strip().split(" Some common causes")[0]
    lines = told.splitlines()
    return lines[-1 if "creation task" in lines[0] else 0].strip()
