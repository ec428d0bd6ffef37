"""FLARE startup kits: provisioned for a federation on this machine, restricted to our job, started.

Knows nothing of what runs in a job.
"""

import fcntl
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

from unalike.base.errors import UserError
from unalike.cross_silo import prefork, supervisor
from unalike.cross_silo.certificates import check_certificate
from unalike.cross_silo.policy import (
    ALLOWED_CLASSES,
    COMMAND_GUARD,
    JOB_GUARD,
    write_authorization,
)

ADMIN = "admin@unalike.org"
SERVER = "localhost"  # the server's name, which FLARE puts into its certificate
CLIENT_FILE = "UNALIKE_CLIENT"  # environment variable of a site: its client.yaml
PREFORK = "prefork"  # name of the process that job processes are forked from
# modules that job processes need; the last is what the first optimizer imports
PREFORK_IMPORTS = [
    "nvflare.private.fed.app.client.worker_process",
    "nvflare.private.fed.app.server.runner_process",
    "unalike.cross_silo.flare",
    "unalike.cross_silo.remote_run",
    "unalike.scenarios.client_config",
    "unalike.runs.compatibility",
    "sklearn.datasets",
    "sklearn.metrics",
    "sklearn.model_selection",
    "torch._dynamo",
]


# FLARE looks ever more rarely whether the sites that a job waits for are connected, in the end
# every ten minutes, and cancels the job after ten looks.
SCHEDULE = {
    "min_schedule_interval": 1.0,
    "max_schedule_interval": 2.0,
    "max_schedule_count": 1_000_000,
}


class LocalFlareFederation:
    """A FLARE server and a site for each client, provisioned and started here, on loopback only.

    Job processes are forked from one that has made their imports, which saves seconds each; not
    where there is a GPU, since CUDA cannot be used in a fork.

    Certificates and keys are made anew each time. The keys are in a temporary folder that only its
    owner can enter, and are deleted with it; the kits have links to them. What a resumed run needs
    is in `local` of each kit.

    Args:
        folder: where the kits go.
        ids: the clients.
        config: the scenario that the clients are built from.
    """

    def __init__(self, folder: Path, ids: list[str], config: Path):
        self.kits = folder / "unalike" / "prod_00"
        self.kit = self.kits / ADMIN  # the administrator's
        self.ids = ids
        self.processes: dict[str, subprocess.Popen] = {}
        self.private_folder = tempfile.TemporaryDirectory()
        for id in ids:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", id):
                raise UserError(
                    'a FLARE site is named by letters, digits, "-", "_" and ".", beginning with '
                    f'a letter or digit; "{id}" is not: change the id of that client'
                )
        provision(Path(self.private_folder.name), ids)
        copy_kits(Path(self.private_folder.name) / "unalike" / "prod_00", self.kits)
        # earlier versions left keys there
        shutil.rmtree(folder / "unalike" / "state", ignore_errors=True)
        for name in [SERVER, *ids]:
            restrict_kit(self.kits / name, fast=True)
        for id in ids:
            file = self.kits / id / "local" / "client.yaml"
            if not file.exists():
                file.write_text(json.dumps({"scenario": str(config), "client": id}))

    def start(self) -> list[str]:
        """Start all processes that are not running.

        Returns: their names.
        """
        import torch

        names = [SERVER, *self.ids]
        if not torch.cuda.is_available():
            names.insert(0, PREFORK)
        running = {name for name, process in self.processes.items() if process.poll() is None}
        stopped = [name for name in names if name not in running]
        socket_path = Path(self.private_folder.name) / "prefork.socket"
        for name in stopped:
            if name == PREFORK:
                socket_path.unlink(missing_ok=True)
                command = [sys.executable, "-u", prefork.__file__, "serve", str(socket_path)]
                command += PREFORK_IMPORTS
                log = self.kits / "prefork.out"
            else:
                command = site_command(self.kits / name, is_server=name == SERVER)
                log = self.kits / name / "log.out"
            self.processes[name] = start_process(command, log, UNALIKE_PREFORK=str(socket_path))
        return stopped

    def stop(self) -> None:
        """End all processes and delete all keys."""
        supervisor.stop(self.processes.values())
        for link in self.kits.glob("*/startup/*.key"):
            link.unlink()
        self.private_folder.cleanup()


