"""The FLARE engine: server and clients are one NVIDIA FLARE Collab job, over mutual TLS.

In FLARE a client process that dies ends the whole job: the job is submitted again, and the run
continues from its last checkpoint. No code travels with a job: it names two classes, which sites
allow and have installed. Knows nothing of methods.
"""

import io
import json
import logging
import math
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

from nvflare.collab import collab
from nvflare.collab.api import CallOption
from pydantic import Field

from unalike.base.errors import UserError
from unalike.core.engine import Watch
from unalike.cross_silo.certificates import check_certificate
from unalike.cross_silo.client_endpoint import ClientEndpoint
from unalike.cross_silo.flare_kits import CLIENT_FILE, LocalFlareFederation
from unalike.cross_silo.policy import ALLOWED_CLASSES, client_config
from unalike.engines.process import EngineError
from unalike.scenarios.schema import client_ids

START_TIMEOUT = 60.0  # seconds until a server that is starting must answer
RETRY = 0.3  # seconds between attempts to reach it
UNREACHABLE = "could not be reached"  # how the reason of a failure begins where a site is gone
REACH = 30.0  # seconds without an answer until a site counts as gone
QUIET = 0.2  # of these: after so long without a sign of a site, that is said
RETURN = 60.0  # seconds that sites which were lost have to come back, before the run goes on
SIGN = 25.0  # seconds since a site's last sign, by FLARE's server, within which it is connected
WAITING_POLL = 3.0  # seconds between looks which sites are connected
PROBE_TIMEOUT = 3.0  # seconds until the server's port must answer
Positive = Annotated[float, Field(gt=0)]


class FlareEngine:
    """Runs a federation as jobs of NVIDIA FLARE.

    Args:
        folder: the run's folder.
        kit: startup kit of the federation's administrator; this program must then run on the
            server's machine. Without it a federation is provisioned and started here, with a site
            for each client of the scenario.
        clients: sites that must be connected before the run starts. Default: as many as the
            scenario has clients, or one.
        timeout: seconds until a client that does not answer has failed.
    """

    PATHS: ClassVar[tuple[str, ...]] = ("kit",)  # options that are paths
    hosts_clients: ClassVar[bool] = False
    uses_this_machine: ClassVar[bool] = False
    slow_messages: ClassVar[bool] = False

    def __init__(
        self,
        folder: Any,
        *,
        kit: str | None = None,
        clients: Annotated[int, Field(ge=1)] | None = None,
        timeout: Positive = 600.0,
    ):
        self.folder = folder
        path = folder.path.resolve()
        ids = client_ids(folder.config)
        if kit is None and not ids:
            raise UserError(
                "this run has no clients of its own: give the administrator's startup kit of the "
                "federation, engine.kit=FOLDER"
            )
        self.job = Job(
            server_class=ALLOWED_CLASSES["server"][1],
            args={"folders": [str(path)], "timeout": timeout},
            min_clients=clients or len(ids) or 1,
        )
        if kit is not None:
            self.session = Session(Path(kit))
        else:
            federation = LocalFlareFederation(path / "flare", ids, path / "config.yaml")
            self.session = Session(federation)

    def launch(self, watch: Watch) -> dict[str, Any]:
        """Submit jobs until the run has ended, and return its results."""
        try:
            return run_jobs(self.folder, watch, self.session, self.job)
        except BaseException:
            self.session.abort()
            raise
        finally:
            self.session.close()


def run_jobs(folder: Any, watch: Watch, session: "Session", job: "Job") -> dict[str, Any]:
    """Carry a run out by as many jobs as it takes; returns its results.

    FLARE takes about 8 s to end a job whose server has failed: the next one is submitted meanwhile.
    """
    from unalike.cross_silo.remote_run import failure_reason, follow

    def note_lost(event: str, **facts: Any) -> None:
        if event == "failure" and str(facts["reason"]).startswith(UNREACHABLE):
            session.lost.add(facts["client"])
        watch(event, **facts)

    session.watch = watch

    def submit() -> Callable[[], str | None]:
        job_end = session.submit(job)
        return lambda: failure_reason(folder) or job_end()

    return follow(folder, note_lost, submit)


