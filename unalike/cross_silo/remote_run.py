"""A cross-silo run: the server's program where the engine's server is, and how to follow it.

Both sides share the run's folder. Knows folders, runs and transports; nothing of FLARE or Flower.
"""

import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unalike.base import events
from unalike.base.errors import UserError
from unalike.base.message import MAX_BYTES
from unalike.core.client import ClientInfo
from unalike.core.engine import Engine, Watch
from unalike.core.federation import Federation, FederationConfig, QuorumError
from unalike.core.privacy import Privacy
from unalike.engines.process import EngineError
from unalike.engines.remote import RemoteEngine, Transport, handshake
from unalike.runs.execution import Run
from unalike.runs.plan import RunPlan, plan_from_dict, plan_to_dict
from unalike.runs.run_folder import Folder
from unalike.scenarios.schema import client_ids

MAX_ATTEMPTS = 5  # starts of the server in a row without a finished round
ATTEMPT = "attempt.json"  # which start of the server is the current one


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
        self.about = {"name": config["name"], "algorithm": method, "seed": seed}
        self.transport = transport
        self.timeout = timeout
        self.id = run_id(folder)
        self.attempt = folder.read_json(ATTEMPT)
        infos, refused = handshake(transport, self.about, timeout)
        for client, reason in refused.items():
            folder.record("refused", client=client, reason=reason)
        if not infos:
            reasons = "; ".join(f"{client}: {reason}" for client, reason in refused.items())
            raise UserError(f"no client can take part: {reasons}")
        agreed = plan_from_dict(
            {
                "algorithm": config["algorithm"],
                "training": config["training"],
                "seed": seed,
                "guarded": config["safeguard"],
                "privacy": config.get("privacy"),
            }
        )
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

    def last_checkpoint(self) -> dict[str, Any] | None:
        """The state to resume from, for the clients that are connected now."""
        saved = super().last_checkpoint()
        if saved is not None:
            update_roster(saved["federation"], set(self.infos), self.emit)
        return saved

    def save_checkpoint(self, fed: Federation, number: int, seconds: float) -> None:
        """Write a checkpoint, unless another server has been started for this run."""
        if self.folder.read_json(ATTEMPT) != self.attempt:
            raise EngineError("another server has taken this run over")
        super().save_checkpoint(fed, number, seconds)

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


def update_roster(fed: dict[str, Any], connected: set[str], log: Callable[..., None]) -> None:
    """Change a saved federation so that it continues with the clients that are connected now.

    Args:
        fed: `Federation.memory()`, changed in place. Clients that left have failed for good;
            new ones take part from the next round on.
        connected: ids of clients.
        log: `log(event, **facts)`.
    """
    finished = fed["finished"]
    known = set(fed["released"])
    quarantined = {client for client, *_, lasting in fed["failures"] if lasting}
    for client in sorted(known - connected - quarantined):
        operation, reason, lasting = "join", "left the federation", True
        fed["failures"].append([client, operation, finished, reason, lasting])
        log(
            "failure",
            round=finished,
            client=client,
            operation=operation,
            reason=reason,
            lasting=lasting,
        )
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
    try:
        RemoteRun(folder, transport, timeout).execute()
    except (ValueError, QuorumError) as error:
        problem = {"problem": str(error), "user": isinstance(error, ValueError)}
        folder.write_json("problem.json", problem)
    except EngineError as error:
        folder.write_json("broken.json", {"attempt": attempt, "reason": str(error)})
        raise


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
    tail = events.EventTail(folder.path / events.FILE)

    def start() -> Callable[[], str | None]:
        # a server of an earlier attempt that is still running saves nothing any more
        folder.write_json(ATTEMPT, time.time_ns())
        return submit()

    end_reason = start()
    attempts = 0  # that ended since a round was finished
    while True:
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
