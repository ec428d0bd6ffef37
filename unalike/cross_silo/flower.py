"""The Flower engine: the server is a ServerApp on the Grid, clients are ClientApps on SuperNodes.

Flower starts a process for every message and looks for messages every 3 s. So clients are stored
after each message, and a message that was lost with a process or a SuperNode is sent again, which
is harmless because messages are numbered. Knows nothing of methods.
"""

import json
import math
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from pydantic import Field

from unalike.base.errors import UserError
from unalike.base.events import EventTail
from unalike.core.engine import Watch
from unalike.cross_silo import supervisor
from unalike.cross_silo.certificates import check_certificate
from unalike.cross_silo.client_endpoint import ClientEndpoint
from unalike.cross_silo.gate import CONNECTED, REFUSALS, SEEN, SUPEREXEC, public_keys
from unalike.engines.process import EngineError
from unalike.scenarios.schema import client_ids

START_TIMEOUT = 60.0  # seconds until SuperLink and SuperNodes must be online
MAX_TRIES = 3  # of a message whose process died
POLL = 0.2  # seconds between looks for replies
NODE_POLL = 2.0  # seconds between looks which SuperNodes are online
REACH = 120.0  # seconds a SuperNode may be offline until its client has failed
QUIET = 7.0  # seconds without a sign of a SuperNode, which looks for messages every 3 s
PENDING = 25.0  # seconds until Flower must have started a run's program
STATUS_POLL = 15.0  # seconds between `flwr ls`, which takes seconds itself
COMMAND_TIMEOUT = 120  # seconds a command of Flower's may take
Positive = Annotated[float, Field(gt=0)]


class FlowerEngine:
    """Runs a federation in Flower.

    Args:
        folder: the run's folder.
        app: folder that `unalike deploy flower` wrote, whose SuperLink runs on this machine.
            Without it a federation is deployed and started here, with a SuperNode for each client
            of the scenario.
        clients: SuperNodes that must be online before the run starts. Default: as many as the
            scenario has clients, or one.
        timeout: seconds until a client that does not answer has failed.
    """

    PATHS: ClassVar[tuple[str, ...]] = ("app",)  # options that are paths
    hosts_clients: ClassVar[bool] = False
    uses_this_machine: ClassVar[bool] = False
    slow_messages: ClassVar[bool] = True

    def __init__(
        self,
        folder: Any,
        *,
        app: str | None = None,
        clients: Annotated[int, Field(ge=1)] | None = None,
        timeout: Positive = 600.0,
    ):
        self.folder = folder
        self.timeout = timeout
        ids = client_ids(folder.config)
        if app is None and not ids:
            raise UserError(
                "this run has no clients of its own: deploy a federation and give its folder, "
                "engine.app=FOLDER"
            )
        self.min_clients = clients or len(ids) or 1
        self.watch: Watch = lambda event, **facts: None
        self.run: Any = None  # Flower's id of the run that was submitted last
        self.local: LocalFlowerFederation | None = None
        if app is not None:
            self.place = Path(app).resolve()
        else:
            self.place = folder.path.resolve() / "flower"
            self._deploy_here(ids)
            self.local = LocalFlowerFederation(self.place, ids)
        if not (self.place / "app" / "pyproject.toml").exists():
            raise UserError(
                f"{self.place} is no deployed federation: write one with "
                "`unalike deploy flower SCENARIO --out FOLDER`"
            )

    def _deploy_here(self, ids: list[str]) -> None:
        from unalike.cross_silo.flower_deploy import deploy, free_ports

        if not self.place.exists():
            config = self.folder.path.resolve() / "config.yaml"
            deploy(self.place, ids, config, f"127.0.0.1:{free_ports(1)[0]}")

    def launch(self, watch: Watch) -> dict[str, Any]:
        """Submit the app until the run has ended, and return its results."""
        from unalike.cross_silo.remote_run import follow

        self.watch = watch
        try:
            if self.local is not None:
                self.local.start()
            return follow(self.folder, watch, self.submit)
        except BaseException:
            self.stop_run()
            raise
        finally:
            if self.local is not None:
                self.local.stop()

    def stop_run(self) -> None:
        """End the ServerApp that was submitted last: nobody follows it any more."""
        if self.run is not None and self.local is None:
            with suppress(Exception):
                run_flwr(self.place, "stop", str(self.run), "unalike")

    def submit(self) -> Callable[[], str | None]:
        """Start the ServerApp.

        Returns: a function that says why it ended, None while it is running.
        """
        from unalike.cross_silo.flower_deploy import check_app

        check_app(self.place)
        check_certificate(self.place / "certificates" / "server.pem")
        refusals = EventTail(self.place / REFUSALS)
        app = str(self.place / "app")
        run_config = (
            f'folder="{self.folder.path.resolve()}" federation="{self.place}" '
            f"clients={self.min_clients} timeout={self.timeout}"
        )
        self.stop_run()  # one before it that failed is not always noticed by Flower
        run = run_flwr(self.place, "run", app, "unalike", "--run-config", run_config)["run-id"]
        self.run = run
        start = last_look = time.monotonic()
        is_pending = False

        def end_reason() -> str | None:
            nonlocal last_look, is_pending
            if self.local is not None:
                self.local.start()
            for refusal in refusals.read():
                text = f"somebody at {refusal['peer']} was not let in: {refusal['reason']}"
                self.watch("notice", text=text)
            if time.monotonic() - last_look < STATUS_POLL:
                return None
            last_look = time.monotonic()
            try:
                listing = run_flwr(self.place, "ls", "unalike", "--run-id", str(run))
            except EngineError:
                return None
            status = str(listing["runs"][0]["status"])
            if status == "pending" and not is_pending and last_look - start > PENDING:
                is_pending = True
                text = "Flower has not started the run yet: look at the output of the SuperLink"
                self.watch("waiting", text=text)
            return f"Flower says {status}" if status.startswith("finished") else None

        return end_reason


