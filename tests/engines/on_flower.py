"""Steps with a real Flower federation on loopback, for test_flower.py; writes FOLDER/report.json.

Usage: python on_flower.py FOLDER STEP...
"""

import http.client
import json
import os
import random
import shutil
import signal
import ssl
import subprocess
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import conftest as toys
import organisations
from flwr.serverapp import ServerApp
from real import steps
from storms import planned_kills

from unalike.algorithms import ALGORITHMS
from unalike.base.message import encoded_size
from unalike.core.runtime import build_runtime
from unalike.cross_silo import flower, supervisor
from unalike.cross_silo import flower_deploy as deploy
from unalike.cross_silo.remote_run import follow
from unalike.engines.process import EngineError
from unalike.engines.remote import RemoteEngine, handshake
from unalike.runs.plan import plan_to_dict


def federation(folder, ids="ab", code=deploy.CODE):
    """A federation whose clients come from a factory."""
    deploy.deploy(
        folder / "flower", list(ids), folder / "none.yaml", f"127.0.0.1:{deploy.free_ports(1)[0]}"
    )
    (folder / "flower" / "app" / "unalike_app.py").write_text(code)
    deploy.sign(folder / "flower")
    for id in ids:
        organisations.describe(folder / "flower" / "clients" / id, id)
    return flower.LocalFlowerFederation(folder / "flower", list(ids))


def carried(
    folder, here, name, watch=lambda event, **facts: None, rounds=1, timeout=120.0, **about
):
    """A run in the federation, compared with the same here."""
    organisations.here(folder / name / "here", name, rounds=rounds, count=len(here.ids), **about)
    replay = {"replay": folder / name / "here"} if ALGORITHMS[name].asynchronous else {}
    run = organisations.prepared(folder / name / "away", name, rounds=rounds, **about, **replay)
    engine = flower.FlowerEngine(run, app=str(here.place), clients=len(here.ids), timeout=timeout)
    follow(run, watch, engine.submit, every=1.0)
    return organisations.same(
        run.path, folder / name / "here", [here.place / "clients" / id for id in here.ids]
    )


def within(folder, do, ids="ab", code=deploy.CODE):
    here = federation(folder, ids, code)
    try:
        here.start()
        return do(here)
    finally:
        here.stop()


ABOUT = {"name": "toy", "algorithm": "local", "seed": 0}
server = ServerApp()


@server.main()
def main(grid, context):
    """The server's program of `smallest`: who is there, the terms, and one operation."""
    line = flower.FlowerTransport(grid, 1, Path(context.run_config["federation"]) / "keys")
    infos, refused = handshake(line, ABOUT, 120.0)
    agreed = plan_to_dict(toys.method("local"), "local", toys.training(), 0, False, None)
    engine = RemoteEngine(
        line, "smallest", "clients", infos, {"about": ABOUT, "terms": agreed}, timeout=120.0
    )
    engine.load(0, 0.0, [])
    engine.send({"a": {"operation": "train", "number": 1, "round": 1, "turn": 0, "body": {}}})
    (arrival,) = engine.receive({1})
    line.close()
    report = {
        "cards": list(infos),
        "refused": refused,
        "reply": arrival.reply,
        "size": arrival.size,
    }
    (Path(context.run_config["folder"]) / "partial").write_text(json.dumps(report))
    (Path(context.run_config["folder"]) / "partial").rename(
        Path(context.run_config["folder"]) / "line.json"
    )


def smallest(folder):
    """One operation of one client, over TLS and with its key, in processes that Flower starts."""

    def do(here):
        config = f'folder="{folder}" federation="{here.place}"'
        flower.run_flwr(
            here.place,
            "run",
            str(here.place / "app"),
            "unalike",
            "--run-config",
            config,
        )
        start = time.monotonic()
        while not (folder / "line.json").exists():
            assert time.monotonic() - start < 240, "nothing came back"
            time.sleep(0.3)
        return json.loads((folder / "line.json").read_text())

    code = (
        deploy.CODE.replace("import client, server", "import client")
        + "\nfrom on_flower import server\n"
    )
    report = within(folder, do, ids="a", code=code)
    by_hand = build_runtime(toys.client("a"), toys.method("local"), toys.training(), 0)
    reply = {"number": 1, "body": by_hand.perform("train", 1, 0, {}), "work": by_hand.take_work()}
    return {
        **report,
        "same": report["reply"] == reply,
        "right_size": report["size"] == encoded_size(reply),
        "kept": (
            folder
            / "flower"
            / "clients"
            / "a"
            / "unalike"
            / "smallest"
            / "checkpoints"
            / "clients"
            / "a"
        ).exists(),
    }


