"""The Flower engine: the server's program as a ServerApp on the Grid, clients as ClientApps on SuperNodes. Knows nothing of methods.

Flower starts a process for every message and looks for messages every 3 s: clients go to disk after each, and what was lost with a
process or a SuperNode is asked again. Numbered messages make that harmless.
"""

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, Any, ClassVar

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from pydantic import Field

from unalike.base.errors import UserError
from unalike.core.engine import Watch
from unalike.cross_silo import supervisor
from unalike.cross_silo.client_endpoint import ClientEndpoint
from unalike.cross_silo.gate import public_keys
from unalike.engines.process import EngineError
from unalike.scenarios.schema import client_ids

START = 60.0  # seconds SuperLink and SuperNodes may take until they are there
TRIES = 3  # of a message whose process died
POLL = 0.2  # seconds between looks for replies
REACH = 120.0  # and a SuperNode may be away, until its client has failed
LOOK = 15.0  # and whether the run still goes on: a command of Flower's takes seconds
Positive = Annotated[float, Field(gt=0)]


class FlowerEngine:
    """A Flower federation a run is carried out in: that of a folder `unalike deploy flower` wrote, whose SuperLink runs on this machine;
    without `app` one is deployed and started here, with a SuperNode for each client of the scenario.

    It begins once `clients` SuperNodes are there (all of the scenario's, or one). A client that does not answer within `timeout` s has
    failed.
    """

    hosts_clients: ClassVar[bool] = False
    uses_this_machine: ClassVar[bool] = False

    def __init__(
        self,
        folder: Any,
        *,
        app: str | None = None,
        clients: Annotated[int, Field(ge=1)] | None = None,
        timeout: Positive = 600.0,
    ):
        from unalike.cross_silo.flower_deploy import deploy, ports

        self.folder, self.timeout, ids = folder, timeout, client_ids(folder.config)
        if app is None and not ids:
            raise UserError(
                "this run has no clients of its own: deploy a federation and give its folder, engine.app=FOLDER"
            )
        self.least = clients or len(ids) or 1
        self.place = Path(app).resolve() if app is not None else folder.path.resolve() / "flower"
        if app is None and not self.place.exists():
            deploy(
                self.place, ids, folder.path.resolve() / "config.yaml", f"127.0.0.1:{ports(1)[0]}"
            )
        if not (self.place / "app" / "pyproject.toml").exists():
            raise UserError(
                f"{self.place} is no deployed federation: write one with `unalike deploy flower SCENARIO --out FOLDER`"
            )
        self.here = LocalFlowerFederation(self.place, ids) if app is None else None

    def launch(self, watch: Watch) -> dict[str, Any]:
        from unalike.cross_silo.remote_run import follow

        try:
            if self.here is not None:
                self.here.start()
            return follow(self.folder, watch, self.submit)
        finally:
            if self.here is not None:
                self.here.stop()

    def submit(self) -> Callable[[], str | None]:
        """Start the ServerApp; what is returned tells how it ended, None while it goes on."""
        from unalike.cross_silo.flower_deploy import check_app

        check_app(self.place)
        told = {
            "folder": str(self.folder.path.resolve()),
            "federation": str(self.place),
            "clients": self.least,
            "timeout": self.timeout,
        }
        config = " ".join(
            f'{key}="{value}"' if isinstance(value, str) else f"{key}={value}"
            for key, value in told.items()
        )
        run = run_flwr(
            self.place,
            "run",
            str(self.place / "app"),
            "unalike",
            "--run-config",
            config,
            "--format",
            "json",
        )["run-id"]

        asked = time.monotonic()

        def ended() -> str | None:
            nonlocal asked
            if self.here is not None:
                self.here.start()
            if time.monotonic() - asked < LOOK:
                return None
            asked = time.monotonic()
            try:
                listed = run_flwr(
                    self.place, "ls", "unalike", "--run-id", str(run), "--format", "json"
                )["runs"][0]
            except EngineError:
                return None
            return (
                f"Flower says {listed['status']}"
                if str(listed["status"]).startswith("finished")
                else None
            )

        return ended


def run_flwr(place: Path, *command: str) -> dict[str, Any]:
    """What the command `flwr` answers."""
    import json

    done = subprocess.run(
        [executable("flwr"), *command],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(place),
    )
    try:
        told = json.loads(done.stdout[done.stdout.index("{") : done.stdout.rindex("}") + 1])
    except ValueError:
        told = {}
    if done.returncode or told.get("success") is False:
        said = told.get("error-message") or (done.stderr or done.stdout).strip()[-400:]
        raise EngineError(f"flwr {command[0]}: {said}")
    return told


