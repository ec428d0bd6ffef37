"""One execution: serve, save after each round, measure, write it down. Knows methods and engines only by what all of them share."""

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unalike.base.errors import Problem, Problems, UserError
from unalike.base.ledger import Ledger
from unalike.base.message import MAX_BYTES
from unalike.core.algorithm import Algorithm, ClientProgram
from unalike.core.client import Client, ClientInfo
from unalike.core.engine import Engine, EngineSettings, Watch
from unalike.core.evaluation import finish_tasks
from unalike.core.federation import Federation, QuorumError
from unalike.core.operations import unanswered_measurements
from unalike.core.participation import FederationConfig
from unalike.core.privacy import Privacy, protects, releases
from unalike.core.replay import Replay
from unalike.core.runtime import build_runtime
from unalike.core.signatures import Declared, declared
from unalike.engines import engine_class
from unalike.engines.store import Archive
from unalike.runs.compatibility import compatibility_problems
from unalike.runs.figures import leave
from unalike.runs.run_folder import Folder, commit
from unalike.tasks import find_task
from unalike.training.loop import Training


class Run:
    """A run of one algorithm on some clients, new or resumed, in a folder of its own."""

    def __init__(
        self,
        folder: Folder | None,
        algorithm: Algorithm,
        clients: list[Client],
        training: Training,
        federation: FederationConfig,
        *,
        name: str,
        method: str,
        seed: int,
        engine: str = "local",
        options: dict[str, Any] | None = None,
        replay: str | Path | None = None,
        threads: int = 1,
        alive: int = 256,
        alone: bool = True,
        safeguard: bool = False,
        privacy: Privacy | None = None,
        checkpoint: int = 1,
        cache: bool = False,
        source: str | None = None,
        server: Client | None = None,
        watch: Watch = lambda event, **facts: None,
        infos: dict[str, ClientInfo] | None = None,
    ):
        self.folder: Folder  # may be given later, once all is known to fit, but before the run goes
        if folder is not None:
            self.folder = folder
        self.algorithm, self.clients, self.training, self.federation = (
            algorithm,
            clients,
            training,
            federation,
        )
        self.name, self.method, self.seed, self.threads, self.checkpoint = (
            name,
            method,
            seed,
            threads,
            checkpoint,
        )
        self.privacy, self.guarded, self.cache, self.watch, self.alive = (
            privacy,
            safeguard,
            cache,
            watch,
            alive,
        )
        # one client is alone already, and would be compared with itself; alone nothing is protected
        self.alone = (
            alone and len(clients) != 1 and not self.secret and not any(c.privacy for c in clients)
        )
        self.server = server  # the model of the server's own, with the data it learns from
        self.engine_class = engine_class(engine)
        self.engine_options = options or {}
        # whether the server's program goes to where the engine's server is
        self.launches = infos is None and not self.engine_class.hosts_clients
        self.replay = Replay.read(Path(replay)) if replay is not None else None
        self.cost: dict[str, int] = {}  # releases of the last reply to each operation
        if not clients and not infos and not self.launches:
            raise UserError("a federation needs at least one client")
        if len({c.id for c in clients}) != len(clients):
            raise UserError("two clients have the same id; ids must differ")
        self.infos = (
            infos if infos is not None else {c.id: c.info() for c in clients}
        )  # given where the clients are not here
        public = [info.public_rows for info in self.infos.values() if info.public is not None]
        without_public = algorithm.needs_public and not public
        problems: list[Problem] = []
        if self.infos:
            # Without a public set its size cannot be wrong: that it is missing is reported below.
            rows = sys.maxsize if without_public else min(public, default=0)
            misfits = algorithm.check(len(self.infos), rows)
            misfits = misfits or algorithm.check_round(federation.places(len(self.infos)))
            problems += [(f"algorithm.{field}", sentence) for field, sentence in misfits]
        if self.infos and without_public:
            sentence = (
                f"{method} needs a public set, unlabelled rows that every client may read: "
                "pass public=."
            )
            problems.append(("public", sentence))
        fits = compatibility_problems(
            algorithm, clients, training, seed, safeguard, privacy, not problems
        )
        fits += (
            compatibility_problems(algorithm, [server], training, seed, sound=not problems)
            if server is not None
            else []
        )
        if problems := problems + fits:
            raise Problems(source or name, problems)

    def go(self) -> dict[str, Any]:
        """Run to the end, from the last finished round if there is one. Returns the results."""
        if (done := self.folder.results) is not None:
            return done
        if self.launches:
            return self.engine_class(self.folder, **self.engine_options).launch(self.watch)
        threads = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            return self.execute()
        finally:
            torch.set_num_threads(threads)

    def execute(self) -> dict[str, Any]:
        self.watch("folder", path=self.folder.path, python=self.folder.config.get("python", False))
        saved = self.saved()
        begun = time.time()
        before = saved["seconds"] if saved else 0.0
        self.tell(
            "start" if saved is None else "resume",
            scenario=self.name,
            algorithm=self.method,
            seed=self.seed,
            config=self.folder.config,
            round=saved["federation"]["finished"] if saved else 0,
            rounds=self.training.rounds,
            clients={id: info.as_dict() for id, info in self.infos.items()},
        )
        alone = self.alone_values() if self.alone else None
        self.tell("stage", text=self.method, round=saved["federation"]["finished"] if saved else 0)
        engine = self.engine(self.folder.clients, self.guarded, self.privacy)
        try:
            fed = Federation(
                engine,
                self.training,
                self.federation,
                self.seed,
                self.tell,
                self.algorithm.evaluate,
                self.algorithm.figures,
                self.guarded,
                Archive(self.folder.archive),
                self.releases if self.privacy else None,
                self.replay,
                self.declared,
                self.lengths,
                unanswered_measurements(self.algorithm.Program, self.privacy),
                build_runtime(self.server, self.algorithm, self.training, self.seed)
                if self.server
                else None,
            )
            fed.archive.load(saved["federation"]["finished"] if saved is not None else 0)
            fed.ledger = Ledger.read(
                self.folder.ledger, saved["ledger"] if saved is not None else 0
            )
            if saved is not None:
                fed.remember(saved["federation"])
                for event in self.folder.events(
                    "released"
                ):  # also of the round that is done again now, with fresh noise
                    fed.released[event["client"]] = max(
                        fed.released[event["client"]], event["releases"]
                    )
                if fed.server is not None:
                    fed.server.restore(saved["own"])
            else:
                engine.load(0, 0.0, [])
            self.serve(fed, lambda: before + time.time() - begun)
            results = self.conclude(fed, alone)
        finally:
            engine.close()
        results |= {
            "seconds": round(before + time.time() - begun, 3),
            "commit": commit(),
            "folder": str(self.folder.path),
        }
        fed.ledger.append(self.folder.ledger)
        self.folder.write_json("results.json", results)
        fed.ledger.write(self.folder.ledger)  # a table in order, now that nobody goes on from it
        self.tell("finish", seconds=results["seconds"])
        return results

    def saved(self) -> dict[str, Any] | None:
        """Where the run goes on, if it has begun."""
        return self.folder.last(self.tell)

    def serve(self, fed: Federation, seconds: Callable[[], float]) -> None:
        """Every round. One that too few clients saw to its end, because they were away, is over; those who did their part keep it."""
        while True:
            try:
                for finished in self.algorithm.serve(fed):
                    self.end_round(fed, finished, seconds)
                return
            except QuorumError as short:
                if (
                    not short.passing
                    or fed.visits
                    or len(fed.failed_rounds) + 1 == self.training.rounds
                ):
                    raise
                fed.failed_rounds.append(fed.round)
                self.tell("lost", round=fed.round, reason=str(short))
                self.end_round(fed, fed.round, seconds)

    def end_round(self, fed: Federation, finished: int, seconds: Callable[[], float]) -> None:
        fed.finished = finished
        self.tell(
            "round",
            round=finished,
            seconds=seconds(),
            clock=fed.clock,
            bytes={way: fed.ledger.total(way) for way in ("up", "down")},
        )
        ends = finished == self.training.rounds and max(fed.visits.values(), default=0) <= finished
        if not self.algorithm.evaluates and not ends:  # the end is measured once all is done
            fed.evaluate()
        if finished % self.checkpoint == 0 or finished == self.training.rounds:
            self.save(fed, finished, seconds())

    def save(self, fed: Federation, number: int, seconds: float) -> None:
        """Clients first, then the server: the server's file is what makes the round count."""
        self.count_again(fed)
        federation, own = (
            fed.memory(),
            {"own": fed.server.state()} if fed.server is not None else {},
        )
        fed.engine.save(number)
        if isinstance(fed.archive, Archive):
            fed.archive.save(number)
        self.folder.server.snapshot(
            "server",
            {
                **own,
                "federation": federation,
                "seconds": seconds,
                "ledger": fed.ledger.append(self.folder.ledger),
            },
            number,
        )

    def conclude(
        self, fed: Federation, alone: dict[str, dict[str, float]] | None
    ) -> dict[str, Any]:
        """What came of it, per client and in all."""
        fed.require_clients()
        fed.round = max(fed.finished, self.training.rounds)
        self.algorithm.finish(fed)
        self.watch("sent", bytes={way: fed.ledger.total(way) for way in ("up", "down")})
        together = self.algorithm.evaluate(fed)
        figures = self.algorithm.figures(fed, dict(together))
        self.tell(
            "evaluation",
            round=fed.round,
            when="end",
            who="together",
            values=dict(together),
            figures=figures,
        )
        kept: dict[str, Any] = {}
        guarded: dict[str, Any] = {}
        if self.guarded:
            self.tell("stage", text="each client decides what to keep")
            attended = self.federation.attended(
                list(fed.infos), self.seed, range(1, self.training.rounds + 1)
            )
            kept = fed.call(
                "safeguard",
                clients=fed.clients,
                quorum=0,
                per_client={c: {"rounds": attended[c]} for c in fed.clients},
            )
            guarded = fed.call("evaluate", clients=fed.clients, quorum=0)
        finish_tasks(fed)
        about = fed.call("describe", clients=fed.clients, quorum=0)
        self.count_again(fed)
        fed.engine.save(fed.round + 1)
        clients = {}
        for id, info in fed.infos.items():
            value, before = (
                together.get(id, {}).get(info.metric),
                (alone or {}).get(id, {}).get(info.metric),
            )
            entry = {
                "model": info.model,
                "modalities": list(info.modalities),
                "task": info.task,
                "metric": info.metric,
                "higher_is_better": info.higher_is_better,
                "unit": info.unit,
                "labelled": info.has("labelled"),
                "samples": info.samples,
                "test": "own" if self.algorithm.personalised else info.tested_on,
                "alone": before,
                "value": value,
                "gain": gain(value, before, info.higher_is_better),
                "metrics": together.get(id, {}),
                **about.get(id, {"hash": None}),
                "bytes": {way: fed.ledger.total(way, client=id) for way in ("up", "down")},
            }
            if "flops" in entry:  # of a round's training: backward costs twice forward
                entry["round_flops"] = 3 * entry["flops"] * info.samples * self.training.epochs
            if id in kept:
                entry |= {
                    "safeguarded": (safe := guarded.get(id, {}).get(info.metric)),
                    "safeguarded_gain": gain(safe, before, info.higher_is_better),
                    "kept": kept[id]["kept"],
                    "judged": kept[id]["log_loss"],
                }
            if self.privacy is not None:
                entry["privacy"] = self.privacy.spent(fed.released[id])
            clients[id] = entry
        results = {
            "scenario": self.name,
            "algorithm": self.method,
            "seed": self.seed,
            "clients": clients,
            "metrics": figures,
            "federation_metrics": federation_metrics(fed),
            **summary(clients, "gain"),
            "bytes": {way: fed.ledger.total(way) for way in ("up", "down")},
            "clock": fed.clock,
            "rounds": fed.finished,
            "lost": fed.failed_rounds,
            "failures": [
                {
                    "client": f.client,
                    "round": f.round,
                    "operation": f.operation,
                    "reason": f.reason,
                    "lasting": f.lasting,
                }
                for f in fed.failures
            ],
        }
        if fed.visits:
            results["visits"] = fed.visits
        if self.guarded:
            results["safeguard"] = summary(clients, "safeguarded_gain")
        if self.privacy is not None:
            results["privacy"] = self.privacy.spent(max(fed.released.values()))  # the worst
        if (server := self.algorithm.server_results(fed, dict(together))) is not None:
            results["server"] = server
        return results

    # the same clients alone

    def alone_values(self) -> dict[str, dict[str, float]]:
        """Metrics of local training from the same first weights, with the same rows in the same order and as many local epochs."""
        if (known := self.folder.read_json("alone.json")) is not None:
            return known
        from unalike.algorithms.local import Local

        self.tell("stage", text="alone", round=0)
        place = self.folder.path / "checkpoints" / "alone"
        engine = self.engine(place)
        try:
            engine.load(0, 0.0, [])
            federation = FederationConfig(
                evaluations=self.federation.evaluations,
                participation=self.federation.participation,
                dropout=self.federation.dropout,
                quorum=0,
            )
            fed = Federation(
                engine,
                self.training,
                federation,
                self.seed,
                self.tell_alone,
                declared=self.declared,
                lengths=self.lengths,
            )
            fed.evaluator = lambda fed: fed.call(
                "evaluate",
                clients=fed.clients,
                quorum=0,
                common=not self.algorithm.personalised
                and all(info.tested_on == "common" for info in fed.infos.values()),
            )
            self.algorithm.alone(fed)
            first = fed.call("describe", clients=fed.clients, quorum=0)
            cached = self.cached(first)
            if (kept := recall(cached)) is not None:
                for event in kept["evaluations"]:
                    self.tell("evaluation", **event)
                values = kept["values"]
            else:
                self.evaluations: list[dict] = []
                measured: dict[str, Any] | None = None
                for number in Local().serve(fed):
                    fed.finished = number
                    measured = fed.evaluate()
                    self.tell("alone", round=number)
                values = dict(measured or {})  # the last round is always measured
                if cached is not None:
                    with suppress(OSError):  # a cache that cannot be written is done without
                        cached.parent.mkdir(parents=True, exist_ok=True)
                        written = cached.with_suffix(f".{os.getpid()}")
                        written.write_text(
                            json.dumps({"values": values, "evaluations": self.evaluations})
                        )
                        written.replace(cached)
        finally:
            engine.close()
            shutil.rmtree(place, ignore_errors=True)
        self.folder.write_json("alone.json", values)
        return values

    def tell_alone(self, event: str, **facts: Any) -> None:
        if event == "evaluation":
            self.evaluations.append({**facts, "who": "alone"})
            self.tell("evaluation", **self.evaluations[-1])
        elif event == "failure":
            self.tell(event, **facts)

    def cached(self, first: dict[str, Any]) -> Path | None:
        """Where the values of this very training are kept: same code, clients, data, budget, seed and first weights; and the same
        method, where its client alone is another than that of local training."""
        if not self.cache:
            return None
        from unalike.data.samples import fingerprint

        program, build = (
            self.algorithm.Program,
            self.algorithm.Program.build is not ClientProgram.build,
        )
        own = any(
            getattr(program, name) is not getattr(ClientProgram, name)
            for name in ("train", "task_loss", "learn", "optimizer", "evaluate")
        )
        told = [
            [f"{program.__module__}.{program.__qualname__}", vars(self.algorithm)]
            if own
            else "as local",
            [
                str(
                    program(
                        replace(c, device="cpu"), self.algorithm, self.training, self.seed
                    ).model
                )
                for c in self.clients
                if build
            ],
            self.training.model_dump(),
            self.seed,
            self.algorithm.personalised,
            self.federation.model_dump(),
            source_hash(),
            {
                c.id: [
                    first.get(c.id),
                    str(c.dtype),
                    c.device,
                    fingerprint(c.train),
                    fingerprint(c.test) if c.test is not None else 0,
                    fingerprint(c.common) if c.common is not None else 0,
                ]
                for c in self.clients
            },
        ]
        root = Path(
            os.environ.get("UNALIKE_CACHE")
            or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unalike"
        )
        return (
            root
            / "alone"
            / f"{hashlib.sha256(json.dumps(told, default=str).encode()).hexdigest()[:32]}.json"
        )

    def engine(self, place: Path, guarded: bool = False, privacy: Privacy | None = None) -> Engine:
        build = partial(
            build_runtime,
            algorithm=self.algorithm,
            training=self.training,
            seed=self.seed,
            guarded=guarded,
            privacy=privacy,
        )
        settings = EngineSettings(
            max_loaded_clients=self.alive,
            max_message_bytes=self.federation.message_bytes or MAX_BYTES,
            tick=self.federation.tick,
        )
        return self.engine_class(self.clients, build, place, settings, **self.engine_options)

    def declared(self, operation: str) -> Declared:
        return declared(getattr(self.algorithm.Program, operation))

    @property
    def lengths(self) -> dict[str, int]:
        """Fields of the method that may be lengths of axes."""
        return {name: value for name, value in vars(self.algorithm).items() if type(value) is int}

    def releases(self, operation: str, answer: dict[str, Any]) -> int:
        """How often the mechanism was used for an answer. A failure may be one that came of the data, or the answer may be on its way:
        it counts as much as the last answer to that operation."""
        sends = getattr(getattr(self.algorithm.Program, operation), "sends", {})
        if "failure" in answer:
            return max(1, self.cost.get(operation, 1)) if protects(sends) else 0
        self.cost[operation] = releases(answer.get("body"), sends)
        return self.cost[operation]

    def count_again(self, fed: Federation) -> None:
        """What a client did again, because its process died, it said again: with secret noise that is another release."""
        while self.secret and fed.engine.repeated:
            client, operation = fed.engine.repeated.pop()
            if count := self.cost.get(operation, 0):
                fed.release(client, count)

    @property
    def secret(self) -> bool:
        return self.privacy is not None and self.privacy.entropy == "secret"

    def tell(self, event: str, **facts: Any) -> None:
        if (
            event == "released" and not self.secret
        ):  # noise from the seed comes again: nothing new is said
            return
        if event == "picture":
            leave(self.folder.path, **facts)
            return
        if event not in ("call", "alone", "stage"):
            self.folder.event(event, **facts)
        self.watch(event, **facts)