def whole(folder):
    """One averaging round of one client."""
    return within(folder, lambda here: carried(folder, here, "fedavg"), ids="a")


def methods(folder):
    """The three that stand for the rest, FedMuscle with an exchange a pass."""
    return within(
        folder,
        lambda here: {
            "fedavg": carried(folder, here, "fedavg", rounds=2),
            "afmcc": carried(folder, here, "afmcc"),
            "fedmuscle": carried(folder, here, "fedmuscle", sync="epoch", peers=1),
        },
    )


def killed(folder):
    """Kill a SuperNode between rounds and start it again: the run goes on, with the same end."""
    struck, report = [], []

    def do(here):
        def strike():
            while not any(event == "round" for event, _ in report):
                time.sleep(0.2)
            supervisor.stop([here.processes["a"]])
            struck.append(time.time())
            here.start()

        threading.Thread(target=strike, daemon=True).start()
        return carried(
            folder,
            here,
            "fedavg",
            watch=lambda event, **facts: report.append((event, time.time())),
            rounds=3,
        )

    outcome = within(folder, do)
    on = [
        at for event, at in report if event in ("note", "evaluation") and struck and at > struck[0]
    ]  # everyone was heard
    return {**outcome, "struck": len(struck), "seconds": on[0] - struck[0] if on else None}


def storm(folder):
    """Kill processes at random: SuperNodes, those of their apps, the SuperLink and the server's."""
    kills = rounds = planned_kills()
    killed, rounds_seen, over = [], [0], threading.Event()
    draw = random.Random(0)

    def strike(here):
        since = 0  # kills since a round was finished: after five attempts without any it is over
        while not over.wait(draw.uniform(2.0, 15.0)):
            here.start()  # what was killed, or ended because of that
            since = 0 if rounds_seen[0] else since
            if since > 1 or len(killed) >= kills:
                continue
            victim = draw.choices(["a", "b", "superlink"], [4, 4, 1])[0]
            pids = supervisor.descendants(here.processes[victim].pid)
            if not pids:
                continue
            with suppress(ProcessLookupError):
                os.kill(draw.choice(pids), signal.SIGKILL)
                killed.append("superlink" if victim == "superlink" else "supernode")
                since, rounds_seen[0] = since + 1, 0

    def watch(event, **facts):
        rounds_seen[0] += event == "round"

    def do(here):
        threading.Thread(target=strike, args=(here,), daemon=True).start()
        try:
            return carried(folder, here, "fedavg", watch=watch, rounds=rounds, timeout=600.0)
        finally:
            over.set()

    return {**within(folder, do), "killed": Counter(killed), "rounds": rounds}


OWNED = '''"""An app that leaves a file wherever it runs."""
import os
from pathlib import Path

from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server = ServerApp()
client = ClientApp()
owned = lambda where: (Path("{folder}") / f"owned-{{where}}-{{os.getpid()}}").touch()


@server.main()
def main(grid, context):
    owned("server")
    nodes = [node.node_id for node in grid.get_nodes()]
    messages = [Message(RecordDict(), node, "query") for node in nodes]
    replies = grid.send_and_receive(messages, timeout=60.0)
    codes = sorted(str(r.error.code) if r.has_error() else "ran" for r in replies)
    (Path("{folder}") / "replies").write_text(" ".join(codes))


@client.query()
def answer(message, context):
    owned("client")
    return Message(RecordDict(), reply_to=message)
'''
TRICKS = (
    "/v1/control/start-run",
    "/v1/control/register-node",
    "/v1/runtime/acquire-task",
    "/v1/fleet/register-node",
    "/docs",
    "/v1/fleet/../control/start-run",
    "/v1/fleet/%2e%2e/control/start-run",
    "//v1/control/start-run",
    "/v1/fleet/pull-messages/",
)


def request(here, path, method="POST"):
    """The status that the gate answers."""
    host, port = here.address
    trust = ssl.create_default_context(cafile=str(here.place / "certificates" / "ca.pem"))
    line = http.client.HTTPSConnection(host, port, context=trust, timeout=30)
    line.putrequest(method, path, skip_accept_encoding=True)
    line.putheader("Content-Type", "application/x-protobuf")
    line.putheader("Content-Length", "0")
    line.endheaders()
    return line.getresponse().status


