"""Executes a run: rounds, checkpoints, measurements, results. Knows no method and no engine."""

import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from unalike.base.errors import UserError
from unalike.base.integrity import sync
from unalike.base.ledger import Ledger
from unalike.base.message import MAX_BYTES
from unalike.base.tracebacks import is_debugging
from unalike.core.engine import Engine, EngineSettings, Watch
from unalike.core.evaluation import finish_tasks
from unalike.core.federation import Federation, QuorumError
from unalike.core.lazy_clients import examples_of
from unalike.core.privacy import Privacy
from unalike.core.replay import Replay
from unalike.core.runtime import build_runtime
from unalike.core.safeguard import hold_out
from unalike.engines import engine_class
from unalike.engines.store import Archive
from unalike.runs.compatibility import check_lazy_clients, check_plan, describe_scales
from unalike.runs.environment import Environment, describe_changes, environment
from unalike.runs.figures import write_figure
from unalike.runs.initial_models import InitialModels
from unalike.runs.local_baseline import LocalBaseline, Metrics
from unalike.runs.plan import RunPlan
from unalike.runs.release_counter import ReleaseCounter
from unalike.runs.result import Decisions, build_results
from unalike.runs.run_folder import Folder, commit, hash_config, with_rounds

# Events for whoever watches, not for events.jsonl: there are many, or they say nothing new later.
UNRECORDED = ("call", "alone", "stage")


def ignore(event: str, **facts: Any) -> None:
    """Watch a run without doing anything."""


