"""A cross-silo run: the server's program where the engine's server is, and how to follow it.

Both sides share the run's folder. Knows folders, runs and transports; nothing of FLARE or Flower.
"""

import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from traceback import walk_tb
from typing import Any

from unalike.base import events
from unalike.base.errors import RunError, UserError, describe_error
from unalike.base.message import MAX_BYTES, encode
from unalike.base.tracebacks import format_traceback, is_debugging
from unalike.core.admission import find_misfits
from unalike.core.client import ClientInfo
from unalike.core.engine import Engine, Watch
from unalike.core.federation import Federation, FederationConfig, QuorumError
from unalike.core.participation import Failure, one_line
from unalike.core.privacy import Privacy
from unalike.cross_silo.versions import installed_versions, version_differences
from unalike.engines.process import EngineError
from unalike.engines.remote import RemoteEngine, Transport, await_reply, handshake
from unalike.runs.execution import Run
from unalike.runs.local_baseline import Metrics
from unalike.runs.plan import RunPlan, plan_from_dict, plan_to_dict
from unalike.runs.run_folder import Folder
from unalike.scenarios.schema import client_ids
from unalike.scenarios.site_policy import run_digest

MAX_ATTEMPTS = 5  # starts of the server in a row without a finished round
ATTEMPT = "attempt.json"  # which start of the server is the current one
FOLLOWER = "follower.json"  # whether somebody wants the run: touched while it is followed
FOLLOWER_TIMEOUT = 60.0  # seconds without a touch until nobody does
# How engines begin the reason of a failure where a client was away, or too slow.
ABSENCES = ("left the federation", "could not be reached", "did not answer", "its SuperNode is not")
FAREWELL_TIMEOUT = 10.0  # seconds clients have to take note of the run's end


class RemoteRun(Run):
    """A run whose clients are at the other end of a transport.

    Args:
        folder: has the run's config.
        transport: to the clients.
        timeout: seconds until a client that does not answer has failed.
    """

    def __init__(self, folder: Folder, transport: Transport, timeout: float):
        config = folder.config
        method = config["algorithm"]["name"]
        seed = config["seed"]
        versions = installed_versions()
        self.about = {
            "name": config["name"],
            "algorithm": method,
            "seed": seed,
            "versions": versions,
        }
        self.transport = transport
        self.timeout = timeout
        self.id = run_id(folder)
        self.culprits: list[Failure] = []  # clients at whose replies the server's program failed
        self.attempt = folder.read_json(ATTEMPT)
        agreed = plan_from_dict(
            {
                "algorithm": config["algorithm"],
                "training": config["training"],
                "seed": seed,
                "guarded": config["safeguard"],
                "privacy": config.get("privacy"),
            }
        )
        installed: dict[str, dict[str, str]] = {}
        infos, refused = handshake(transport, self.about, timeout, installed)
        folder.record("versions", server=versions, clients=installed)
        terms = plan_to_dict(
            agreed["algorithm"],
            method,
            agreed["training"],
            seed,
            agreed["guarded"],
            agreed["privacy"],
        )
        for client, difference in version_differences(versions, installed).items():
            folder.record("notice", text=f"{client} has {difference}: results may differ")
        served = agreed["algorithm"]
        for client, reason in find_misfits(infos, served, served.needs_public).items():
            refused[client] = f"it {reason}"
            del infos[client]
        for client, reason in refused.items():
            folder.record("refused", client=client, reason=reason)
            self.tell(client, reason)
        # what each site's audit log has, too: who took part in which run
        folder.record("admitted", digest=run_digest(terms), clients=sorted(infos))
        if not infos:
            reasons = "; ".join(f"{client}: {reason}" for client, reason in refused.items())
            raise UserError(f"no client can take part: {reasons}")
        plan = RunPlan(
            algorithm=agreed["algorithm"],
            clients=[],
            training=agreed["training"],
            federation=FederationConfig(**config["federation"]),
            name=config["name"],
            method=method,
            seed=seed,
            replay=config.get("replay"),
            local_baseline=config["alone"],
            safeguard=agreed["guarded"],
            privacy=agreed["privacy"],
            checkpoint=config.get("checkpoint", 1),
            infos=order_clients(infos, config),
        )
        super().__init__(plan, folder)

    def lock(self) -> AbstractContextManager[None]:
        """No lock: the process that follows the run holds it, and starts one server at a time."""
        return nullcontext()

    def last_checkpoint(self) -> dict[str, Any] | None:
        """The state to resume from, for the clients that are connected now."""
        saved = super().last_checkpoint()
        if saved is not None:
            update_roster(saved["federation"], set(self.infos), self.emit)
        return saved

    def save_checkpoint(self, fed: Federation, number: int, seconds: float) -> None:
        """Write a checkpoint, unless another server was started, or nobody wants the run."""
        if self.folder.read_json(ATTEMPT) != self.attempt:
            raise EngineError("another server has taken this run over")
        if not is_wanted(self.folder):
            raise EngineError("the program that wanted this run has ended")
        super().save_checkpoint(fed, number, seconds)

    def run_rounds(self, fed: Federation, seconds: Callable[[], float]) -> None:
        """Run all rounds that are not finished, without clients at whose replies they break."""
        self._without_culprits(fed, lambda: super(RemoteRun, self).run_rounds(fed, seconds))

    def conclude(self, fed: Federation, local: Metrics | None) -> dict[str, Any]:
        """Finish the method and measure, without clients at whose replies that breaks."""
        return self._without_culprits(fed, lambda: super(RemoteRun, self).conclude(fed, local))

    def _without_culprits(self, fed: Federation, program: Callable[[], Any]) -> Any:
        """Run a part of the server's program; begin it again, without a client that broke it.

        Replies are checked before the program gets them, so this happens only where a check is
        missing. Then one client shall not end the run for all.
        """
        while True:
            try:
                return program()
            except (RunError, UserError):
                raise
            except Exception as error:
                client = find_culprit(error, fed.clients)
                if client is None or is_debugging():
                    raise
                reason = f"the server's program failed at what it sent: {describe_error(error)}"
                failure = Failure(
                    client,
                    operation="reply",
                    round=fed.round,
                    reason=one_line(reason),
                    traceback=format_traceback(error),
                )
                self.culprits.append(failure)
                self._go_back(fed)

    def _go_back(self, fed: Federation) -> None:
        """Go back to the last checkpoint, as a run that is resumed does, without the culprits."""
        fed.__post_init__()
        self._restore(fed, self.last_checkpoint())
        for failure in self.culprits:
            fed.ill.pop(failure.client, None)
            fed.fail(failure)

    def emit(self, event: str, **facts: Any) -> None:
        """Record an event; a client that has failed for good is told why."""
        super().emit(event, **facts)
        if event == "failure" and facts["lasting"] and facts["client"] in self.infos:
            self.tell(facts["client"], facts["reason"])

    def execute(self) -> dict[str, Any]:
        """Run to the end, tell the clients, and return the results."""
        try:
            results = super().execute()
        except (ValueError, QuorumError) as error:
            self._tell_all(finished=False, reason=str(error))
            raise
        self._tell_all(finished=True, reason="")
        return results

    def tell(self, client: str, reason: str, finished: bool = False) -> "Future[bytes]":
        """Tell a client that the run has ended for it; does not wait until it took note."""
        data = bytes(encode({"finished": finished, "reason": reason}))
        return self.transport.request(
            client, "finish", data, self.id, "clients", min(self.timeout, FAREWELL_TIMEOUT)
        )

    def _tell_all(self, finished: bool, reason: str) -> None:
        answers = [self.tell(client, reason, finished) for client in self.infos]
        with suppress(EngineError):
            for answer in answers:
                await_reply(answer, self.transport.check)

    def build_engine(
        self, folder: Path, guarded: bool = False, privacy: Privacy | None = None
    ) -> Engine:
        """An engine to the clients; the name of `folder` says which of their states."""
        plan = self.plan
        terms = plan_to_dict(
            plan.algorithm, plan.method, plan.training, plan.seed, guarded, privacy
        )
        return RemoteEngine(
            self.transport,
            run=self.id,
            place=folder.name,
            infos=self.infos,
            begin={"about": self.about, "terms": terms},
            limit=plan.federation.message_bytes or MAX_BYTES,
            timeout=self.timeout,
        )