def run_flwr(place: Path, *words: str) -> dict[str, Any]:
    """Run the command `flwr` in a deployed federation and return its answer.

    Raises: EngineError with what it says, where it fails.
    """
    process = subprocess.run(
        [executable("flwr"), *words, "--format", "json"],
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT,
        env=environment(place),
    )
    output = process.stdout
    try:
        # other lines may come before and after the JSON
        answer = json.loads(output[output.index("{") : output.rindex("}") + 1])
    except ValueError:
        answer = {}
    if process.returncode or answer.get("success") is False:
        reason = answer.get("error-message") or (process.stderr or output).strip()[-400:]
        raise EngineError(f"flwr {words[0]}: {reason}")
    return answer


def environment(place: Path) -> dict[str, str]:
    """Environment of Flower's commands: where their configuration is, no telemetry."""
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
    """A program of the Python environment that this one runs in."""
    return str(Path(sys.executable).parent / name)


# What runs in the app: `unalike_app.py` of a deployment imports these two.

server = ServerApp()
client = ClientApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """The server's program: one run."""
    from unalike.cross_silo.remote_run import serve
    from unalike.runs.run_folder import Folder

    config = context.run_config
    keys = Path(str(config["federation"])) / "keys"
    folder = Folder(Path(str(config["folder"])))
    say = lambda text: folder.record("waiting", text=text)
    transport = FlowerTransport(grid, int(str(config["clients"])), keys, say)
    try:
        serve(Path(str(config["folder"])), transport, float(str(config["timeout"])))
    finally:
        transport.close()