@dataclass
class Job:
    """A FLARE job.

    Attributes:
        server_class: full name of the class of the server's half.
        args: its arguments.
        min_clients: sites that must be connected before it starts.
    """

    server_class: str
    args: dict[str, Any]
    min_clients: int

    def write(self, folder: Path) -> None:
        """Write it as FLARE takes it: one class for the server, one for clients, and no code."""
        controller = {"path": ALLOWED_CLASSES["server"][0], "args": {"server_obj_id": "program"}}
        server_config = {
            "format_version": 2,
            "task_data_filters": [],
            "task_result_filters": [],
            "workflows": [{"id": "controller", **controller}],
            "components": [{"id": "program", "path": self.server_class, "args": self.args}],
        }
        meta = {
            "name": "unalike",
            "resource_spec": {},
            "min_clients": self.min_clients,
            "deploy_map": {"app": ["@ALL"]},
        }
        config = folder / "app" / "config"
        config.mkdir(parents=True)
        (config / "config_fed_server.json").write_text(json.dumps(server_config))
        (config / "config_fed_client.json").write_text(json.dumps(client_config()))
        (folder / "meta.json").write_text(json.dumps(meta))


class Session:
    """An administrator's connection to a federation.

    Args:
        target: the administrator's startup kit, or a federation on this machine, whose processes
            are then started, and started again when they die.
    """

    def __init__(self, target: "Path | LocalFlareFederation"):
        self.local: LocalFlareFederation | None = None
        if isinstance(target, LocalFlareFederation):
            self.local = target
            self.kit = target.kit
        else:
            self.kit = target.resolve()
        self.connection: Any = None
        self.watch: Watch = lambda event, **facts: None
        self.job_id: Any = None  # of the last job
        self.sites: set[str] = set()  # connected when the last job was running
        self.lost: set[str] = set()  # sites of the last job that could not be reached any more
        self.server_start: float | None = None  # when the server that has the last job was started
        self.is_away = False  # whether it was said that the server cannot be reached
        self.last_probe = -math.inf  # when its port last answered
        self.restarted: set[str] = set()  # processes started again since it was submitted

    def submit(self, job: Job) -> Callable[[], str | None]:
        """Start a job.

        Returns: a function that says why the job ended, None while it is running.
        """
        if self.local is None and self.sites:
            # the job before ended early: who was lost may be back soon, or is left out
            job.min_clients = max(1, min(job.min_clients, len(self._await_sites())))
        with tempfile.TemporaryDirectory() as folder:
            job.write(Path(folder))
            job_id = self._submit_files(folder)
        self.job_id = job_id
        self.lost = set()
        look = Waiting(self, job.min_clients)

        def job_end() -> str | None:
            self._restart_processes()
            if self.restarted:  # new processes know nothing of the job
                self.abort()
                return f"the process of {', '.join(sorted(self.restarted))} died"
            try:
                status = str(self._connect().get_job_status(job_id))
                reason = look.report(status)
                if reason is not None:
                    self.abort()
                    return reason
            except EngineError:
                raise
            except Exception:  # the server may be starting again
                self._disconnect()
                return None
            return f"FLARE says {status}" if status.startswith("FINISHED") else None

        return job_end

    def system_info(self) -> Any:
        """What FLARE's server says of itself and the sites; None while it is starting again."""
        with suppress(Exception):
            return self._connect().get_system_info()
        return None

    def provisioned_sites(self) -> set[str]:
        """Sites that `unalike deploy flare` wrote kits for, if they are beside this one."""
        sites = self.kit.parent / "sites"
        return {path.name for path in sites.iterdir()} if sites.is_dir() else set()

    def _await_sites(self) -> set[str]:
        """Wait until the sites of the last job are connected again, RETURN seconds at most."""
        start = time.monotonic()
        connected: set[str] = set()
        lost: set[str] = set()
        while time.monotonic() - start < RETURN:
            info = self.system_info()
            connected = recent_sites(info) if info is not None else connected
            if self.sites <= connected:
                return connected
            if self.sites - connected != lost:
                lost = self.sites - connected
                names = ", ".join(sorted(lost))
                self.watch("waiting", text=f"waiting up to {RETURN:g} s for {names} to come back")
            time.sleep(1.0)
        return connected

    def _restart_processes(self) -> None:
        if self.local is not None:
            self.restarted |= set(self.local.start())

    def _submit_files(self, folder: str) -> Any:
        """Submit a job and return its id, waiting for a server that is just starting."""
        start = time.monotonic()
        while True:
            try:
                connection = self._connect()
                self.restarted.clear()
                self.server_start = None
                return connection.submit_job(folder)
            except (UserError, EngineError):
                raise
            except Exception as error:
                if time.monotonic() - start > START_TIMEOUT:
                    raise EngineError(f"FLARE's server takes no job: {error}") from None
                self._disconnect()
                time.sleep(RETRY)

    def abort(self) -> None:
        """End the job that was submitted last, if it is still running and the server is there."""
        if self.is_away:
            return
        with suppress(Exception):
            self._connect().abort_job(self.job_id)

    def _connect(self) -> Any:
        """FLARE's session with the server; waits for a server that is just starting."""
        from nvflare.fuel.flare_api.flare_api import new_secure_session

        # its lines about a server that is away say less than ours
        logging.getLogger("nvflare").setLevel(logging.CRITICAL)
        check_certificate(self.kit / "startup" / "client.crt")
        start = time.monotonic()
        self._await_server()
        while self.connection is None:
            self._restart_processes()  # the server may die while it is waited for
            try:
                with redirect_stdout(io.StringIO()):  # stdout is for results
                    self.connection = new_secure_session(
                        username=self._admin(), startup_kit_location=str(self.kit), timeout=5.0
                    )
            except UserError:
                raise
            except Exception as error:
                if time.monotonic() - start > START_TIMEOUT:
                    raise EngineError(f"no FLARE server lets {self.kit} in: {error}") from None
                time.sleep(RETRY)
        return self.connection

    def _await_server(self) -> None:
        """Wait until the server's port answers, and say so: FLARE's commands would only hang.

        Servers on this machine are not waited for here: they are started again.
        """
        is_recent = time.monotonic() - self.last_probe < WAITING_POLL
        if self.local is not None or (self.connection is not None and is_recent):
            return
        admin = self._admin_config()
        address = (str(admin["host"]), int(admin["port"]))
        where = "FLARE's server at {}:{}".format(*address)
        start = time.monotonic()
        while True:
            try:
                socket.create_connection(address, timeout=PROBE_TIMEOUT).close()
                break
            except OSError as error:
                if time.monotonic() - start > START_TIMEOUT:
                    raise EngineError(f"{where} cannot be reached: {error}") from None
                if not self.is_away:
                    self.is_away = True
                    text = f"{where} cannot be reached: waiting up to {START_TIMEOUT:g} s for it"
                    self.watch("waiting", text=text)
                self._disconnect()
                time.sleep(RETRY)
        self.last_probe = time.monotonic()
        if self.is_away:
            self.is_away = False
            self.watch("waiting", text=f"{where} is there again")

    def _admin_config(self) -> dict[str, Any]:
        path = self.kit / "startup" / "fed_admin.json"
        try:
            admin: dict[str, Any] = json.loads(path.read_text())["admin"]
        except (OSError, ValueError, KeyError):
            raise UserError(
                f"{self.kit} is no administrator's startup kit: it has no startup/fed_admin.json"
            ) from None
        return admin

    def _admin(self) -> str:
        """The administrator's name."""
        return self._admin_config().get("username") or self.kit.name

    def _disconnect(self) -> None:
        if self.connection is not None:
            with suppress(Exception):
                self.connection.close()
            self.connection = None

    def close(self) -> None:
        """Disconnect, and end a federation on this machine."""
        self._disconnect()
        if self.local is not None:
            self.local.stop()


