"""FLARE's startup kits: made here for a federation on this machine, allowed the classes of our jobs, and started. Knows nothing of jobs."""

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

from unalike.base.errors import UserError
from unalike.cross_silo import prefork as nursery
from unalike.cross_silo import supervisor as keeper
from unalike.cross_silo.policy import ALLOWED, COMMAND_GUARD, JOB_GUARD, write_authorization

ADMIN = "admin@unalike.org"
IMPORTS = [
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
]  # of processes of jobs; the last is what the first optimizer brings


class Local:
    """A server and a site for each client, provisioned and started here, on loopback only. Processes of jobs are forked from one that has
    made their imports, seconds of work each; not where there is a GPU, which may not be used in a fork.

    Certificates and keys are made anew each time. The keys are in a temporary folder that only its owner enters, and
    go with it; the kits have links to them. What a resumed run needs is in `local` of each kit."""

    def __init__(self, folder: Path, ids: list[str], config: Path):
        self.kits, self.ids = folder / "unalike" / "prod_00", ids
        self.kit = self.kits / ADMIN
        self.processes: dict[str, subprocess.Popen] = {}
        self.nest = tempfile.TemporaryDirectory()
        if odd := [id for id in ids if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", id)]:
            raise UserError(
                f'FLARE knows sites by letters, digits, "-", "_" and "."; "{odd[0]}" has others'
            )
        provision(Path(self.nest.name), ids)
        adopt(Path(self.nest.name) / "unalike" / "prod_00", self.kits)
        shutil.rmtree(folder / "unalike" / "state", ignore_errors=True)  # keys of earlier versions
        for name in ["localhost", *ids]:
            allow(self.kits / name, fast=True)
        for id in ids:
            file = self.kits / id / "local" / "client.yaml"
            if not file.exists():
                file.write_text(json.dumps({"scenario": str(config), "client": id}))

    def start(self) -> list[str]:
        """Whoever is not running; who that was."""
        import torch

        running = {name for name, process in self.processes.items() if process.poll() is None}
        gone = [
            name
            for name in [
                *(() if torch.cuda.is_available() else ["nursery"]),
                "localhost",
                *self.ids,
            ]
            if name not in running
        ]
        place = Path(self.nest.name) / "nursery"
        for name in gone:
            if name == "nursery":
                place.unlink(missing_ok=True)
                command, log = (
                    [sys.executable, "-u", nursery.__file__, "nurse", str(place), *IMPORTS],
                    self.kits / "nursery.out",
                )
            else:
                command, log = (
                    site_command(self.kits / name, name == "localhost"),
                    self.kits / name / "log.out",
                )
            self.processes[name] = launch(command, log, UNALIKE_NURSERY=str(place))
        return gone

    def stop(self) -> None:
        keeper.stop(self.processes.values())
        for link in self.kits.glob("*/startup/*.key"):
            link.unlink()
        self.nest.cleanup()


def adopt(new: Path, kits: Path) -> None:
    """Copy startup kits over those of earlier times, but for their keys: these are linked."""
    shutil.copytree(new, kits, ignore=shutil.ignore_patterns("*.key"), dirs_exist_ok=True)
    for key in new.glob("*/startup/*.key"):
        link = kits / key.relative_to(new)
        link.unlink(missing_ok=True)
        link.symlink_to(key)


def join(kit: Path, client: Path | None) -> None:
    """Take part with a startup kit, the server's or that of a client with its file: this process becomes FLARE's."""
    from unalike.scenarios.client_config import load_client

    kit = kit.resolve()
    server = (kit / "startup" / "fed_server.json").exists()
    if not server and not (kit / "startup" / "fed_client.json").exists():
        raise UserError(
            f"{kit} is no startup kit of a server or a client: it has no startup/fed_client.json"
        )
    if server == (client is not None):
        raise UserError(
            f"{kit} is the server's startup kit: leave the client's file out"
            if server
            else f"{kit} is a client's startup kit: say which client, unalike join {kit.name} client.yaml"
        )
    if client is not None:
        with suppress(KeyError):  # a factory may want to know of the run
            load_client(client)
        os.environ["UNALIKE_CLIENT"] = str(client.resolve())
    protect(kit)
    if replaced := allow(kit):
        print(replaced, file=sys.stderr, flush=True)
    command = keeper.command(site_command(kit, server), parent=0)
    os.execv(command[0], command)


def protect(kit: Path) -> None:
    """Only its owner may read a startup kit's keys; kits come in archives that do not say so."""
    for path in [kit / "startup", *(kit / "startup").glob("*.key")]:
        try:
            path.chmod(0o700 if path.is_dir() else 0o600)
        except OSError as error:  # somebody else's, or a disk that is only read
            print(
                f"{path} should be readable by its owner alone, and cannot be made so: {error}",
                file=sys.stderr,
            )


def site_command(kit: Path, server: bool) -> list[str]:
    """FLARE's process for a startup kit."""
    which = "server" if server else "client"
    named = re.findall(r"(?:org|uid)=\S+", (kit / "startup" / "sub_start.sh").read_text())
    settings = ["secure_train=true", "config_folder=config", *named]
    return [
        sys.executable,
        "-u",
        "-m",
        f"nvflare.private.fed.app.{which}.{which}_train",
        "-m",
        str(kit),
        "-s",
        f"fed_{which}.json",
        "--set",
        *settings,
    ]


def launch(command: list[str], log: Path, **more: str) -> subprocess.Popen:
    """A process that ends with this one, and all that it starts too; what it says is in the log."""
    source = str(Path(__file__).parents[2])
    env = {
        **os.environ,
        **more,
        "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]),
    }
    with log.open("ab") as said:
        return subprocess.Popen(
            keeper.command(command, os.getpid()),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env=env,
            start_new_session=True,
        )


def provision(folder: Path, ids: list[str]) -> None:
    """Certificates, keys and startup kits for a server on loopback, its sites and an administrator."""
    from nvflare.lighter.provision import prepare_builders, prepare_project
    from nvflare.lighter.provisioner import Provisioner

    builder = lambda name, **args: {"path": f"nvflare.lighter.impl.{name}", "args": args}
    project = {
        "api_version": 3,
        "name": "unalike",
        "description": "unalike on this machine",
        "participants": [
            {
                "name": "localhost",
                "type": "server",
                "org": "unalike",
                "fed_learn_port": free_port(),
                "host_names": ["127.0.0.1"],
            },
            *({"name": id, "type": "client", "org": "unalike"} for id in ids),
            {"name": ADMIN, "type": "admin", "org": "unalike", "role": "project_admin"},
        ],
        "builders": [
            builder("workspace.WorkspaceBuilder", template_file=["master_template.yml"]),
            builder("static_file.StaticFileBuilder", config_folder="config", scheme="grpc"),
            builder("cert.CertBuilder"),
            builder("signature.SignatureBuilder"),
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    with redirect_stdout(io.StringIO()):
        Provisioner(str(folder), prepare_builders(project)).provision(prepare_project(project))
    shutil.rmtree(
        folder / "unalike" / "state"
    )  # the authority's key, and all others once more: nobody needs it again


def allow(kit: Path, fast: bool = False) -> str | None:
    """Let a site's startup kit run our job, and nothing else. `fast`: on one machine, where nobody needs to be spared,
    jobs are looked for every second, and their processes are nursed.

    Returns: what was replaced for that, as a sentence, None if nothing was.
    """
    which = "server" if (kit / "startup" / "fed_server.json").exists() else "client"
    given = kit / "local" / "resources.json"
    told = json.loads(
        (given if given.exists() else given.with_name("resources.json.default")).read_text()
    )
    told["class_allow_list"] = ALLOWED[which]
    told["class_list_enforcement_mode"] = "enforce"
    told["allow_log_streaming"] = False  # logs stay at home
    told["components"] = [
        c for c in told["components"] if c["id"] not in ("site_log_streamer", COMMAND_GUARD["id"])
    ]
    if which == "client":
        told["app_validator"] = JOB_GUARD
        told["components"].append(COMMAND_GUARD)
    for component in told["components"]:
        if fast and component["id"] == "job_scheduler":
            component["args"] |= {
                "min_schedule_interval": 1.0,
                "max_schedule_interval": 2.0,
                "max_schedule_count": 100,
            }
        if fast and component["id"] == "process_launcher":
            component["path"] = f"unalike.cross_silo.flare_launcher.{which.title()}"
        if fast and component["id"] == "job_manager":
            component["args"]["uri_root"] = str(kit / "jobs")
    if fast and "snapshot_persistor" in told:
        told["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(kit / "snapshots")
    given.write_text(json.dumps(told, indent=1))
    return write_authorization(given.parent)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def job_processes(kit: Path) -> list[int]:
    """Processes of jobs that a site on this machine has, of its FLARE process none."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().decode(errors="replace").split("\0")
            if str(kit) in words and any(
                "worker_process" in word or "runner_process" in word for word in words
            ):
                found.append(int(path.parent.name))
    return found
