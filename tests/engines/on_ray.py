"""What happens on a real Ray cluster, told in FOLDER/told.json. A program of its own: test_ray.py runs it where only loopback is up.

Usage: python on_ray.py FOLDER STEP...
"""

import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import conftest as toys
import torch

from unalike.algorithm import operation
from unalike.algorithms import ALGORITHMS, FedMuscle
from unalike.engines import ray as ray_engine
from unalike.engines.host import Host
from unalike.engines.ray import RayEngine
from unalike.privacy import Privacy
from unalike.runs.run import make_side

torch.set_num_threads(1)
SAME = ("clients", "bytes", "failures", "metrics", "rounds")


def there(name):
    """Toys for a method."""
    return SimpleNamespace(**(vars(toys) | toys.toys_for(ALGORITHMS[name])))


@dataclass
class Slow(FedMuscle):
    """Takes its time, so that something can happen meanwhile; a round has many calls, and each changes a client."""

    peers: int = 2
    width: int = 8
    batch: int = 8
    seconds: float = 0.3

    class Side(FedMuscle.Side):
        @operation
        def train(self):
            time.sleep(self.algorithm.seconds)
            return super().train()

        @operation
        def align(self, epoch, batch, gradient):
            time.sleep(self.algorithm.seconds / 3)
            return super().align(epoch, batch, gradient)


def pids(engine):
    """Processes of the actors."""
    return [engine.ray.get(actor.hello)[2] for actor in engine.actors]


def strike(seconds, how, count=1, pause=0.0):
    """After so many seconds, from when an engine is ready, signal the first actor's process; tells when."""
    struck = []
    load = RayEngine.load

    def loaded(engine, *given):
        load(engine, *given)

        def later():
            for i in range(count):
                time.sleep(seconds if not i else pause)
                while i and engine.actors[i % len(engine.actors)].deaths:          # over one message it may die three times
                    time.sleep(0.1)
                try:
                    os.kill(pids(engine)[i % len(engine.actors)], how)
                    struck.append(time.time())
                except Exception:
                    return

        threading.Thread(target=later, daemon=True).start()

    RayEngine.load = loaded
    return struck, lambda: setattr(RayEngine, "load", load)


def events(folder, kind=None):
    told = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in told if kind in (None, event["event"])]


def methods(folder):
    """Every method here and on Ray, and one with privacy: same parameters, same ledger, same releases. Asynchronous ones hear their clients
    on Ray in the order they did here. Two at a time there, since most of it is waiting for actors to start."""
    cases = {**{name: (name, {}) for name in ALGORITHMS}, "private": ("fedavg", {"privacy": Privacy(noise=0.5)})}

    def go(case, place, **options):
        name, more = cases[case]
        toy = there(name)
        return toy.execute(folder / case / place, toy.method(name), toy.clients(), rounds=2, **more, **options)

    def on_ray(case):
        replay = {"replay": folder / case / "here"} if ALGORITHMS[cases[case][0]].asynchronous else {}
        return go(case, "ray", engine="ray", options={"actors": 1}, **replay)

    here = {case: go(case, "here") for case in cases}
    ray_engine.connected(None)
    with ThreadPoolExecutor(2) as pool:
        ray = dict(zip(cases, pool.map(on_ray, cases), strict=True))
    read = lambda case, of: [of(folder / case / place) for place in ("here", "ray")]
    ledgers = {case: read(case, lambda run: (run / "ledger.csv").read_text()) for case in cases}
    return {case: {"apart": toys.apart(*read(case, toys.states)), "same_ledger": ledgers[case][0] == ledgers[case][1],
                   "spent": [run[case].get("privacy") for run in (here, ray)]} for case in cases}


def order(folder):
    """An asynchronous run on Ray, in whatever order; replayed here."""
    toy = there("afmcc")
    toy.execute(folder / "ray", toy.method("afmcc"), toy.clients(), rounds=3, engine="ray")
    toy.execute(folder / "here", toy.method("afmcc"), toy.clients(), rounds=3, replay=folder / "ray")
    return {"apart": toy.apart(toy.states(folder / "here"), toy.states(folder / "ray")),
            "same_ledger": (folder / "here" / "ledger.csv").read_text() == (folder / "ray" / "ledger.csv").read_text()}


