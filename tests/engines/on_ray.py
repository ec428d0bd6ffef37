"""Steps with a real Ray cluster; writes FOLDER/report.json. Run by test_ray.py on loopback only.

Usage: python on_ray.py FOLDER STEP...
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import conftest as toys
import torch
from real import REAL, steps
from storms import planned_kills

from unalike.algorithms import ALGORITHMS, FedMuscle
from unalike.core.operations import operation
from unalike.core.privacy import Privacy
from unalike.core.runtime import build_runtime
from unalike.engines import ray as ray_engine
from unalike.engines.host import Host
from unalike.engines.ray import RayEngine

torch.set_num_threads(1)
VICTIMS = ("client", "server")
SAME = ("clients", "bytes", "failures", "metrics", "rounds")


def toys_of(name):
    """Toys for a method."""
    return SimpleNamespace(**(vars(toys) | toys.toys_for(ALGORITHMS[name])))


@dataclass
class Slow(FedMuscle):
    """Sleeps in each operation. A round has many calls, and each changes a client."""

    peers: int = 2
    width: int = 8
    batch: int = 8
    seconds: float = 0.3

    class Program(FedMuscle.Program):
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
    """Signal the first actor's process so many seconds after the engine is ready; returns when."""
    struck = []
    load = RayEngine.load

    def loaded(engine, *arguments):
        load(engine, *arguments)

        def later():
            for i in range(count):
                time.sleep(seconds if not i else pause)
                while (
                    i and engine.actors[i % len(engine.actors)].deaths
                ):  # over one message it may die three times
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
    report = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in report if kind in (None, event["event"])]


def methods(folder):
    """Every method, and one with privacy, here and on Ray: the same end?

    Asynchronous methods replay the order of arrivals that they had here. Two at a time, since most
    of it is waiting for actors to start.
    """
    cases = {
        **{name: (name, {}) for name in REAL},
        "private": ("fedavg", {"privacy": Privacy(noise=0.5)}),
    }

    def go(case, place, **options):
        name, more = cases[case]
        toy = toys_of(name)
        return toy.execute(
            folder / case / place, toy.method(name), toy.clients(), rounds=2, **more, **options
        )

    def on_ray(case):
        replay = (
            {"replay": folder / case / "here"} if ALGORITHMS[cases[case][0]].asynchronous else {}
        )
        return go(case, "ray", engine="ray", options={"actors": 1, "spare": False}, **replay)

    here = {case: go(case, "here") for case in cases}
    ray_engine.connect(None)
    with ThreadPoolExecutor(2) as pool:
        ray = dict(zip(cases, pool.map(on_ray, cases), strict=True))
    read = lambda case, of: [of(folder / case / place) for place in ("here", "ray")]
    ledgers = {case: read(case, lambda run: (run / "ledger.csv").read_text()) for case in cases}
    return {
        case: {
            "apart": toys.apart(*read(case, toys.states)),
            "same_ledger": ledgers[case][0] == ledgers[case][1],
            "spent": [run[case].get("privacy") for run in (here, ray)],
        }
        for case in cases
    }


def order(folder):
    """An asynchronous run on Ray, in whatever order; replayed here."""
    toy = toys_of("afmcc")
    toy.execute(folder / "ray", toy.method("afmcc"), toy.clients(), rounds=3, engine="ray")
    toy.execute(
        folder / "here", toy.method("afmcc"), toy.clients(), rounds=3, replay=folder / "ray"
    )
    return {
        "apart": toy.apart(toy.states(folder / "here"), toy.states(folder / "ray")),
        "same_ledger": (folder / "here" / "ledger.csv").read_text()
        == (folder / "ray" / "ledger.csv").read_text(),
    }


def killed(folder, after=0.8, rounds=3):
    """An actor killed in the middle of a round: the end is the same, and soon."""
    clients = lambda: toys.clients(3)
    whole = toys.execute(folder / "whole", Slow(seconds=0.0), clients(), rounds=rounds)
    struck, stop = strike(after, signal.SIGKILL)
    calls = []
    try:
        cut = toys.execute(
            folder / "cut",
            Slow(),
            clients(),
            rounds=rounds,
            engine="ray",
            watch=lambda event, **facts: calls.append(time.time()) if event == "call" else None,
        )
    finally:
        stop()
    return {
        "same": {key: whole[key] for key in SAME} == {key: cut[key] for key in SAME},
        "struck": len(struck),
        "seconds": min((at for at in calls if at > struck[0]), default=0) - struck[0]
        if struck
        else None,
    }