def environment(place: Path) -> dict[str, str]:
    """Where Flower's commands find their configuration, and each other; and they tell nobody of it."""
    source = str(Path(__file__).parents[2])
    return {
        **os.environ,
        "FLWR_HOME": str(place / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]),
    }


def executable(name: str) -> str:
    return str(Path(sys.executable).parent / name)


# what runs in the app

server, client = ServerApp(), ClientApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """The server's program: one run."""
    from unalike.cross_silo.remote_run import serve

    timeout = float(str(context.run_config["timeout"]))
    keys = Path(str(context.run_config["federation"])) / "keys"
    line = FlowerTransport(grid, int(str(context.run_config["clients"])), keys)
    try:
        serve(Path(str(context.run_config["folder"])), line, timeout)
    finally:
        line.close()


@client.query()
def answer(message: Message, context: Context) -> Message:
    """One message to the client that the SuperNode was started for, with --node-config 'client="FILE"'."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    asked: Any = message.content["ask"]
    site = ClientEndpoint(str(context.node_config["client"]), resident=False)
    data = site.answer(asked["do"], asked["data"], asked["run"], asked["place"])
    return Message(RecordDict({"reply": ConfigRecord({"data": data})}), reply_to=message)


Came = tuple[int, str]  # a SuperNode's number, and when it came


class Asked:
    """A message under way to a node."""

    def __init__(self, node: int, what: dict[str, Any], ends: float, reply: "Future[bytes]"):
        self.node, self.what, self.ends, self.reply, self.tries = node, what, ends, reply, 0
        self.to: Came | None = None


class FlowerTransport:
    """Bytes to SuperNodes and back. One thread talks to the Grid.

    Only those SuperNodes are there that have the key NAME.pub of the folder `keys` and were registered
    under NAME. Each is known by the number it had at first: when its key was exchanged for another, the
    one that comes with the new key is it, and the old one is there no more.
    """

    def __init__(self, grid: Grid, least: int, keys: Path):
        self.grid, self.keys = grid, keys
        self.nodes: dict[str, int] = {}  # of clients that were admitted
        begun = time.monotonic()
        while len(there := self._members()) < least:
            if time.monotonic() - begun > START:
                raise EngineError(f"{len(there)} of {least} SuperNodes are there after {START:g} s")
            time.sleep(POLL)
        self.names_by_node = {node.node_id: node.name for node in there}
        self.seen = dict.fromkeys(self.names_by_node, time.monotonic())  # when each was last there
        self.waiting: queue.Queue[Asked] = queue.Queue()
        self.held: list[Asked] = []  # for SuperNodes that are not there at the moment
        self.broken: Exception | None = None
        self.open = True
        threading.Thread(target=self._carry, daemon=True).start()

    def names(self) -> list[str]:
        return [str(node) for node in sorted(self.names_by_node)]

    def admit(self, name: str, id: str) -> None:
        """A SuperNode whose key was registered under a name is the client of that name and no other."""
        known = self.names_by_node[int(name)]
        if known != id:
            raise ValueError(
                f'the SuperNode of {known} says it is "{id}", which is not the name its key was registered under'
            )
        if id in self.nodes:
            raise ValueError(f'two SuperNodes say they are "{id}"; ids must differ')
        self.nodes[id] = int(name)

    def request(
        self,
        client: str,
        do: str,
        data: bytes,
        run: str,
        place: str,
        timeout: float,
        rest: bytearray | None = None,
    ) -> "Future[bytes]":
        what = {"do": do, "data": data + (rest or b""), "run": run, "place": place}
        asked = Asked(
            self.nodes[client] if client in self.nodes else int(client),
            what,
            time.monotonic() + timeout,
            Future(),
        )
        self.waiting.put(asked)
        return asked.reply

    def check(self) -> None:
        if self.broken is not None:
            raise EngineError(f"the SuperLink cannot be reached: {self.broken}")

    def close(self) -> None:
        self.open = False

    def _carry(self) -> None:
        under_way: dict[str, Asked] = {}
        looked = 0.0
        try:
            while self.open:
                while not self.waiting.empty():
                    self._push(self.waiting.get(), under_way)
                for number in list(under_way):  # one by one: what one sends harms no other
                    self._pull(number, under_way)
                if (under_way or self.held) and time.monotonic() - looked > 2.0:
                    self._look(under_way)
                    looked = time.monotonic()
                time.sleep(POLL)
        except Exception as error:
            self.broken = error

    def _push(self, asked: Asked, under_way: dict[str, Asked]) -> None:
        asked.tries += 1
        if (to := self._there().get(asked.node)) is None:
            self.held.append(asked)
            return
        asked.to = to
        message = Message(
            RecordDict({"ask": ConfigRecord(asked.what)}),
            to[0],
            "query",
            ttl=max(1.0, asked.ends - time.monotonic()),
        )
        (number,) = self.grid.push_messages([message])
        if number is None:
            self.held.append(asked)
        else:
            under_way[number] = asked

    def _pull(self, number: str, under_way: dict[str, Asked]) -> None:
        try:
            messages = list(self.grid.pull_messages([number]))
        except Exception as error:  # looking who is there raises it again, if the SuperLink is gone
            self._repeat(under_way.pop(number), f"its reply cannot be read: {error}", under_way)
            return
        for message in messages:
            self._take(message, under_way.pop(number), under_way)

    def _take(self, message: Message, asked: Asked, under_way: dict[str, Asked]) -> None:
        if message.has_error():
            self._repeat(asked, message.error.reason, under_way)
            return
        try:
            record: Any = message.content["reply"]
            data = record["data"]
        except (KeyError, TypeError, ValueError):
            data = None
        if isinstance(data, bytes):
            asked.reply.set_result(data)
        else:
            asked.reply.set_exception(
                EngineError('its reply has no record "reply" with bytes "data"')
            )

    def _repeat(self, asked: Asked, why: str | None, under_way: dict[str, Asked]) -> None:
        """Ask again what was not answered."""
        if asked.node not in self._there():
            self.held.append(asked)  # until its SuperNode is started again
        elif asked.tries < TRIES and time.monotonic() < asked.ends:
            self._push(asked, under_way)  # its process died: another finds the client where it was
        else:
            asked.reply.set_exception(
                EngineError(f"its process failed {asked.tries} times over this: {why}")
            )

    def _look(self, under_way: dict[str, Asked]) -> None:
        """What a SuperNode was asked before it was started anew is asked again; who is late, or was not there for long, is given up."""
        now = self._there()
        self.seen |= dict.fromkeys(now, time.monotonic())
        under_way |= {f"held {i}": asked for i, asked in enumerate(self.held)}
        self.held = []
        for number, asked in list(under_way.items()):
            if time.monotonic() > asked.ends or time.monotonic() - self.seen[asked.node] > REACH:
                del under_way[number]
                gone = "its SuperNode is not there any more: it left, or its network is cut"
                why = "did not answer in time" if asked.node in now else gone
                asked.reply.set_exception(EngineError(why))
            elif number.startswith("held") and asked.node not in now:
                self.held.append(under_way.pop(number))
            elif number.startswith("held") or now.get(asked.node, asked.to) != asked.to:
                asked.tries -= number.startswith("held")
                self._push(under_way.pop(number), under_way)

    def _there(self) -> dict[int, Came]:
        """Where each SuperNode that is online is now, and since when."""
        first = {name: node for node, name in self.names_by_node.items()}
        return {
            first.get(node.name, node.node_id): (node.node_id, node.last_activated_at)
            for node in self._members()
        }

    def _members(self) -> list[Any]:
        """Who is online with the key of the name that it was registered under."""
        keys = public_keys(self.keys)
        return [
            node
            for node in self.grid.get_nodes()
            if node.name in keys and keys[node.name] == node.public_key
        ]


# a federation on this machine


class LocalFlowerFederation:
    """A SuperLink and a SuperNode for each client, started here, on loopback only. Each time a SuperNode is started it has a new key: with
    that of one that died the SuperLink lets nobody in until it has noticed, which takes it up to a minute."""

    def __init__(self, place: Path, ids: list[str]):
        self.place, self.ids = place, ids
        self.processes: dict[str, subprocess.Popen] = {}

    def start(self) -> None:
        """Whoever is not running, from the commands that were deployed."""
        from unalike.cross_silo.flower_deploy import commands, make_key

        told = commands(self.place)
        for name in ["superlink", *self.ids]:
            if name in self.processes and self.processes[name].poll() is None:
                continue
            if name != "superlink":
                (self.place / "keys" / name).unlink(missing_ok=True)
                make_key(self.place / "keys" / name)
                self._register(name)
            with (self.place / f"{name}.log").open("ab") as log:
                command = [executable(told[name][0]), *told[name][1:]]
                self.processes[name] = subprocess.Popen(
                    supervisor.command(command, os.getpid()),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment(self.place),
                    start_new_session=True,
                )

    def _register(self, id: str) -> None:
        """A SuperNode's key, under its name, once the SuperLink is there."""
        begun = time.monotonic()
        while True:
            try:
                key = f"{self.place / 'keys' / id}.pub"
                run_flwr(
                    self.place,
                    "supernode",
                    "register",
                    key,
                    "unalike",
                    "--name",
                    id,
                    "--format",
                    "json",
                )
                return
            except EngineError:
                if time.monotonic() - begun > START:
                    raise
                time.sleep(0.5)

    def stop(self) -> None:
        supervisor.stop(self.processes.values())