class Waiting:
    """Says which sites are connected while a job waits for others.

    Args:
        session: to the federation.
        needed: sites that the job needs.
    """

    def __init__(self, session: Session, needed: int):
        self.session = session
        self.needed = needed
        self.last_look = time.monotonic()
        self.known: set[str] | None = None

    def report(self, status: str) -> str | None:
        """Look, every few seconds, which sites are connected; tell it while the job waits.

        Returns: why the job should be submitted again, if it should. FLARE fixes the sites when a
            job starts, so only a new one has those that came back; and a server that was started
            again says of the jobs before that they are running.
        """
        session = self.session
        if time.monotonic() - self.last_look < WAITING_POLL:
            return None
        self.last_look = time.monotonic()
        waits = status.startswith("SUBMITTED")
        if not waits and (session.local is not None or not status.startswith("RUNNING")):
            return None
        info = session.system_info()
        if info is None:
            return None
        connected = recent_sites(info)
        start = info.server_info.start_time
        if waits or session.server_start is None:
            session.server_start = start
        if start != session.server_start:
            return "FLARE's server was started again"
        if not waits:
            session.sites |= connected
            returned = sorted(session.lost & connected)
            return f"{', '.join(returned)} came back" if returned else None
        if connected != self.known:
            self.known = connected
            names = ", ".join(sorted(connected)) or "none"
            missing = ", ".join(sorted(session.provisioned_sites() - connected))
            awaited = f"; not connected: {missing}" if missing else ""
            session.watch(
                "waiting",
                text=f"waiting for sites: {len(connected)} of {self.needed} are connected "
                f"({names}){awaited}",
            )
        return None