def relieved(folder):
    """As `killed`, once a spare process stands by."""
    return killed(folder, after=12.0, rounds=30)


def frozen(folder):
    """Freeze an actor: its client fails in time, the other goes on, and both keep their state."""
    local, training = toys.method("local"), toys.training()
    message = lambda number, operation: {
        "operation": operation,
        "number": number,
        "round": 1,
        "turn": 0,
        "body": {},
    }
    engine = RayEngine(
        toys.clients(2),
        partial(build_runtime, algorithm=local, training=training, seed=0),
        folder,
        actors=2,
    )
    try:
        engine.load(0, 0.0, [])
        engine.send({"a": message(1, "train"), "b": message(2, "train")})
        answered = set()
        while len(answered) < 2:
            answered |= {a.client for a in engine.receive({1, 2}) if "body" in a.reply}
        engine.timeout = 4.0
        os.kill(pids(engine)[0], signal.SIGSTOP)
        start = time.monotonic()
        engine.send({"a": message(3, "describe"), "b": message(4, "describe")})
        replies = {}
        while len(replies) < 2:
            replies |= {a.client: a.reply for a in engine.receive({3, 4})}
        took = time.monotonic() - start
        engine.timeout = 60.0
        engine.send({"a": message(5, "describe")})
        (again,) = engine.receive({5})
        by_hand = build_runtime(toys.clients(1)[0], local, training, 0)
        by_hand.perform("train", 1, 0, {})
        return {
            "heard": len(answered),
            "failure": replies["a"].get("failure"),
            "other": "body" in replies["b"],
            "took": took,
            "same": again.reply["body"] == by_hand.program.describe(),
        }
    finally:
        engine.close()


def rubbish(folder):
    """A client that answers with what is no message is named and left out."""

    class Strange(Host):
        def answer(self, client, *arguments):
            reply = super().answer(client, *arguments)
            return bytearray(b"rubbish" * 40) if client == "b" else reply

    class Bad(ray_engine.ClientActor):
        def take_clients(self, contents):
            report = super().take_clients(contents)
            self.host.__class__ = Strange
            return report

    good, ray_engine.ClientActor = ray_engine.ClientActor, Bad
    try:
        results = toys.execute(
            folder / "run",
            toys.method("fedavg"),
            toys.clients(3),
            rounds=2,
            engine="ray",
            options={"actors": 1},
        )
    finally:
        ray_engine.ClientActor = good
    return {"failures": results["failures"], "rounds": results["rounds"]}


def storm(folder):
    """Kill actors at random until there were so many deaths; storms.py kills the server."""
    kills = planned_kills()
    rounds = 6 * kills // 5
    folder.mkdir(exist_ok=True)
    deaths, load = folder / "kills", RayEngine.load

    def loaded(engine, *arguments):
        load(engine, *arguments)
        with deaths.open("a") as file:
            file.write("up\n")
        threading.Thread(target=later, args=(engine,), daemon=True).start()

    def later(engine):
        while deaths.read_text().count("kill") < kills:
            time.sleep(random.uniform(0.3, 3.0))
            actor = random.choice(engine.actors)
            if actor.deaths or not actor.up:  # over one message it may die three times
                continue
            try:
                os.kill(engine.ray.get(actor.hello, timeout=5)[2], signal.SIGKILL)
            except Exception:
                continue
            with deaths.open("a") as file:
                file.write("kill client\n")

    RayEngine.load = loaded
    cut = toys.execute(
        folder / "cut", Slow(seconds=0.5), toys.clients(3), rounds=rounds, engine="ray"
    )
    RayEngine.load = load
    whole = toys.execute(folder / "whole", Slow(seconds=0.0), toys.clients(3), rounds=rounds)
    return {
        "same": {key: whole[key] for key in SAME} == {key: cut[key] for key in SAME},
        "differences": {key: str(cut[key])[:500] for key in SAME if whole[key] != cut[key]},
        "killed": {victim: deaths.read_text().count(f"kill {victim}") for victim in VICTIMS},
    }