@client.query()
def answer(message: Message, context: Context) -> Message:
    """Answer one request to the client of this SuperNode (--node-config 'client="FILE"')."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    request: Any = message.content["ask"]
    endpoint = ClientEndpoint(str(context.node_config["client"]), resident=False)
    data = endpoint.answer(request["do"], request["data"], request["run"], request["place"])
    return Message(RecordDict({"reply": ConfigRecord({"data": data})}), reply_to=message)


Activation = tuple[int, str]  # a SuperNode's id, and when it came online


@dataclass
class Request:
    """A request to a client.

    Attributes:
        node: the id that the client's SuperNode had at first.
        content: what is sent.
        deadline: in seconds of the monotonic clock.
        answer: resolved with the reply's bytes.
        tries: how often it was sent.
        sent_at: when it was sent last, in seconds since 1970.
        sent_to: the SuperNode it was sent to last.
    """

    node: int
    content: dict[str, Any]
    deadline: float
    answer: "Future[bytes]" = field(default_factory=Future)
    tries: int = 0
    sent_at: float = math.inf
    sent_to: Activation | None = None


class FlowerTransport:
    """Carries bytes to SuperNodes and back. One thread of its own talks to the Grid.

    A SuperNode takes part only if it has the key NAME.pub of the folder `keys` and was registered
    under NAME. Each is known by the id it had at first: if its key is replaced, the SuperNode that
    comes with the new key takes its place, and the old one is ignored.

    Args:
        grid: Flower's.
        min_clients: SuperNodes that must be online; waits for them.
        keys: folder with the public key of each client.
        say: called with a sentence about who is awaited.
    """

    def __init__(
        self,
        grid: Grid,
        min_clients: int,
        keys: Path,
        say: Callable[[str], None] = lambda text: None,
    ):
        self.grid = grid
        self.keys = keys
        self.say = say
        self.nodes: dict[str, int] = {}  # SuperNodes of admitted clients, by client
        members = self._wait_for_members(min_clients)
        self.names_by_node = {node.node_id: node.name for node in members}
        self.last_online = dict.fromkeys(self.names_by_node, time.monotonic())
        self.new_requests: queue.Queue[Request] = queue.Queue()
        self.unsent: list[Request] = []  # to SuperNodes that are offline at the moment
        self.in_flight: dict[str, Request] = {}  # by the id of Flower's message
        self.quiet: set[str] = set()  # clients of which it was said that there is no sign
        self.broken: Exception | None = None
        self.open = True
        threading.Thread(target=self._carry_messages, daemon=True).start()

    def _wait_for_members(self, count: int) -> list[Any]:
        start = time.monotonic()
        members = self._members()
        said = ""
        while len(members) < count:
            online = {node.name for node in members}
            awaited = ", ".join(sorted(public_keys(self.keys).keys() - online))
            text = f"{len(online)} of {count} SuperNodes are online; not online: {awaited}"
            if time.monotonic() - start > START_TIMEOUT:
                raise EngineError(f"{text}, after {START_TIMEOUT:g} s")
            if text != said:
                self.say(f"waiting: {text}")
                said = text
            time.sleep(POLL)
            members = self._members()
        return members

    def names(self) -> list[str]:
        """The ids of all SuperNodes that may take part."""
        return [str(node) for node in sorted(self.names_by_node)]

    def admit(self, name: str, id: str) -> None:
        """Check that a SuperNode's client has the name its key was registered under."""
        registered = self.names_by_node[int(name)]
        if registered != id:
            raise ValueError(
                f'the SuperNode of {registered} says it is "{id}", which is not the name its key '
                "was registered under"
            )
        if id in self.nodes:
            raise ValueError(f'two SuperNodes say they are "{id}"; ids must differ')
        self.nodes[id] = int(name)

    def request(
        self,
        client: str,
        action: str,
        data: bytes,
        run: str,
        place: str,
        timeout: float,
        tensors: bytearray | None = None,
    ) -> "Future[bytes]":
        """Send a request to a client (`Transport.request`)."""
        content = {"do": action, "data": data + (tensors or b""), "run": run, "place": place}
        node = self.nodes[client] if client in self.nodes else int(client)
        request = Request(node, content, deadline=time.monotonic() + timeout)
        self.new_requests.put(request)
        return request.answer

    def check(self) -> None:
        """Raise EngineError where the SuperLink is gone."""
        if self.broken is not None:
            raise EngineError(f"the SuperLink cannot be reached: {self.broken}")

    def close(self) -> None:
        """End the thread."""
        self.open = False

    def _carry_messages(self) -> None:
        """The thread: send requests, take replies, look after SuperNodes that come and go."""
        last_look = 0.0
        try:
            while self.open:
                while not self.new_requests.empty():
                    self._push(self.new_requests.get())
                # one message at a time: what one client sends harms no other
                for message_id in list(self.in_flight):
                    self._pull(message_id)
                if (self.in_flight or self.unsent) and time.monotonic() - last_look > NODE_POLL:
                    self._check_nodes()
                    last_look = time.monotonic()
                time.sleep(POLL)
        except Exception as error:
            self.broken = error

    def _push(self, request: Request) -> None:
        """Send a request, or keep it until its SuperNode is online."""
        request.tries += 1
        activation = self._online().get(request.node)
        if activation is None:
            self.unsent.append(request)
            return
        request.sent_to = activation
        request.sent_at = time.time()
        message = Message(
            RecordDict({"ask": ConfigRecord(request.content)}),
            activation[0],
            "query",
            ttl=max(1.0, request.deadline - time.monotonic()),
        )
        (message_id,) = self.grid.push_messages([message])
        if message_id is None:
            self.unsent.append(request)
        else:
            self.in_flight[message_id] = request

    def _pull(self, message_id: str) -> None:
        """Take the reply to one message, if there is one."""
        try:
            replies = list(self.grid.pull_messages([message_id]))
        except Exception as error:
            # If the SuperLink is gone, `_retry` raises when it looks which SuperNodes are online.
            self._retry(self.in_flight.pop(message_id), f"its reply cannot be read: {error}")
            return
        for reply in replies:
            self._take_reply(reply, self.in_flight.pop(message_id))

    def _take_reply(self, message: Message, request: Request) -> None:
        if message.has_error():
            self._retry(request, message.error.reason)
            return
        try:
            record: Any = message.content["reply"]
            data = record["data"]
        except (KeyError, TypeError, ValueError):
            data = None
        if isinstance(data, bytes):
            request.answer.set_result(data)
        else:
            error = EngineError('its reply has no record "reply" with bytes "data"')
            request.answer.set_exception(error)

    def _retry(self, request: Request, reason: str | None) -> None:
        """Send a request again that was not answered, unless it was tried too often."""
        if request.node not in self._online():
            self.unsent.append(request)
        elif request.tries < MAX_TRIES and time.monotonic() < request.deadline:
            # Its process died; the next one reads the client's state from disk.
            self._push(request)
        else:
            error = EngineError(f"its process failed {request.tries} times over this: {reason}")
            request.answer.set_exception(error)

    def _check_nodes(self) -> None:
        """Fail requests that are too late; send again what a restarted SuperNode was sent."""
        online = self._online()
        now = time.monotonic()
        self.last_online |= dict.fromkeys(online, now)
        self._look_for_silence()
        in_flight = list(self.in_flight.items())
        unsent = self.unsent
        self.unsent = []
        for request in unsent:
            if self._is_lost(request, now):
                self._fail(request, online)
            elif request.node not in online:
                self.unsent.append(request)
            else:
                request.tries -= 1  # it was not sent the last time
                self._push(request)
        for message_id, request in in_flight:
            if self._is_lost(request, now):
                del self.in_flight[message_id]
                self._fail(request, online)
            elif online.get(request.node, request.sent_to) != request.sent_to:
                del self.in_flight[message_id]
                self._push(request)

    def _look_for_silence(self) -> None:
        """Say of which awaited clients there is no sign: the SuperLink takes a minute to notice.

        A SuperNode that waits asks for messages every 3 s. One that has asked since the request was
        sent is at work: it sends nothing meanwhile, but its connection stays open.
        """
        place = self.keys.parent
        awaited = {request.node: request for request in [*self.in_flight.values(), *self.unsent]}
        for node, request in sorted(awaited.items()):
            name = self.names_by_node[node]
            last_sign = last_touch(place / SEEN / name)
            if last_sign is None:
                continue  # there is no gate
            if last_sign > request.sent_at:
                last_sign = max(last_sign, last_touch(place / CONNECTED / name) or 0.0)
            silence = time.time() - last_sign
            if silence > QUIET and name not in self.quiet:
                self.quiet.add(name)
                self.say(
                    f"no sign of {name} for {silence:.0f} s; it is left out {REACH:g} s after "
                    "Flower has noticed"
                )
            elif silence <= QUIET and name in self.quiet:
                self.quiet.discard(name)
                self.say(f"{name} is there again")

    def _is_lost(self, request: Request, now: float) -> bool:
        return now > request.deadline or now - self.last_online[request.node] > REACH

    def _fail(self, request: Request, online: dict[int, Activation]) -> None:
        reason = "its SuperNode is not there any more: it left, or its network is cut"
        if request.node in online:
            reason = "did not answer in time"
        request.answer.set_exception(EngineError(reason))

    def _online(self) -> dict[int, Activation]:
        """SuperNodes that are online, by the id each had at first."""
        first_ids = {name: node for node, name in self.names_by_node.items()}
        online = {}
        for node in self._members():
            first_id = first_ids.get(node.name, node.node_id)
            online[first_id] = (node.node_id, node.last_activated_at)
        return online

    def _members(self) -> list[Any]:
        """SuperNodes online that have the key of the name they were registered under."""
        keys = public_keys(self.keys)
        nodes = self.grid.get_nodes()
        return [n for n in nodes if n.name in keys and keys[n.name] == n.public_key]


