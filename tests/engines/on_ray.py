"""What happens on a real Ray cluster, told as one JSON object. A program of its own: test_ray.py runs it where only loopback is up.

Usage: python on_ray.py FOLDER STEP...
"""

import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[1]))
import conftest as toys
import torch

from unalike import Terms
from unalike.algorithm import operation
from unalike.algorithms import ALGORITHMS
from unalike.averaging import Averaging, AveragingSide
from unalike.engines.host import Host
from unalike.engines.ray import RayEngine

torch.set_num_threads(1)
SAME = ("clients", "bytes", "failures", "metrics", "rounds")


def there(name):
    """Toys for a method."""
    return SimpleNamespace(**(vars(toys) | toys.toys_for(ALGORITHMS[name].tasks)))


@dataclass
class Slow(Averaging):
    """Averages after an update that takes its time, so that something can happen meanwhile."""

    seconds: float = 0.3

    class Side(AveragingSide):
        @operation
        def update(self, parameters):
            self.memory["updates"] = self.memory.get("updates", 0) + 1
            time.sleep(self.algorithm.seconds)
            return super().update(parameters)


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


def method(folder, name):
    """The same method here and on Ray: same parameters, same ledger. An asynchronous one hears its clients in the order it did here."""
    toy = there(name)
    toy.execute(folder / "here", toy.method(name), toy.clients(), rounds=2)
    replay = {"replay": folder / "here"} if ALGORITHMS[name].asynchronous else {}
    toy.execute(folder / "ray", toy.method(name), toy.clients(), rounds=2, engine="ray", **replay)
    ledgers = [(folder / place / "ledger.csv").read_text() for place in ("here", "ray")]
    return {"apart": toy.apart(toy.states(folder / "here"), toy.states(folder / "ray")), "same_ledger": ledgers[0] == ledgers[1]}


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
    try:
        cut = toys.execute(folder / "cut", Slow(), clients(), rounds=3, engine="ray")
    finally:
        stop()
    ends = [event["time"] for event in events(folder / "cut", "round")]
    return {"same": {key: whole[key] for key in SAME} == {key: cut[key] for key in SAME}, "struck": len(struck),
            "seconds": min((end for end in ends if end > struck[0]), default=0) - struck[0] if struck else None}


def frozen(folder):
    """An actor stopped in the middle of a round: the client it was busy with is named in time, the others go on."""
    struck, stop = strike(0.8, signal.SIGSTOP)
    begun = time.time()
    try:
        results = toys.execute(folder / "run", Slow(), toys.clients(3), rounds=3, engine="ray", options={"timeout": 5.0})
    finally:
        stop()
    told = events(folder / "run", "failure")
    return {"failures": results["failures"], "rounds": results["rounds"], "named_after": told[0]["time"] - struck[0] if told else None,
            "took": time.time() - begun}


class Rubbish(Averaging):
    """Its second client answers with what is no message."""

    class Side(AveragingSide):
        pass


def rubbish(folder):
    class Strange(Host):
        def answer(self, client, data, limit):
            reply = super().answer(client, data, limit)
            return bytearray(b"rubbish" * 40) if client == "b" else reply

    from unalike.engines import place
    original = place.Place

    class Bad(original):
        def __init__(self, *given):
            original.__init__(self, *given)
            self.host.__class__ = Strange

    import unalike.engines.ray as module
    module.Place = Bad
    try:
        results = toys.execute(folder / "run", toys.method("fedavg"), toys.clients(3), rounds=2, engine="ray")
    finally:
        module.Place = original
    return {"failures": results["failures"], "rounds": results["rounds"]}


def late(folder):
    """A deadline in real seconds: who is late misses the round."""
    class Uneven(Slow):
        class Side(Slow.Side):
            @operation
            def update(self, parameters):
                time.sleep(1.5 if self.client.id == "b" and self.round == 2 else 0.0)
                return super().update(parameters)

    results = toys.execute(folder / "run", Uneven(seconds=0.0), toys.clients(2), rounds=3, engine="ray", terms=Terms(deadline=1.0),
                           options={"actors": 2})
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
    return {"same": {key: whole[key] for key in SAME} == {key: results[key] for key in SAME}, "resumed": len(events(folder / "cut", "resume"))}


if __name__ == "__main__":
    where, told = Path(sys.argv[1]), {}
    for step in sys.argv[2:]:
        begun = time.time()
        made = method(where / step, step) if step in ALGORITHMS else globals()[step](where / step)
        told[step] = {**made, "seconds_in_all": round(time.time() - begun, 1)}
        print(json.dumps(told), flush=True)