class Run:
    """Executes a plan in a run folder, from the start or from the last checkpoint.

    Args:
        plan: what to run. It is checked here: one client of each kind is built and tried.
        folder: where the run is kept. It may be set later, but before `execute`.
        watch: called as `watch(event, **facts)` while the run goes on.
    Raises: Problems where method, clients and settings do not fit each other.
    """

    def __init__(self, plan: RunPlan, folder: Folder | None = None, watch: Watch = ignore):
        self.folder: Folder
        if folder is not None:
            self.folder = folder
        self.watch = watch
        self.initial_models = InitialModels()
        self.plan = check_lazy_clients(self.initial_models.share_among(plan))
        self.engine_class = engine_class(plan.engine)
        # Whether the server's program is started where the engine's server is, not here.
        self.launches = plan.infos is None and not self.engine_class.hosts_clients
        self.replay = Replay.read(Path(plan.replay)) if plan.replay is not None else None
        # The code, versions and threads that the run was computed with, one after another.
        self.environments: list[Environment] = [environment(plan.threads)]
        self.known_sharing: set[str] | None = None  # what clients share, as last reported
        self.releases = ReleaseCounter(plan.algorithm.Program, plan.privacy)
        self.infos, self.architectures = check_plan(self.plan, needs_clients=not self.launches)

    def execute(self) -> dict[str, Any]:
        """Run to the end and return the results; a finished run only returns them.

        Raises: UserError where another process is at work on the run.
        """
        with self.lock():
            results = self.folder.results
            return results if results is not None else self._execute_or_launch()

    def lock(self) -> AbstractContextManager[None]:
        """Keep other processes from working on this run."""
        return self.folder.lock()

    def _execute_or_launch(self) -> dict[str, Any]:
        if self.launches:
            self._refuse_holding_out()
            engine = self.engine_class(self.folder, **self.plan.engine_options)
            return engine.launch(self.watch)
        threads = torch.get_num_threads()
        torch.set_num_threads(self.plan.threads)
        try:
            return self._execute_here()
        finally:
            torch.set_num_threads(threads)

    def _refuse_holding_out(self) -> None:
        """Raise UserError where clients of other organisations would hold rows out."""
        algorithm = self.plan.algorithm
        if self.plan.safeguard and algorithm.holds_out():
            raise UserError(
                f"safeguard: with {type(algorithm).__name__} it holds rows of each client out of "
                "everything, which between organisations it cannot yet; leave safeguard out"
            )

    def _execute_here(self) -> dict[str, Any]:
        plan = self.plan
        self.watch("folder", path=self.folder.path, python=self.folder.config.get("python", False))
        if self.folder.journal.exists():  # the results were taken away from a finished run
            self.folder.journal.replace(self.folder.ledger)
        saved = self.last_checkpoint()
        if saved is not None:
            self._check_unchanged(saved)
        finished = saved["federation"]["finished"] if saved is not None else 0
        seconds = stopwatch(saved["seconds"] if saved is not None else 0.0)
        self.emit(
            "start" if saved is None else "resume",
            scenario=plan.name,
            algorithm=plan.method,
            seed=plan.seed,
            config=self.folder.config,
            round=finished,
            rounds=plan.training.rounds,
            clients={id: info.as_dict() for id, info in self.infos.items()},
            environment=self.environments[-1],
        )
        for text in [*plan.notices, *describe_scales(examples_of(plan.clients))]:
            self.emit("notice", text=text)
        local = None
        if plan.compares:
            local = self.local_baseline().values(saved["baseline"] if saved is not None else None)
        if not plan.safeguard:  # its fold replicas need copies of each model
            self.initial_models.begin_last_stage()
        self.emit("stage", text=plan.method, round=finished)
        engine = self.build_engine(self.folder.clients, plan.safeguard, plan.privacy)
        try:
            fed = self.federation(engine)
            self._restore(fed, saved)
            self.run_rounds(fed, seconds)
            results = self.conclude(fed, local)
        finally:
            engine.close()
            self.initial_models.release()
        results["seconds"] = round(seconds(), 3)
        results["commit"] = commit()
        results["environments"] = self.environments
        results["folder"] = str(self.folder.path)
        self._write_ledger(fed.ledger)
        self.folder.finish(results)
        self.emit("finish", seconds=results["seconds"])
        return results

    def _write_ledger(self, ledger: Ledger) -> None:
        """Make ledger.csv a table in order, and keep the rows as they came.

        A run that is stopped goes on from the end of the rows as they came.
        """
        ledger.append(self.folder.ledger)
        shutil.copyfile(self.folder.ledger, self.folder.journal)
        sync(self.folder.journal)
        ledger.write(self.folder.ledger)

    def local_baseline(self) -> LocalBaseline:
        """The training of every client alone that gains are measured against."""
        return LocalBaseline(
            plan=self.plan,
            architectures=self.architectures,
            folder=self.folder,
            build_engine=self.build_engine,
            emit=self.emit,
        )

    def build_engine(
        self, folder: Path, guarded: bool = False, privacy: Privacy | None = None
    ) -> Engine:
        """Make the engine that carries messages to the clients, with their states in `folder`."""
        plan = self.plan
        build = partial(
            build_runtime,
            algorithm=plan.algorithm,
            training=plan.training,
            seed=plan.seed,
            guarded=guarded,
            privacy=privacy,
        )
        settings = EngineSettings(
            max_loaded_clients=plan.max_loaded_clients,
            max_message_bytes=plan.federation.message_bytes or MAX_BYTES,
            tick=plan.federation.tick,
        )
        options = dict(plan.engine_options)
        if is_debugging() and "workers" in options:
            options["workers"] = 0  # an exception in another process would not arrive here
        clients = plan.clients
        if guarded and plan.algorithm.holds_out():
            clients = [hold_out(client, plan.seed) for client in clients]
        return self.engine_class(clients, build, folder, settings, **options)

    def federation(self, engine: Engine) -> Federation:
        """The server's view of the clients behind an engine."""
        plan = self.plan
        server = None
        if plan.server is not None:
            server = build_runtime(plan.server, plan.algorithm, plan.training, plan.seed)
        return Federation(
            engine,
            training=plan.training,
            config=plan.federation,
            seed=plan.seed,
            algorithm=plan.algorithm,
            privacy=plan.privacy,
            guarded=plan.safeguard,
            archive=Archive(self.folder.archive),
            replay=self.replay,
            server=server,
            log_event=self.emit,
            count_releases=self.releases.count if plan.privacy is not None else None,
        )

    # checkpoints

    def last_checkpoint(self) -> dict[str, Any] | None:
        """The server's state after the last saved round; None where the run has not begun."""
        return self.folder.last_checkpoint(self.emit)

    def _check_unchanged(self, saved: dict[str, Any]) -> None:
        """Raise UserError where settings, code, versions or threads are not those of a checkpoint.

        Other code, versions and threads are accepted where the user has said so, see `resume`.
        """
        if saved["config"] not in self._known_hashes():
            raise UserError(
                f"{self.folder.path / 'config.yaml'} was edited since the run began; put it back, "
                "or begin a new run with it in another folder"
            )
        now = self.environments[-1]
        difference = describe_changes(saved["environments"][-1], now)
        accepted = any(event.get("environment") == now for event in self.folder.events("accepted"))
        if difference and not accepted:
            raise UserError(
                f"{self.folder.path} was begun otherwise: {difference}. Its end would be another "
                "than without the stop: put it back, or go on nevertheless with "
                "`unalike resume --accept-changes`, from Python with accept_changes=True"
            )
        self.environments = list(saved["environments"])
        if difference:
            self.environments.append(now)

    def _known_hashes(self) -> set[str]:
        """Hashes of the settings, also with the numbers of rounds before a run was extended."""
        hashes = {self.config_hash}
        for event in self.folder.events("extended"):
            hashes.add(hash_config(with_rounds(self.folder.config, event["before"])))
        return hashes

    @cached_property
    def config_hash(self) -> str:
        """Hash of the settings that the run must go on with."""
        return hash_config(self.folder.config)

    def accept_changes(self) -> None:
        """Let this run go on with other code, versions or threads than it began with."""
        self.folder.record("accepted", environment=self.environments[-1])

    def _restore(self, fed: Federation, saved: dict[str, Any] | None) -> None:
        """Set the server and its clients back to a checkpoint, or to the start."""
        fed.archive.load(saved["federation"]["finished"] if saved is not None else 0)
        written = saved["ledger"] if saved is not None else None
        fed.ledger = Ledger.read(self.folder.ledger, written, fed.measurements)
        if saved is None:
            fed.engine.load(0, 0.0, [])
        else:
            fed.restore(saved["federation"])
        # Releases of the unfinished round count, too: it is done again with fresh noise.
        for event in self.folder.events("released"):
            client, count = event.get("client"), event.get("releases")
            if client in fed.released and isinstance(count, int):
                fed.released[client] = max(fed.released[client], count)
        if fed.server is not None and saved is not None:
            fed.server.restore(saved["own"])

    def save_checkpoint(self, fed: Federation, number: int, seconds: float) -> None:
        """Save clients first, then the server: the server's file is what makes the round count."""
        self.releases.count_repeated(fed)
        state = {
            "federation": fed.checkpoint(),
            "seconds": seconds,
            "config": self.config_hash,
            "environments": self.environments,
            "baseline": self.folder.hash_baseline(),
        }
        if fed.server is not None:
            state["own"] = fed.server.state()
        fed.engine.save(number)
        if isinstance(fed.archive, Archive):
            fed.archive.save(number)
        state["ledger"] = fed.ledger.append(self.folder.ledger)
        state["manifest"] = self.folder.checkpoint_manifest(number)
        self.folder.server.snapshot("server", state, number)

    # rounds

    def run_rounds(self, fed: Federation, seconds: Callable[[], float]) -> None:
        """Run all rounds that are not finished.

        A round that too few clients finished because some were away is over; clients that did
        their part keep what they learnt.
        """
        fed.report_sharing()
        while True:
            try:
                for finished in self.plan.algorithm.serve(fed):
                    self._end_round(fed, finished, seconds)
                return
            except QuorumError as error:
                is_last = len(fed.failed_rounds) + 1 == self.plan.training.rounds
                if not error.passing or fed.visits or is_last:
                    raise
                fed.failed_rounds.append(fed.round)
                self.emit("lost", round=fed.round, reason=str(error))
                self._end_round(fed, fed.round, seconds)

    def _end_round(self, fed: Federation, finished: int, seconds: Callable[[], float]) -> None:
        """Record a finished round, measure, and save a checkpoint where one is due."""
        self.initial_models.release()
        rounds = self.plan.training.rounds
        fed.finished = finished
        fed.report_sharing()
        self.emit(
            "round",
            round=finished,
            seconds=seconds(),
            clock=fed.clock,
            bytes=sent_bytes(fed.ledger),
        )
        is_last = finished == rounds and max(fed.visits.values(), default=0) <= finished
        # The end is measured when everything is done, see `conclude`.
        if not self.plan.algorithm.evaluates and not is_last:
            fed.evaluate()
        if finished % self.plan.checkpoint == 0 or finished == rounds:
            self.save_checkpoint(fed, finished, seconds())

    def conclude(self, fed: Federation, local: Metrics | None) -> dict[str, Any]:
        """Finish the method, measure all clients and return the results.

        Args:
            local: metrics of the local baseline by client; None where there is none.
        """
        # Lazy clients that are not measured do not get the final model either.
        with fed.measured() if fed.lazy else nullcontext():
            return self._conclude(fed, local)

    def _conclude(self, fed: Federation, local: Metrics | None) -> dict[str, Any]:
        plan = self.plan
        fed.require_clients()
        fed.round = max(fed.finished, plan.training.rounds)
        plan.algorithm.finish(fed)
        self.watch("sent", bytes=sent_bytes(fed.ledger))
        with fed.measured():
            metrics = dict(plan.algorithm.evaluate(fed))
            figures = plan.algorithm.figures(fed, metrics)
        self.emit(
            "evaluation",
            round=fed.round,
            when="end",
            who="together",
            values=metrics,
            figures=figures,
        )
        decisions = self._safeguard(fed) if plan.safeguard else None
        of_tasks = finish_tasks(fed)
        models = fed.call("describe", clients=fed.clients, quorum=0)
        self.releases.count_repeated(fed)
        fed.engine.save(fed.round + 1)
        return build_results(
            plan=plan,
            fed=fed,
            metrics=metrics,
            figures=figures,
            local=local,
            models=models,
            decisions=decisions,
            of_tasks=of_tasks,
        )

    def _safeguard(self, fed: Federation) -> Decisions:
        """Let each client keep the better of its federated and its local model, and measure it."""
        self.emit("stage", text="each client decides what to keep")
        rounds = range(1, self.plan.training.rounds + 1)
        attended = self.plan.federation.attended_rounds(list(fed.infos), self.plan.seed, rounds)
        kept = fed.call(
            "safeguard",
            clients=fed.clients,
            quorum=0,
            per_client={client: {"rounds": attended[client]} for client in fed.clients},
        )
        own = self.plan.algorithm.keeps_own_models()
        common = not own and all(info.tested_on == "common" for info in fed.infos.values())
        metrics = fed.call("evaluate", clients=fed.clients, quorum=0, common=common)
        return Decisions(kept=kept, metrics=metrics)

    # events

    def emit(self, event: str, **facts: Any) -> None:
        """Record an event in the run's folder and pass it to whoever watches."""
        if event == "released" and not self.releases.secret:
            return  # seeded noise can be drawn again: counting needs no record
        if event == "sharing":  # asked after every round: say it again only where it is more
            if set(facts["groups"]) == self.known_sharing:
                return
            self.known_sharing = set(facts["groups"])
        if event == "picture":
            write_figure(self.folder.path, **facts)
            return
        if event not in UNRECORDED:
            self.folder.record(event, **facts)
        self.watch(event, **facts)


def stopwatch(before: float) -> Callable[[], float]:
    """Return a function that gives the seconds since now, plus those of earlier attempts."""
    start = time.time()
    return lambda: before + time.time() - start


def sent_bytes(ledger: Ledger) -> dict[str, int]:
    """Bytes that all clients sent (`up`) and were sent (`down`), measurements left out."""
    return {direction: ledger.total(direction) for direction in ("up", "down")}
