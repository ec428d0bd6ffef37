"""The FLARE engine: the server's program and the clients as one NVIDIA FLARE Collab job, over mutual TLS. Knows nothing of methods.

A client process that dies takes the whole job with it there: it is submitted again, and goes on from the run's last checkpoint.
No code travels with the job: sites allow the two classes it names, and have them installed.
"""

import io
import json
import logging
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from nvflare.collab import collab
from nvflare.collab.api import CallOption
from pydantic import Field

from unalike.between import keeper
from unalike.between.site import Site
from unalike.engines.away import members
from unalike.engines.worker import EngineError
from unalike.errors import UserError

START = 60.0                 # seconds a server may take until it can be talked to
ADMIN = "admin@unalike.org"
ALLOWED = {"server": ["nvflare.collab.runtime.controller.CollabController", "unalike.between.flare.Program"],
           "client": ["nvflare.collab.runtime.executor.CollabExecutor", "unalike.between.flare.Organisation"]}
Positive = Annotated[float, Field(gt=0)]


class FlareEngine:
    """A FLARE federation a run is carried out in: the one whose administrator's startup kit is given, which must be run on the server's
    machine; without `kit` one is provisioned and started here, with a site for each client of the scenario.

    It begins once `clients` sites are there (all of the scenario's, or one). One that does not answer within `timeout` s has failed.
    """

    def __init__(self, folder: Any, *, kit: str | None = None, clients: Annotated[int, Field(ge=1)] | None = None,
                 timeout: Positive = 600.0):
        ids, path = members(folder.config), folder.path.resolve()
        if kit is None and not ids:
            raise UserError("this run has no clients of its own: give the administrator's startup kit of the federation, engine.kit=FOLDER")
        self.job = Job(ALLOWED["server"][1], {"folders": [str(path)], "timeout": timeout}, clients or len(ids) or 1)
        self.session = Session(Path(kit) if kit is not None else Local(path / "flare", ids, path / "config.yaml"))

    @classmethod
    def carry_out(cls, folder: Any, watch: Any, **options: Any) -> dict[str, Any]:
        there = cls(folder, **options)
        try:
            return carried(folder, watch, there.session, there.job)
        finally:
            there.session.close()


def carried(folder: Any, watch: Any, session: "Session", job: "Job") -> dict[str, Any]:
    """Results of a run by jobs. FLARE takes about 8 s to end one whose server's program is over: the next is submitted meanwhile."""
    from unalike.between.run import broken, follow

    def submit() -> Callable[[], str | None]:
        ended = session.submit(job)
        return lambda: broken(folder) or ended()

    return follow(folder, watch, submit)


@dataclass
class Job:
    """What is to run: the class of the server's half, with its arguments, once so many sites are there."""

    program: str
    args: dict[str, Any]
    least: int

    def write(self, to: Path) -> None:
        """As FLARE takes it: a class for the server and one for the clients, by name; no code."""
        part = lambda path, **args: {"path": path, "args": args}
        server = {"format_version": 2, "task_data_filters": [], "task_result_filters": [],
                  "workflows": [{"id": "controller", **part(ALLOWED["server"][0], server_obj_id="program")}],
                  "components": [{"id": "program", **part(self.program, **self.args)}]}
        client = {"format_version": 2, "task_data_filters": [], "task_result_filters": [],
                  "executors": [{"tasks": ["*"], "executor": part(ALLOWED["client"][0], client_obj_id="organisation")}],
                  "components": [{"id": "organisation", **part(ALLOWED["client"][1])}]}
        (to / "app" / "config").mkdir(parents=True)
        for name, told in (("config_fed_server", server), ("config_fed_client", client)):
            (to / "app" / "config" / f"{name}.json").write_text(json.dumps(told))
        about = {"name": "unalike", "resource_spec": {}, "min_clients": self.least, "deploy_map": {"app": ["@ALL"]}}
        (to / "meta.json").write_text(json.dumps(about))