def last_touch(path: Path) -> float | None:
    """When a file was last touched, in seconds since 1970; None if it is not there."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None


class LocalFlowerFederation:
    """A SuperLink and a SuperNode for each client, started here, on loopback only.

    A SuperNode gets a new key each time it is started. With the key of one that died the SuperLink
    would let nobody in until it has noticed, which takes up to a minute.

    Args:
        place: folder of the deployment.
        ids: the clients.
    """

    def __init__(self, place: Path, ids: list[str]):
        self.place = place
        self.ids = ids
        self.processes: dict[str, subprocess.Popen] = {}

    def start(self) -> None:
        """Start all processes that are not running, by the commands of the deployment."""
        from unalike.cross_silo.flower_deploy import commands, make_key

        known = commands(self.place)
        for name in ["superlink", *self.ids]:
            if name in self.processes and self.processes[name].poll() is None:
                continue
            if name != "superlink":
                key = self.place / "keys" / name
                key.unlink(missing_ok=True)
                make_key(key)
                self._register(name)
            program, *arguments = known[name]
            command = [executable(program), *arguments]
            # the gate does this for the SuperLink, by which it is started
            essential = "" if name == "superlink" else SUPEREXEC
            with (self.place / f"{name}.log").open("ab") as log:
                self.processes[name] = subprocess.Popen(
                    supervisor.command(command, os.getpid(), essential=essential),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment(self.place),
                    start_new_session=True,
                )

    def _register(self, id: str) -> None:
        """Register a SuperNode's key under its name, waiting for a SuperLink that is starting."""
        key = f"{self.place / 'keys' / id}.pub"
        start = time.monotonic()
        while True:
            try:
                run_flwr(self.place, "supernode", "register", key, "unalike", "--name", id)
                return
            except EngineError:
                if time.monotonic() - start > START_TIMEOUT:
                    raise
                time.sleep(0.5)

    def stop(self) -> None:
        """End all processes."""
        supervisor.stop(self.processes.values())