def recent_sites(info: Any) -> set[str]:
    """Sites in FLARE's system information that it has heard of in the last SIGN seconds."""
    now = time.time()
    return {c.name for c in info.client_info if now - (c.last_connect_time or 0.0) < SIGN}


# The two classes that run in the job.


class FlareServer:
    """The server's half of a job: carries out the runs in these folders, one after another."""

    def __init__(self, folders: list[str], timeout: float):
        self.folders = folders
        self.timeout = timeout
        exit_with_parent()

    @collab.main
    def main(self) -> None:
        """FLARE's entry point."""
        from unalike.cross_silo.remote_run import serve
        from unalike.runs.run_folder import Folder

        transport = job_transport()
        for folder in self.folders:
            run = Folder(Path(folder))
            transport.say = partial(_record_waiting, run)
            serve(run.path, transport, self.timeout)


def _record_waiting(run: Any, text: str) -> None:
    run.record("waiting", text=text)


class FlareClient:
    """A client's half of a job. client.yaml in the `local` folder of its kit describes it."""

    def __init__(self) -> None:
        self.endpoint: ClientEndpoint | None = None
        self.lock = threading.Lock()
        exit_with_parent()

    @collab.publish
    def ping(self) -> bool:
        """Whether the site can be reached."""
        return True

    @collab.publish
    def answer(
        self, do: str, data: bytes, run: str, place: str, rest: bytes | None = None
    ) -> bytes:
        """Answer one request (`ClientEndpoint.answer`)."""
        with self.lock:
            if self.endpoint is None:
                import torch

                torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
                default = Path(collab.workspace.get_site_config_dir()) / "client.yaml"
                file = os.environ.get(CLIENT_FILE) or default
                self.endpoint = ClientEndpoint(file, collab.site_name, submitter=job_submitter())
            return self.endpoint.answer(do, data, run, place, rest)


def job_submitter() -> str | None:
    """The name on the certificate that signed this site's job; None where it is not signed.

    FLARE's client has checked the signature against the federation's root certificate before it
    started the job.
    """
    from cryptography import x509
    from nvflare.lighter.tool_consts import NVFLARE_SUBMITTER_CRT_FILE

    app = Path(collab.workspace.get_app_dir(collab.fl_ctx.get_job_id()))
    try:
        certificate = x509.load_pem_x509_certificate(
            (app / NVFLARE_SUBMITTER_CRT_FILE).read_bytes()
        )
    except (OSError, ValueError):
        return None
    names = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    return str(names[0].value) if names else None


def job_transport() -> "FlareTransport":
    """The transport to the sites of the job that this process runs in."""
    context = collab.context
    # or it writes two lines for every message
    logging.getLogger("nvflare.collab").setLevel(logging.WARNING)
    return FlareTransport(list(collab.clients), context.is_aborted)