def find_culprit(error: BaseException, clients: list[str]) -> str | None:
    """The client whose reply the server's program was at when it failed; None: not known.

    It is the one that the innermost function holds in a variable, if it holds only one.
    """
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        values = [value for value in frame.f_locals.values() if isinstance(value, str)]
        named = {value for value in values if value in clients}
        if len(named) == 1:
            return named.pop()
    return None


def update_roster(fed: dict[str, Any], connected: set[str], log: Callable[..., None]) -> None:
    """Change a saved federation so that it continues with the clients that are connected now.

    Args:
        fed: `Federation.memory()`, changed in place. Clients that left have failed until they are
            back; they and new ones take part from the next round on.
        connected: ids of clients.
        log: `log(event, **facts)`.
    """
    finished = fed["finished"]
    known = set(fed["released"])
    for client in sorted(known - connected - set(fed["quarantined"])):
        operation, reason, lasting = "join", "left the federation", True
        fed["failures"].append([client, operation, finished, reason, lasting])
        fed["quarantined"].append(client)
        fed["ill"].pop(client, None)
        log(
            "failure",
            round=finished,
            client=client,
            operation=operation,
            reason=reason,
            lasting=lasting,
        )
    returned: set[str] = set()
    for failure in fed["failures"]:
        client, _, _, reason, lasting = failure
        if lasting and reason.startswith(ABSENCES) and client in connected:
            failure[-1] = False
            fed.get("ill", {}).pop(client, None)
            returned.add(client)
    for client in sorted(returned):
        if client in fed.get("quarantined", []):
            fed["quarantined"].remove(client)
        log("joined", round=finished, client=client)
    fed["pending"] = [reply for reply in fed["pending"] if reply["client"] in connected]
    fed["flying"] = [entry for entry in fed["flying"] if entry[1] in connected]
    fed["waiting"] = [client for client in fed["waiting"] if client in connected]
    asynchronous = bool(fed["visits"])
    for client in sorted(connected - known):
        log("joined", round=finished, client=client)
        fed["released"][client] = 0
        if asynchronous:
            fed["visits"][client] = finished
            fed["waiting"].append(client)