def intruder(folder):
    """An attacker with the address, ca.pem and a key of her own, during an honest run.

    Then her app is submitted from the server's machine.
    """

    def outside(here, home, report):
        ca = here.place / "certificates" / "ca.pem"
        address = ":".join(here.address)
        (home / "flwr").mkdir(parents=True)
        (home / "flwr" / "config.toml").write_text(
            f'[superlink]\ndefault = "unalike"\n\n[superlink.unalike]\naddress = "{address}"\n'
            f'root-certificates = "{ca}"\n'
        )
        (home / "app").mkdir()
        (home / "app" / "pyproject.toml").write_text(deploy.APP)
        (home / "app" / "unalike_app.py").write_text(OWNED.format(folder=folder))
        deploy.make_key(home / "mallory")
        report["run"] = tried(home, "run", str(home / "app"), "unalike")
        report["register"] = tried(
            home,
            "supernode",
            "register",
            str(home / "mallory.pub"),
            "unalike",
            "--name",
            "a",
        )
        report["statuses"] = sorted(
            {request(here, path) for path in TRICKS}
            | {request(here, "/v1/fleet/pull-messages", "GET")}
        )
        report["without_key"] = request(here, "/v1/fleet/pull-messages")
        report["joined"] = joined(here, home)
        # registered under a's name by somebody at the server, she is still not a
        flower.run_flwr(
            here.place,
            "supernode",
            "register",
            str(home / "mallory.pub"),
            "unalike",
            "--name",
            "a",
        )
        report["joined_as_a"] = joined(here, home)

    def old(here, home, report):
        """A member's key, until it is taken out of the folder; and a member's bytes again."""
        deploy.make_key(home / "old")
        shutil.copy(home / "old.pub", here.place / "keys")
        flower.run_flwr(
            here.place, "supernode", "register", str(home / "old.pub"), "unalike", "--name", "old"
        )
        report["joined_with_key"] = joined(here, home, "old")
        (here.place / "keys" / "old.pub").unlink()
        report["joined_with_old_key"] = joined(here, home, "old")
        recorded = bytes(max(here.recorder.sent, key=len))
        report["recorded"] = len(recorded)
        report["replay"] = organisations.is_replay_answered(int(here.address[1]), recorded)

    def joined(here, home, key="mallory"):
        """Whether a SuperNode with her key, or another one, is let in."""
        port = deploy.free_ports(1)[0]
        address = ":".join(here.address)
        certificates = here.place / "certificates"
        files = [str(certificates / "ca.pem"), str(certificates / "trusted.yaml"), str(home / key)]
        command = deploy.supernode(address, files, "none.yaml", port)
        log = home / f"{key}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [flower.executable(command[0]), *command[1:]],
                stdout=output,
                stderr=output,
                env=flower.environment(home),
            )
        start = time.monotonic()
        while process.poll() is None and "SuperNode ID" not in log.read_text():
            assert time.monotonic() - start < 120, log.read_text()
            time.sleep(0.3)
        process.terminate()
        process.wait()
        refused = "key is none of those that were let into the federation" in log.read_text()
        assert refused != ("SuperNode ID" in log.read_text()), log.read_text()
        return not refused

    def tried(home, *command):
        try:
            return flower.run_flwr(home, *command)
        except EngineError as error:
            return str(error).splitlines()[-1]

    def do(here):
        report = {}
        thread = threading.Thread(target=outside, args=(here, folder / "mallory", report))
        thread.start()
        report |= carried(folder, here, "fedavg")
        thread.join()
        old(here, folder / "mallory", report)
        report["owned"] = [path.name for path in folder.glob("owned-*")]
        flower.run_flwr(here.place, "run", str(folder / "mallory" / "app"), "unalike")
        start = time.monotonic()
        while not (folder / "replies").exists():
            assert time.monotonic() - start < 120, "her app did not end"
            time.sleep(0.3)
        return {
            **report,
            "replies": (folder / "replies").read_text(),
            "at_clients": len(list(folder.glob("owned-client-*"))),
        }

    here = federation(folder)
    known = deploy.commands(here.place)
    at = known["a"].index("--superlink") + 1
    here.address = known["a"][at].split(":")
    here.recorder = organisations.Recorder(int(here.address[1]))
    known["a"][at] = f"127.0.0.1:{here.recorder.port}"
    (here.place / "commands.json").write_text(json.dumps(known))
    try:
        here.start()
        return do(here)
    finally:
        here.stop()
        here.recorder.close()


if __name__ == "__main__":
    steps(globals())
