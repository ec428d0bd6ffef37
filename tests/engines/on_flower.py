"""What happens in a real Flower federation on loopback, told in FOLDER/told.json. A program of its own: test_flower.py runs it.

Usage: python on_flower.py FOLDER STEP...
"""

import json
import threading
import time
from pathlib import Path

import conftest as toys
import organisations
from flwr.serverapp import ServerApp
from real import steps

from unalike.algorithms import ALGORITHMS
from unalike.base.message import size
from unalike.cross_silo import flower
from unalike.cross_silo import flower_deploy as deploy
from unalike.cross_silo import supervisor as keeper
from unalike.cross_silo.remote_run import follow
from unalike.engines.remote import RemoteEngine, greet
from unalike.runs.plan import plan_to_dict
from unalike.runs.run import build_program


def federation(folder, ids="ab"):
    """A federation whose clients come from a factory."""
    deploy.deploy(
        folder / "flower", list(ids), folder / "none.yaml", f"127.0.0.1:{deploy.ports(1)[0]}"
    )
    for id in ids:
        organisations.describe(folder / "flower" / "clients" / id, id)
    return flower.Local(folder / "flower", list(ids))


def carried(folder, here, name, watch=lambda event, **facts: None, rounds=1, **about):
    """A run in the federation, compared with the same here."""
    organisations.here(folder / name / "here", name, rounds=rounds, count=len(here.ids), **about)
    replay = {"replay": folder / name / "here"} if ALGORITHMS[name].asynchronous else {}
    run = organisations.prepared(folder / name / "away", name, rounds=rounds, **about, **replay)
    engine = flower.FlowerEngine(run, app=str(here.place), clients=len(here.ids), timeout=120.0)
    follow(run, watch, engine.submit, every=1.0)
    return organisations.same(
        run.path, folder / name / "here", [here.place / "clients" / id for id in here.ids]
    )


def within(folder, do, ids="ab"):
    here = federation(folder, ids)
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
    line = flower.FlowerLine(grid, 1)
    infos, refused = greet(line, ABOUT, 120.0)
    agreed = plan_to_dict(toys.method("local"), "local", toys.training(), 0, False, None)
    engine = RemoteEngine(
        line, "smallest", "clients", infos, {"about": ABOUT, "terms": agreed}, timeout=120.0
    )
    engine.load(0, 0.0, [])
    engine.send({"a": {"operation": "train", "number": 1, "round": 1, "turn": 0, "body": {}}})
    (heard,) = engine.receive({1})
    line.close()
    told = {"cards": list(infos), "refused": refused, "reply": heard.reply, "size": heard.size}
    (Path(context.run_config["folder"]) / "partial").write_text(json.dumps(told))
    (Path(context.run_config["folder"]) / "partial").rename(
        Path(context.run_config["folder"]) / "line.json"
    )


def smallest(folder):
    """One operation of one client, over TLS, with its key, in processes that Flower starts: an exchange takes seconds."""

    def do(here):
        app = here.place / "app" / "unalike_app.py"
        app.write_text(
            deploy.CODE.replace("import client, server", "import client")
            + "\nfrom on_flower import server\n"
        )
        flower.words(
            here.place,
            "run",
            str(app.parent),
            "unalike",
            "--run-config",
            f'folder="{folder}"',
            "--format",
            "json",
        )
        begun = time.monotonic()
        while not (folder / "line.json").exists():
            assert time.monotonic() - begun < 240, "nothing came back"
            time.sleep(0.3)
        return json.loads((folder / "line.json").read_text())

    told = within(folder, do, ids="a")
    by_hand = build_program(toys.method("local"), toys.training(), 0, False, None, toys.client("a"))
    reply = {"number": 1, "body": by_hand.perform("train", 1, 0, {}), "work": by_hand.work}
    return {
        **told,
        "same": told["reply"] == reply,
        "right_size": told["size"] == size(reply),
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
    """A SuperNode killed between rounds and started again: the run goes on, and the end is the same."""
    struck, told = [], []

    def do(here):
        def strike():
            while not any(event == "round" for event, _ in told):
                time.sleep(0.2)
            keeper.stop([here.processes["a"]])
            struck.append(time.time())
            here.start()

        threading.Thread(target=strike, daemon=True).start()
        return carried(
            folder,
            here,
            "fedavg",
            watch=lambda event, **facts: told.append((event, time.time())),
            rounds=3,
        )

    found = within(folder, do)
    on = [
        at for event, at in told if event in ("note", "evaluation") and struck and at > struck[0]
    ]  # everyone was heard
    return {**found, "struck": len(struck), "seconds": on[0] - struck[0] if on else None}


if __name__ == "__main__":
    steps(globals())
