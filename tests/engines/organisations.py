"""Toy organisations for tests of cross-silo engines: a factory of clients, and runs in folders."""

import csv
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import conftest as toys
import torch
import yaml
from real import note_faults
from torch import nn

from unalike.algorithms import ALGORITHMS
from unalike.base.events import read_events
from unalike.core.operations import feature_measurements, list_measurements
from unalike.core.privacy import Privacy
from unalike.runs import to_plain
from unalike.runs.run_folder import Folder
from unalike.tasks import Clustering

PLACE = Path(__file__).parent


def toys_of(name):
    """Toys for a method."""
    return SimpleNamespace(**(vars(toys) | toys.toys_for(ALGORITHMS[name])))


class Slow(nn.Module):
    """An encoder that takes its time, so that something can happen meanwhile."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.layer = seconds, toys.mlp()

    def forward(self, x):
        time.sleep(self.seconds)
        return self.layer(x)


class Attack:
    """A class that is installed at the sites and that no job of ours names."""

    def __init__(self):
        Path("attacked").touch()  # in the site's startup kit


def make(run, id, seconds=0.0, alike=False, least=None):
    """The client of that id, as it would be here; or one like the first, but for its id."""
    torch.set_num_threads(1)
    if seconds:
        return toys.client(id, model=lambda: Slow(seconds))
    clients = toys_of(run["algorithm"]).clients(3)
    if least:
        clients = [
            replace(client, privacy=Privacy(noise=least, entropy="secret")) for client in clients
        ]
    return (
        replace(clients[0], id=id)
        if alike
        else next(client for client in clients if client.id == id)
    )


def describe(folder, id, **options):
    """A client.yaml."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "client.yaml").write_text(
        json.dumps({"factory": "organisations:make", "options": {"id": id, **options}})
    )
    return folder / "client.yaml"


def prepared(folder, name, rounds=2, privacy=None, replay=None, alone=False, **changed):
    """A run's folder as it is before it begins."""
    method = toys.method(name, **changed)
    config = {
        "name": "toy",
        "algorithm": {"name": name, **vars(method)},
        "training": toys.training(rounds=rounds).model_dump(),
        "federation": {},
        "safeguard": False,
        "alone": alone,
        "privacy": privacy.model_dump() if privacy else None,
        "seed": 0,
        "python": True,
        "replay": replay and str(replay),
    }
    return Folder.create(folder, to_plain(config))


def here(folder, name, rounds=2, count=3, **options):
    """The same run in this process."""
    toy = toys_of(name)
    changed = {
        key: options.pop(key) for key in list(options) if key not in ("privacy", "replay", "engine")
    }
    return toy.execute(
        folder, toy.method(name, **changed), toy.clients(count), rounds=rounds, **options
    )


def same(away, local, sites):
    """Compare a remote run, whose clients' folders are `sites`, with a local one."""
    run = json.loads((away / "run.json").read_text())["run"]
    states = {}
    for site in sites:
        place = site / "unalike" / run
        assert (place / "checkpoints" / "clients").exists(), why_absent(away, site)
        states |= toys.states(place)
    name = yaml.safe_load((away / "config.yaml").read_text())["algorithm"]["name"]
    return {
        "apart": toys.apart(states, toys.states(local)),
        "same_ledger": comparable_ledger(away, name) == comparable_ledger(local, name),
    }


def why_absent(away, site):
    """What server and site wrote down of a client that saved nothing."""
    events = [
        event
        for event in read_events(away / "events.jsonl")
        if event["event"] in ("refused", "failure", "restart", "left", "notice")
    ]
    logs = [site / "unalike" / name for name in ("incidents.log", "audit.jsonl")]
    texts = [path.read_text()[-1500:] for path in logs if path.exists()]
    return "\n".join([f"{site} saved nothing", *map(str, events), *texts])


def comparable_ledger(folder, name):
    """The rows of a ledger but for measurements that differ between organisations.

    There features and labels do not leave: clustering clients score themselves.
    """
    program = ALGORITHMS[name].Program
    skipped = feature_measurements(program)
    if ALGORITHMS[name].serves(Clustering):
        skipped = list_measurements(program)
    rows = list(csv.reader((folder / "ledger.csv").read_text().splitlines()))
    return [row for row in rows if row[3] not in skipped]


def begin(folder, *steps, program="on_flare.py"):
    """A program that tries an engine."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(PLACE.parents[1]), str(PLACE.parent), str(PLACE)]),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, str(PLACE / program), str(folder), *steps],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    )


def run_steps(folder, *steps, program="on_flare.py", seconds=400):
    """What it tells; it has so long, and what it started goes with it."""
    return finish(begin(folder, *steps, program=program), folder, seconds, program)


def finish(process, folder, seconds, program):
    """What a program that began tells in the end."""
    try:
        _, problems = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):  # not the leader of a group
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.wait()
    assert process.returncode == 0, problems[-3000:]
    report = json.loads((folder / "report.json").read_text())
    note_faults(program.removeprefix("on_").removesuffix(".py"), report)
    return report


def is_replay_answered(port, sent):
    """Whether the server keeps a connection on which it gets what a member sent before.

    The handshake is not the member's any more, so it ends the connection by an alert.
    """
    with socket.create_connection(("localhost", port), timeout=5) as line:
        try:
            line.sendall(sent)
            while line.recv(1 << 16):
                pass
        except TimeoutError:
            return True
        except OSError:
            return False
    return False


class Recorder:
    """Passes connections on to a port of this machine and keeps what clients send on them."""

    def __init__(self, port):
        self.target = port
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.sent = []  # bytes of each connection
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                server = socket.create_connection(("localhost", self.target))
                self.sent.append(bytearray())
                for source, target, kept in (
                    (client, server, self.sent[-1]),
                    (server, client, bytearray()),
                ):
                    arguments = (source, target, kept)
                    threading.Thread(target=self._pass_on, args=arguments, daemon=True).start()

    def _pass_on(self, source, target, kept):
        with suppress(OSError):
            for data in iter(lambda: source.recv(1 << 16), b""):
                kept += data
                target.sendall(data)
        for line in (source, target):
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    def close(self):
        self.listener.close()