def killed(folder):
    """An actor killed in the middle of a round: the end is the same, and soon."""
    clients = lambda: toys.clients(3)
    whole = toys.execute(folder / "whole", Slow(seconds=0.0), clients(), rounds=3)
    struck, stop = strike(0.8, signal.SIGKILL)
    calls = []
    try:
        cut = toys.execute(folder / "cut", Slow(), clients(), rounds=3, engine="ray", watch=lambda event, **facts:
                           calls.append(time.time()) if event == "call" else None)
    finally:
        stop()
    return {"same": {key: whole[key] for key in SAME} == {key: cut[key] for key in SAME}, "struck": len(struck),
            "seconds": min((at for at in calls if at > struck[0]), default=0) - struck[0] if struck else None}


def frozen(folder):
    """An actor stopped: the client it was busy with is answered for in time, the other goes on, and both are where they were."""
    local, training = toys.method("local"), toys.training()
    message = lambda number, operation: {"operation": operation, "number": number, "round": 1, "turn": 0, "body": {}}
    engine = RayEngine(toys.clients(2), partial(make_side, local, training, 0, False, None), folder, actors=2)
    try:
        engine.load(0, 0.0, [])
        engine.send({"a": message(1, "train"), "b": message(2, "train")})
        heard = set()
        while len(heard) < 2:
            heard |= {a.client for a in engine.receive({1, 2}) if "body" in a.reply}
        engine.timeout = 4.0
        os.kill(pids(engine)[0], signal.SIGSTOP)
        begun = time.monotonic()
        engine.send({"a": message(3, "describe"), "b": message(4, "describe")})
        replies = {}
        while len(replies) < 2:
            replies |= {a.client: a.reply for a in engine.receive({3, 4})}
        took = time.monotonic() - begun
        engine.timeout = 60.0
        engine.send({"a": message(5, "describe")})
        again, = engine.receive({5})
        by_hand = make_side(local, training, 0, False, None, toys.clients(1)[0])
        by_hand.perform("train", 1, 0, {})
        return {"heard": len(heard), "failure": replies["a"].get("failure"), "other": "body" in replies["b"], "took": took,
                "same": again.reply["body"] == by_hand.describe()}
    finally:
        engine.close()


def rubbish(folder):
    """A client that answers with what is no message is named and left out."""
    class Strange(Host):
        def answer(self, client, data, limit):
            reply = super().answer(client, data, limit)
            return bytearray(b"rubbish" * 40) if client == "b" else reply

    class Bad(ray_engine.Place):
        def __init__(self, *given):
            super().__init__(*given)
            self.host.__class__ = Strange

    good, ray_engine.Place = ray_engine.Place, Bad
    try:
        results = toys.execute(folder / "run", toys.method("fedavg"), toys.clients(3), rounds=2, engine="ray", options={"actors": 1})
    finally:
        ray_engine.Place = good
    return {"failures": results["failures"], "rounds": results["rounds"]}


def storm(folder):
    """Many kills of actors over one run."""
    whole = toys.execute(folder / "whole", Slow(seconds=0.0), toys.clients(3), rounds=30)
    struck, stop = strike(1.0, signal.SIGKILL, count=25, pause=4.0)
    try:
        cut = toys.execute(folder / "cut", Slow(seconds=0.5), toys.clients(3), rounds=30, engine="ray")
    finally:
        stop()
    return {"same": {key: whole[key] for key in SAME} == {key: cut[key] for key in SAME}, "struck": len(struck)}


def server(folder):
    """A server that is to be killed, and then to go on."""
    results = toys.execute(folder / "cut", Slow(seconds=0.5), toys.clients(3), rounds=6, engine="ray")
    whole = toys.execute(folder / "whole", Slow(seconds=0.0), toys.clients(3), rounds=6)
    return {"same": {key: whole[key] for key in SAME} == {key: results[key] for key in SAME},
            "resumed": len(events(folder / "cut", "resume"))}


if __name__ == "__main__":
    where, told = Path(sys.argv[1]), {}
    for step in sys.argv[2:]:
        begun = time.time()
        made = globals()[step](where / step)
        told[step] = {**made, "seconds_in_all": round(time.time() - begun, 1)}
    (where / "told.json").write_text(json.dumps(told))