class Session:
    """An administrator's way into a federation: that of a startup kit, or one on this machine, which is started and kept up."""

    def __init__(self, where: "Path | Local"):
        self.here = where if isinstance(where, Local) else None
        self.kit = where.kit if isinstance(where, Local) else where.resolve()
        self.known: Any = None

    def submit(self, job: Job) -> Callable[[], str | None]:
        """Start a job; what is returned tells how it ended, None while it goes on."""
        if self.here is not None:
            self.here.start()
        with tempfile.TemporaryDirectory() as place:
            job.write(Path(place))
            number = self._session().submit_job(place)

        def ended() -> str | None:
            died = self.here.start() if self.here is not None else []
            if died:                                 # and are started again, but know nothing of the job
                with suppress(Exception):
                    self._session().abort_job(number)
                return f"the process of {', '.join(died)} died"
            try:
                status = str(self._session().get_job_status(number))
            except EngineError:
                raise
            except Exception:                        # the server may be starting again
                self._forget()
                return None
            return f"FLARE says {status}" if status.startswith("FINISHED") else None

        return ended

    def _session(self) -> Any:
        from nvflare.fuel.flare_api.flare_api import new_secure_session
        begun = time.monotonic()
        while self.known is None:
            try:
                with redirect_stdout(io.StringIO()):                     # that is for results
                    self.known = new_secure_session(username=self._admin(), startup_kit_location=str(self.kit), timeout=5.0)
            except Exception as error:
                if isinstance(error, UserError):
                    raise
                if time.monotonic() - begun > START:
                    raise EngineError(f"no FLARE server lets {self.kit} in: {error}") from None
                time.sleep(0.3)
        return self.known

    def _admin(self) -> str:
        try:
            told = json.loads((self.kit / "startup" / "fed_admin.json").read_text())["admin"]
        except (OSError, ValueError, KeyError):
            raise UserError(f"{self.kit} is no administrator's startup kit: it has no startup/fed_admin.json") from None
        return told.get("username") or self.kit.name

    def _forget(self) -> None:
        if self.known is not None:
            with suppress(Exception):
                self.known.close()
            self.known = None

    def close(self) -> None:
        self._forget()
        if self.here is not None:
            self.here.stop()


# what runs in the job


class Program:
    """The server's half of a job: runs, one after another."""

    def __init__(self, folders: list[str], timeout: float):
        self.folders, self.timeout = folders, timeout
        dies_with_parent()

    @collab.main
    def main(self) -> None:
        from unalike.between.run import serve
        line = job_line()
        for folder in self.folders:
            serve(Path(folder), line, self.timeout)


class Organisation:
    """A client's half of a job. Which client is told by client.yaml in the `local` folder of its startup kit."""

    def __init__(self) -> None:
        self.site: Site | None = None
        self.lock = threading.Lock()
        dies_with_parent()

    @collab.publish
    def answer(self, do: str, data: bytes, run: str, place: str, rest: bytes | None = None) -> bytes:
        with self.lock:
            if self.site is None:
                import torch
                torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
                file = os.environ.get("UNALIKE_CLIENT") or Path(collab.workspace.get_site_config_dir()) / "client.yaml"
                self.site = Site(file, collab.site_name)
            return self.site.answer(do, data, run, place, rest)


def job_line() -> "FlareLine":
    """The line to the sites of the job this runs in."""
    context = collab.context
    logging.getLogger("nvflare.collab").setLevel(logging.WARNING)        # or there are two lines for every message
    return FlareLine(list(collab.clients), context.is_aborted)


class FlareLine:
    """Bytes to the sites of a job and back."""

    def __init__(self, proxies: list[Any], aborted: Callable[[], bool]):
        self.proxies, self.aborted = {proxy.name: proxy for proxy in proxies}, aborted
        self.pool = ThreadPoolExecutor(max(4, len(proxies)), thread_name_prefix="line")

    def names(self) -> list[str]:
        return sorted(self.proxies)

    def admit(self, name: str, id: str) -> None:
        if name != id:
            raise ValueError(f'the site {name} says it is "{id}", which is not the name on its certificate')

    def ask(self, client: str, do: str, data: bytes, run: str, place: str, timeout: float,
            rest: bytearray | None = None) -> "Future[bytes]":
        more = {"rest": rest} if rest is not None else {}
        return self.pool.submit(self._ask, client, timeout, {"do": do, "data": data, "run": run, "place": place, **more})

    def _ask(self, client: str, timeout: float, what: dict[str, Any]) -> bytes:
        try:
            return self.proxies[client].call_func(CallOption(timeout=timeout), "answer", (), what)
        except Exception as error:
            late = isinstance(getattr(error, "cause", None) or error.__cause__, TimeoutError)
            raise EngineError(f"did not answer within {timeout:g} s" if late else str(error)) from None

    def check(self) -> None:
        if self.aborted():
            raise EngineError("FLARE ended the job")