def order_clients(infos: dict[str, ClientInfo], config: dict[str, Any]) -> dict[str, ClientInfo]:
    """Clients in the scenario's order, then others by name, whoever connected first."""
    position = {id: i for i, id in enumerate(client_ids(config))}
    ordered = sorted(infos, key=lambda id: (position.get(id, len(position)), id))
    return {id: infos[id] for id in ordered}


def serve(path: Path, transport: Transport, timeout: float) -> None:
    """The server's program: carry a run out to its end.

    Problems that a new attempt would meet again (a mistake of the user's, too few clients) are
    written to problem.json. Where the transport broke, the reason is written to broken.json at
    once: an engine may take a while to notice that its server has ended.
    """
    folder = Folder(path)
    attempt = folder.read_json(ATTEMPT)
    if not is_wanted(folder):  # an engine may start it long after it was submitted
        folder.record("unwanted", reason="the program that submitted this run has ended")
        return
    try:
        RemoteRun(folder, transport, timeout).execute()
    except (ValueError, QuorumError) as error:
        problem = {"problem": str(error), "user": isinstance(error, ValueError)}
        folder.write_json("problem.json", problem)
    except EngineError as error:
        folder.write_json("broken.json", {"attempt": attempt, "reason": str(error)})
        raise


def is_wanted(folder: Folder) -> bool:
    """Whether the program that follows a run is alive; True where nobody has followed it yet."""
    path = folder.path / FOLLOWER
    try:
        age = time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return True
    follower = folder.read_json(FOLLOWER)
    return not follower["ended"] and age < FOLLOWER_TIMEOUT


def failure_reason(folder: Folder) -> str | None:
    """Why the current server has ended, where it wrote that down; else None."""
    report = folder.read_json("broken.json")
    if report is not None and report["attempt"] == folder.read_json(ATTEMPT):
        return report["reason"]
    return None


def run_id(folder: Folder) -> str:
    """What clients know the run by: another for every run, the same when it is resumed."""
    known = folder.read_json("run.json")
    if known is None:
        when = time.strftime("%Y%m%d-%H%M%S")
        known = {"run": f"{folder.config['name']}-{when}-{secrets.token_hex(3)}"}
        folder.write_json("run.json", known)
    return str(known["run"])


def follow(
    folder: Folder, watch: Watch, submit: Callable[[], Callable[[], str | None]], every: float = 0.3
) -> dict[str, Any]:
    """Have a run carried out elsewhere, pass its events on, and return its results.

    Args:
        watch: gets the run's events.
        submit: starts the server's program and returns a function that says why it ended, None
            while it is running. Where it ended without results it is started again, and continues
            from the last checkpoint.
        every: seconds between looks at the folder.
    Raises: UserError for a problem of the user's, RuntimeError for too few clients, EngineError
        where MAX_ATTEMPTS starts in a row finished no round.
    """
    run_id(folder)
    (folder.path / "problem.json").unlink(missing_ok=True)
    watch("folder", path=folder.path)
    try:
        return _follow(folder, watch, submit, every)
    finally:
        folder.write_json(FOLLOWER, {"pid": os.getpid(), "ended": True})


def _follow(
    folder: Folder, watch: Watch, submit: Callable[[], Callable[[], str | None]], every: float
) -> dict[str, Any]:
    tail = events.EventTail(folder.path / events.FILE)

    def start() -> Callable[[], str | None]:
        # a server of an earlier attempt that is still running saves nothing any more
        folder.write_json(ATTEMPT, time.time_ns())
        folder.write_json(FOLLOWER, {"pid": os.getpid(), "ended": False})
        return submit()

    end_reason = start()
    attempts = 0  # that ended since a round was finished
    while True:
        (folder.path / FOLLOWER).touch()
        reason = end_reason()
        new_events = tail.read()
        for event in new_events:
            pass_on(event, watch)
        results = folder.results
        if results is not None:
            return results
        problem = folder.read_json("problem.json")
        if problem is not None:
            error = UserError if problem["user"] else RuntimeError
            raise error(problem["problem"])
        if any(event["event"] == "round" for event in new_events):
            attempts = 0
        if reason is not None:
            attempts += 1
            folder.record("restart", reason=reason)
            if attempts >= MAX_ATTEMPTS:
                raise EngineError(
                    f"the run ended {attempts} times without finishing a round: {reason}; "
                    "resume it when that is mended"
                )
            end_reason = start()
        time.sleep(every)


def pass_on(event: dict[str, Any], watch: Watch) -> None:
    """Give an event that was read from a file to `watch`."""
    facts = {key: fact for key, fact in event.items() if key not in ("event", "time")}
    watch(event["event"], **facts)
    if event["event"] in ("start", "resume"):
        watch("stage", text=event["algorithm"], round=event["round"])