def copy_kits(new: Path, kits: Path) -> None:
    """Copy startup kits over those of an earlier run; of keys only a link."""
    shutil.copytree(new, kits, ignore=shutil.ignore_patterns("*.key"), dirs_exist_ok=True)
    for key in new.glob("*/startup/*.key"):
        link = kits / key.relative_to(new)
        link.unlink(missing_ok=True)
        link.symlink_to(key)


def join(kit: Path, client: Path | None) -> None:
    """Take part in a federation: this process becomes FLARE's.

    Args:
        kit: a startup kit, the server's or a client's.
        client: the client's file, for a client's kit.
    """
    from unalike.scenarios.client_config import load_client

    kit = kit.resolve()
    is_server = (kit / "startup" / "fed_server.json").exists()
    if not is_server and not (kit / "startup" / "fed_client.json").exists():
        raise UserError(
            f"{kit} is no startup kit of a server or a client: it has no startup/fed_client.json"
        )
    if is_server and client is not None:
        raise UserError(f"{kit} is the server's startup kit: leave the client's file out")
    if not is_server and client is None:
        raise UserError(
            f"{kit} is a client's startup kit: say which client, "
            f"unalike join {kit.name} client.yaml"
        )
    if client is not None:
        with suppress(KeyError):  # a factory may need to know the run, which there is none of yet
            load_client(client)
    check_certificate(kit / "startup" / f"{'server' if is_server else 'client'}.crt")
    check_certificate(kit / "startup" / "rootCA.pem")
    hold_kit(kit)
    protect_keys(kit)
    warning = restrict_kit(kit)
    if warning:
        print(warning, file=sys.stderr, flush=True)
    environment = dict(os.environ)
    if client is not None:
        environment[CLIENT_FILE] = str(client.resolve())
    command = supervisor.command(site_command(kit, is_server), parent=0)
    os.execve(command[0], command, environment)


def hold_kit(kit: Path) -> None:
    """Keep others from joining with the same kit on this machine, until this process ends.

    FLARE's server would let the second in and the first out. The lock passes on to the program
    that this process becomes.

    Raises: UserError where another process has joined.
    """
    descriptor = os.open(kit / "joined.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.read(descriptor, 20).decode(errors="replace") or "unknown"
        raise UserError(
            f"{kit} has joined already (process {pid}), and goes on: end that one first, or look "
            "at its output"
        ) from None
    os.truncate(descriptor, 0)
    os.write(descriptor, str(os.getpid()).encode())
    os.set_inheritable(descriptor, True)


def protect_keys(kit: Path) -> None:
    """Let only the owner read a startup kit's keys; the archives kits come in do not."""
    for path in [kit / "startup", *(kit / "startup").glob("*.key")]:
        try:
            path.chmod(0o700 if path.is_dir() else 0o600)
        except OSError as error:  # another user's file, or a read-only disk
            print(
                f"{path} should be readable by its owner alone, and cannot be made so: {error}",
                file=sys.stderr,
            )


def site_command(kit: Path, is_server: bool) -> list[str]:
    """The command line of FLARE's own process for a startup kit."""
    role = "server" if is_server else "client"
    identity = re.findall(r"(?:org|uid)=\S+", (kit / "startup" / "sub_start.sh").read_text())
    module = f"nvflare.private.fed.app.{role}.{role}_train"
    command = [sys.executable, "-u", "-m", module, "-m", str(kit), "-s", f"fed_{role}.json"]
    return [*command, "--set", "secure_train=true", "config_folder=config", *identity]


def start_process(command: list[str], log: Path, **environment: str) -> subprocess.Popen:
    """Start a process that ends with this one, together with all that it starts."""
    source = str(Path(__file__).parents[2])
    path = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])
    # each site has a client.yaml in its own kit, whatever this process was started for
    inherited = {name: value for name, value in os.environ.items() if name != CLIENT_FILE}
    with log.open("ab") as output:
        return subprocess.Popen(
            supervisor.command(command, os.getpid()),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**inherited, **environment, "PYTHONPATH": path},
            start_new_session=True,
        )