def job_processes(kit: Path) -> list[int]:
    """Processes of jobs that a site on this machine has, of its FLARE process none."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().decode(errors="replace").split("\0")
            if str(kit) in words and any("worker_process" in word or "runner_process" in word for word in words):
                found.append(int(path.parent.name))
    return found


def dies_with_parent() -> None:
    """A job process whose FLARE process is gone is of no use to anyone."""
    parent = os.getppid()

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()


# a federation on this machine


class Local:
    """A server and a site for each client, provisioned and started here, on loopback only."""

    def __init__(self, folder: Path, ids: list[str], config: Path):
        self.kits, self.ids = folder / "unalike" / "prod_00", ids
        self.kit = self.kits / ADMIN
        self.processes: dict[str, subprocess.Popen] = {}
        if odd := [id for id in ids if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", id)]:
            raise UserError(f'FLARE knows sites by letters, digits, "-", "_" and "."; "{odd[0]}" has others')
        if not self.kit.exists():
            provision(folder, ids)
            for name in ["localhost", *ids]:
                allow(self.kits / name, fast=True)
            for id in ids:
                (self.kits / id / "local" / "client.yaml").write_text(json.dumps({"scenario": str(config), "client": id}))

    def start(self) -> list[str]:
        """Whoever is not running; who that was."""
        gone = [name for name in ["localhost", *self.ids] if name not in self.processes or self.processes[name].poll() is not None]
        for name in gone:
            self.processes[name] = launch(self.kits / name, name == "localhost")
        return gone

    def stop(self) -> None:
        keeper.stop(self.processes.values())


def join(kit: Path, client: Path | None) -> None:
    """Take part with a startup kit, the server's or that of a client with its file: this process becomes FLARE's."""
    from unalike.scenarios.member import member
    kit = kit.resolve()
    server = (kit / "startup" / "fed_server.json").exists()
    if not server and not (kit / "startup" / "fed_client.json").exists():
        raise UserError(f"{kit} is no startup kit of a server or a client: it has no startup/fed_client.json")
    if server == (client is not None):
        raise UserError(f"{kit} is the server's startup kit: leave the client's file out" if server else
                        f"{kit} is a client's startup kit: say which client, unalike join {kit.name} client.yaml")
    if client is not None:
        with suppress(KeyError):                     # a factory may want to know of the run
            member(client)
        os.environ["UNALIKE_CLIENT"] = str(client.resolve())
    allow(kit)
    command = keeper.command(site_command(kit, server), parent=0)
    os.execv(command[0], command)


def site_command(kit: Path, server: bool) -> list[str]:
    """FLARE's process for a startup kit."""
    which = "server" if server else "client"
    named = re.findall(r"(?:org|uid)=\S+", (kit / "startup" / "sub_start.sh").read_text())
    settings = ["secure_train=true", "config_folder=config", *named]
    return [sys.executable, "-u", "-m", f"nvflare.private.fed.app.{which}.{which}_train", "-m", str(kit), "-s", f"fed_{which}.json",
            "--set", *settings]


def launch(kit: Path, server: bool) -> subprocess.Popen:
    """The FLARE process of a startup kit; it and what it starts end with this one."""
    source = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}
    with (kit / "log.out").open("ab") as log:
        return subprocess.Popen(keeper.command(site_command(kit, server), os.getpid()), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                env=env, start_new_session=True)


def provision(folder: Path, ids: list[str]) -> None:
    """Certificates, keys and startup kits for a server on loopback, its sites and an administrator."""
    from nvflare.lighter.provision import prepare_builders, prepare_project
    from nvflare.lighter.provisioner import Provisioner
    builder = lambda name, **args: {"path": f"nvflare.lighter.impl.{name}", "args": args}
    project = {"api_version": 3, "name": "unalike", "description": "unalike on this machine", "participants": [
        {"name": "localhost", "type": "server", "org": "unalike", "fed_learn_port": free_port(), "host_names": ["127.0.0.1"]},
        *({"name": id, "type": "client", "org": "unalike"} for id in ids),
        {"name": ADMIN, "type": "admin", "org": "unalike", "role": "project_admin"}],
        "builders": [builder("workspace.WorkspaceBuilder", template_file=["master_template.yml"]),
                     builder("static_file.StaticFileBuilder", config_folder="config", scheme="grpc"), builder("cert.CertBuilder"),
                     builder("signature.SignatureBuilder")]}
    folder.mkdir(parents=True, exist_ok=True)
    with redirect_stdout(io.StringIO()):
        Provisioner(str(folder), prepare_builders(project)).provision(prepare_project(project))


def allow(kit: Path, fast: bool = False) -> None:
    """Let a site's startup kit build the two classes of our jobs, and no others that are not on its list. `fast`: on one machine,
    where nobody needs to be spared, jobs are looked for every second."""
    which = "server" if (kit / "startup" / "fed_server.json").exists() else "client"
    given = kit / "local" / "resources.json"
    told = json.loads((given if given.exists() else given.with_name("resources.json.default")).read_text())
    told["class_allow_list"] = [*dict.fromkeys([*told.get("class_allow_list", []), *ALLOWED[which]])]
    told["allow_log_streaming"] = False
    told["components"] = [c for c in told["components"] if c["id"] != "site_log_streamer"]          # logs stay at home
    for component in told["components"]:
        if fast and component["id"] == "job_scheduler":
            component["args"] |= {"min_schedule_interval": 1.0, "max_schedule_interval": 2.0, "max_schedule_count": 100}
        if fast and component["id"] == "job_manager":
            component["args"]["uri_root"] = str(kit / "jobs")
    if fast and "snapshot_persistor" in told:
        told["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(kit / "snapshots")
    given.write_text(json.dumps(told, indent=1))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]