class FlareTransport:
    """Carries bytes to the sites of a job and back.

    FLARE does not say when a site is gone. So while a site has a request to answer it is pinged,
    and has failed once it answers no ping for `reach` seconds.

    Args:
        proxies: FLARE's proxies of the sites, each with a `name`.
        aborted: whether the job was aborted.
        reach: seconds.
    """

    def __init__(self, proxies: list[Any], aborted: Callable[[], bool], reach: float = REACH):
        self.proxies = {proxy.name: proxy for proxy in proxies}
        self.aborted = aborted
        self.reach = reach
        self.pool = ThreadPoolExecutor(4 * max(2, len(proxies)), thread_name_prefix="transport")
        # Requests without an answer. An answer may be large: none is referred to from here.
        self.in_flight: dict[str, Future[bytes]] = {}
        self.lock = threading.Lock()
        self.last_sign = dict.fromkeys(self.proxies, 0.0)  # when each site was last reached
        self.quiet: set[str] = set()  # sites of which it was said that there is no sign
        self.say: Callable[[str], None] = lambda text: None  # gets a sentence about who is awaited
        self.unreachable: dict[str, EngineError] = {}
        for name in self.proxies:
            threading.Thread(target=self._ping, args=(name,), daemon=True).start()

    def names(self) -> list[str]:
        """The sites, by the name on their certificate."""
        return sorted(self.proxies)

    def admit(self, name: str, id: str) -> None:
        """Check that a site's client has the name that is on the site's certificate."""
        if name != id:
            raise ValueError(
                f'the site {name} says it is "{id}", which is not the name on its certificate'
            )

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
        arguments = {"do": action, "data": data, "run": run, "place": place}
        if tensors is not None:
            arguments["rest"] = tensors  # type: ignore[assignment]
        answer: Future[bytes] = Future()
        # The server asks a client that failed again, in later rounds: it may be back.
        if action == "call":
            self.unreachable.pop(client, None)
        if client in self.unreachable:
            answer.set_exception(self.unreachable[client])
            return answer
        with self.lock:
            self.last_sign[client] = time.monotonic()
            self.in_flight[client] = answer
        answer.add_done_callback(partial(self._forget, client))
        self.pool.submit(self._call, client, timeout, arguments, answer)
        return answer

    def _call(
        self, client: str, timeout: float, arguments: dict[str, Any], answer: "Future[bytes]"
    ) -> None:
        option = CallOption(timeout=timeout)
        try:
            resolve(answer, self.proxies[client].call_func(option, "answer", (), arguments))
        except Exception as error:
            cause = getattr(error, "cause", None) or error.__cause__
            late = isinstance(cause, TimeoutError)
            reason = f"did not answer within {timeout:g} s" if late else str(error)
            resolve(answer, EngineError(reason))

    def _forget(self, client: str, answer: "Future[bytes]") -> None:
        with self.lock:
            if self.in_flight.get(client) is answer:  # not where the next request was sent already
                del self.in_flight[client]

    def _ping(self, client: str) -> None:
        """Find out whether a site with a request to answer can be reached; a thread of its own."""
        option = CallOption(timeout=self.reach / 6)
        while not self.aborted():
            time.sleep(self.reach / 12)
            if client not in self.in_flight:
                continue
            try:
                self.proxies[client].call_func(option, "ping", (), {})
                self.last_sign[client] = time.monotonic()
                if client in self.quiet:
                    self.quiet.discard(client)
                    self.say(f"{client} is there again")
            except Exception:
                silence = time.monotonic() - self.last_sign[client]
                if silence > self.reach:
                    self._give_up(client)
                elif silence > QUIET * self.reach and client not in self.quiet:
                    self.quiet.add(client)
                    self.say(
                        f"no sign of {client} for {silence:.2g} s; without one it is left out "
                        f"after {self.reach:g} s"
                    )

    def _give_up(self, client: str) -> None:
        answer = self.in_flight.get(client)
        if answer is not None:
            self.quiet.discard(client)
            self.unreachable[client] = EngineError(
                f"{UNREACHABLE} for {self.reach:g} s: it left, or its network is cut"
            )
            resolve(answer, self.unreachable[client])

    def check(self) -> None:
        """Raise EngineError where FLARE ended the job."""
        if self.aborted():
            raise EngineError("FLARE ended the job")


def resolve(answer: "Future[bytes]", outcome: bytes | Exception) -> None:
    """Set a future's result or exception, unless it has one already."""
    with suppress(InvalidStateError):
        if isinstance(outcome, Exception):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)


def exit_with_parent() -> None:
    """End this job process when the FLARE process that started it is gone."""
    parent = os.getppid()

    def poll_parent() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=poll_parent, daemon=True).start()