def severed(folder):
    """Two machines, and the network between them is cut in the middle of the run."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    report = {}
    whole = toys.execute(folder / "whole", Slow(seconds=0.0), toys.clients(3), rounds=20)
    sh = lambda words, **how: subprocess.run(words.split(), check=True, capture_output=True, **how)
    ray = [
        sys.executable,
        "-c",
        "from ray.scripts.scripts import main; main()",
        "start",
        "--block",
        "--disable-usage-stats",
    ]
    other_machine = subprocess.Popen(["unshare", "-n", "sleep", "1000"])
    time.sleep(0.5)
    inside = f"nsenter -t {other_machine.pid} -n "
    # addresses are on lo: a cut leaves each machine its own
    route = "ip route replace 10.77.0.2/32 dev here src 10.77.0.1"
    for words in (
        "ip link add here type veth peer name there",
        f"ip link set there netns {other_machine.pid}",
        "ip addr add 10.77.0.1/32 dev lo",
        "ip link set here up",
        route,
        f"{inside}ip link set lo up",
        f"{inside}ip addr add 10.77.0.2/32 dev lo",
        f"{inside}ip link set there up",
        f"{inside}ip route add 10.77.0.1/32 dev there src 10.77.0.2",
    ):
        sh(words)
    env = {
        **os.environ,
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "2000",
        "RAY_health_check_failure_threshold": "8",
    }
    start = lambda *more, before="": subprocess.Popen(
        [*before.split(), *ray, *more],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=env,
    )
    nodes = [
        start(
            "--head",
            "--node-ip-address=10.77.0.1",
            "--port=6379",
            "--num-cpus=3",
            "--include-dashboard=false",
        )
    ]
    try:
        while subprocess.run(
            [
                sys.executable,
                "-c",
                "import socket; socket.create_connection(('10.77.0.1', 6379), 1)",
            ],
            capture_output=True,
        ).returncode:
            time.sleep(0.2)
        time.sleep(2.0)
        nodes.append(
            start(
                "--address=10.77.0.1:6379",
                "--node-ip-address=10.77.0.2",
                "--num-cpus=2",
                before=inside,
            )
        )
        cluster = ray_engine.connect("10.77.0.1:6379")
        while cluster.cluster_resources().get("CPU", 0) < 5:
            time.sleep(0.2)
        for name, cut_for in (("healed", 4.0), ("cut", None)):
            load = RayEngine.load
            calls = []
            place = NodeAffinitySchedulingStrategy(
                cluster.get_runtime_context().get_node_id(), soft=False
            )
            filler = cluster.remote(num_cpus=1, scheduling_strategy=place)(
                Slow
            ).remote()  # there is room here for two actors of three
            cluster.get(filler.__ray_ready__.remote())

            def loaded(engine, *arguments, cut_for=cut_for, load=load, name=name, filler=filler):
                load(engine, *arguments)
                used = {engine.ray.get(actor.hello)[1] for actor in engine.actors}

                def later():
                    time.sleep(4.0)
                    report[name] = {"nodes": len(used), "at": time.time()}
                    cluster.kill(filler)
                    sh("ip link set here down")
                    if cut_for:
                        time.sleep(cut_for)
                        sh("ip link set here up")
                        sh(route)

                threading.Thread(target=later, daemon=True).start()

            RayEngine.load = loaded
            try:
                run = toys.execute(
                    folder / name,
                    Slow(),
                    toys.clients(3),
                    rounds=20,
                    engine="ray",
                    options={"address": "10.77.0.1:6379", "actors": 3},
                    watch=lambda event, calls=calls, **facts: (
                        calls.append(time.time()) if event == "call" else None
                    ),
                )
            finally:
                RayEngine.load = load
            cut_at = report[name].pop("at")
            after = [cut_at, *(at for at in calls if at > cut_at)]
            report[name] |= {
                "same": {key: whole[key] for key in SAME} == {key: run[key] for key in SAME},
                "longest": max((b - a for a, b in pairwise(after)), default=0),
            }
    finally:
        cluster.shutdown()  # or this program ends with the cluster
        for process in [*nodes, other_machine]:
            process.terminate()
            process.wait(30)
    return report


def server(folder):
    """A server that is to be killed, and then to go on."""
    results = toys.execute(
        folder / "cut", Slow(seconds=0.5), toys.clients(3), rounds=6, engine="ray"
    )
    whole = toys.execute(folder / "whole", Slow(seconds=0.0), toys.clients(3), rounds=6)
    return {
        "same": {key: whole[key] for key in SAME} == {key: results[key] for key in SAME},
        "resumed": len(events(folder / "cut", "resume")),
    }


if __name__ == "__main__":
    steps(globals())