def recall(cached: Path | None) -> dict[str, Any] | None:
    """What an earlier run left there; None where there is nothing, or nothing that can be read."""
    try:
        kept = json.loads(cached.read_text()) if cached is not None else None
    except (OSError, ValueError):
        return None
    return kept if isinstance(kept, dict) and kept.keys() == {"values", "evaluations"} else None


def gain(
    value: float | None, baseline: float | None, higher_is_better: bool = True
) -> float | None:
    """Return the improvement over the local baseline in percent of it, positive if better.

    None if a value is missing or the baseline is 0.

    >>> gain(60.0, 50.0), gain(4.0, 5.0, higher_is_better=False)
    (20.0, 20.0)
    """
    if value is None or not baseline:
        return None
    improvement = value - baseline if higher_is_better else baseline - value
    return 100 * improvement / abs(baseline)


def federation_metrics(fed: Federation) -> list[str]:
    """Return the federation's metrics that a report shows: none if clients have unlike tasks."""
    tasks = {info.task for info in fed.infos.values()}
    return list(find_task(tasks.pop()).federation_metrics) if len(tasks) == 1 else []


def summary(clients: dict[str, dict], name: str) -> dict[str, Any]:
    """Return the mean of a gain over clients that have it, and how many of these are degraded."""
    gains = [c[name] for c in clients.values() if c.get(name) is not None]
    return {
        "delta": sum(gains) / len(gains) if gains else None,
        "losers": sum(g < 0 for g in gains) if gains else None,
    }


def source_hash() -> str:
    """Hash of the package's code, so that what other code measured is never taken for this code's."""
    out = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        out.update(path.read_bytes())
    return out.hexdigest()[:16]