def provision(
    folder: Path,
    ids: list[str],
    server: str = SERVER,
    port: int | None = None,
    root_days: int = 360,
    root: dict[str, str] | None = None,
) -> dict[str, str]:
    """Make certificates, keys and startup kits of a server, sites and an administrator.

    Args:
        folder: where they go, in `unalike/prod_00`.
        ids: the sites.
        server: host name of the server, as sites reach it.
        port: of the server; a free one if not said.
        root_days: days that a new certificate authority holds.
        root: an authority to sign with, as this function returned it; None: a new one.
    Returns: the authority's certificate and key. It is not in the folder any more: without it
        nobody can issue another certificate.
    """
    from nvflare.lighter.provision import prepare_builders, prepare_project
    from nvflare.lighter.provisioner import Provisioner

    host: dict[str, Any] = {
        "name": server,
        "type": "server",
        "org": "unalike",
        "fed_learn_port": port or free_port(),
    }
    if server == SERVER:
        host["host_names"] = ["127.0.0.1"]
    sites = [{"name": id, "type": "client", "org": "unalike"} for id in ids]
    person = {"name": ADMIN, "type": "admin", "org": "unalike", "role": "project_admin"}
    project = {
        "api_version": 3,
        "name": "unalike",
        "description": "unalike",
        "participants": [host, *sites, person],
        "builders": [
            _builder("workspace.WorkspaceBuilder", template_file=["master_template.yml"]),
            _builder("static_file.StaticFileBuilder", config_folder="config", scheme="grpc"),
            _builder("cert.CertBuilder", root_valid_days=root_days),
            _builder("signature.SignatureBuilder"),
        ],
    }
    state = folder / "unalike" / "state"
    state.mkdir(parents=True, mode=0o700)
    if root is not None:
        (state / "cert.json").write_text(json.dumps(root))
    with redirect_stdout(io.StringIO()):
        Provisioner(str(folder), prepare_builders(project)).provision(prepare_project(project))
    issued = json.loads((state / "cert.json").read_text())
    # the authority's key, and a copy of all others
    shutil.rmtree(state)
    return {name: issued[name] for name in ("root_cert", "root_pri_key")}


def _builder(name: str, **args: Any) -> dict[str, Any]:
    return {"path": f"nvflare.lighter.impl.{name}", "args": args}


def restrict_kit(kit: Path, fast: bool = False) -> str | None:
    """Let a site's startup kit run our job, and nothing else.

    Args:
        fast: for one machine: job processes are forked by the prefork server.
    Returns: what was replaced for that, as a sentence; None if nothing was.
    """
    role = "server" if (kit / "startup" / "fed_server.json").exists() else "client"
    path = kit / "local" / "resources.json"
    source = path if path.exists() else path.with_name("resources.json.default")
    resources = json.loads(source.read_text())
    resources["class_allow_list"] = ALLOWED_CLASSES[role]
    resources["class_list_enforcement_mode"] = "enforce"
    resources["allow_log_streaming"] = False  # logs stay at the site
    removed = ("site_log_streamer", COMMAND_GUARD["id"])
    components = [c for c in resources["components"] if c["id"] not in removed]
    if role == "client":
        resources["app_validator"] = JOB_GUARD
        components.append(COMMAND_GUARD)
    for component in components:
        if component["id"] == "job_scheduler":
            component["args"] |= SCHEDULE
        elif component["id"] == "job_manager":  # else in /tmp, with those of all other servers
            component["args"]["uri_root"] = str(kit.resolve() / "jobs")
        elif component["id"] == "process_launcher" and fast:
            component["path"] = f"unalike.cross_silo.flare_launcher.{role.title()}"
    if "snapshot_persistor" in resources:
        storage = resources["snapshot_persistor"]["args"]["storage"]
        storage["args"]["root_dir"] = str(kit.resolve() / "snapshots")
    resources["components"] = components
    path.write_text(json.dumps(resources, indent=1))
    return write_authorization(path.parent)


def free_port() -> int:
    """A free port on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def job_processes(kit: Path) -> list[int]:
    """Job processes of a site on this machine, without its FLARE process."""
    pids = []
    for pid in supervisor.all_processes():
        with suppress(OSError):
            text = Path(f"/proc/{pid}/cmdline").read_bytes()
            words = text.decode(errors="replace").split("\0")
            is_job = any("worker_process" in word or "runner_process" in word for word in words)
            if is_job and str(kit) in words:
                pids.append(pid)
    return pids
