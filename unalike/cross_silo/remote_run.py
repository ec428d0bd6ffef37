"""A run between organisations: the server's program as it goes where an engine's server is, and how it is followed from here.

Knows folders, runs and lines; nothing of a transport.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unalike.base.errors import UserError
from unalike.base.message import MAX_BYTES
from unalike.core.client import ClientInfo
from unalike.core.engine import Engine, Watch
from unalike.core.federation import Federation, FederationConfig, QuorumError
from unalike.core.privacy import Privacy
from unalike.engines.process import EngineError
from unalike.engines.remote import Line, RemoteEngine, greet, members
from unalike.runs.execution import Run
from unalike.runs.plan import RunPlan, plan_from_dict, plan_to_dict
from unalike.runs.run_folder import Folder

ATTEMPTS = 5  # in a row that finish no round, until it is given up


class RemoteRun(Run):
    """A run whose clients are at the other end of a line. All it needs is in its folder."""

    def __init__(self, folder: Folder, line: Line, timeout: float):
        config = folder.config
        method, seed, privacy = config["algorithm"]["name"], config["seed"], config.get("privacy")
        self.about = {"name": config["name"], "algorithm": method, "seed": seed}
        self.line, self.timeout, self.id, self.attempt = (
            line,
            timeout,
            identity(folder),
            folder.read_json("attempt.json"),
        )
        infos, refused = greet(line, self.about, timeout)
        for client, why in refused.items():
            folder.record("refused", client=client, reason=why)
        if not infos:
            raise UserError(
                "no client can take part: "
                + "; ".join(f"{client}: {why}" for client, why in refused.items())
            )
        made = plan_from_dict(
            {
                "algorithm": config["algorithm"],
                "training": config["training"],
                "seed": seed,
                "guarded": config["safeguard"],
                "privacy": privacy,
            }
        )
        plan = RunPlan(
            algorithm=made["algorithm"],
            clients=[],
            training=made["training"],
            federation=FederationConfig(**config["federation"]),
            name=config["name"],
            method=method,
            seed=seed,
            replay=config.get("replay"),
            local_baseline=config["alone"],
            safeguard=made["guarded"],
            privacy=made["privacy"],
            checkpoint=config.get("checkpoint", 1),
            infos=ordered(infos, config),
        )
        super().__init__(plan, folder)

    def last_checkpoint(self) -> dict[str, Any] | None:
        saved = super().last_checkpoint()
        return present(saved, set(self.infos), self.emit) if saved is not None else None

    def save_checkpoint(self, fed: Federation, number: int, seconds: float) -> None:
        if self.folder.read_json("attempt.json") != self.attempt:
            raise EngineError("another server has taken this run over")
        super().save_checkpoint(fed, number, seconds)

    def build_engine(
        self, folder: Path, guarded: bool = False, privacy: Privacy | None = None
    ) -> Engine:
        plan = self.plan
        told = plan_to_dict(plan.algorithm, plan.method, plan.training, plan.seed, guarded, privacy)
        return RemoteEngine(
            self.line,
            self.id,
            folder.name,
            self.infos,
            {"about": self.about, "terms": told},
            plan.federation.message_bytes or MAX_BYTES,
            self.timeout,
        )


def present(saved: dict[str, Any], here: set[str], tell: Callable[..., None]) -> dict[str, Any]:
    """What was saved, for those who are here now: who left has failed, who came since is in from here on."""
    fed = saved["federation"]
    finished, known = fed["finished"], set(fed["released"])
    quarantined = {client for client, *_, lasting in fed["failures"] if lasting}
    left = [
        [client, "join", finished, "left the federation", True]
        for client in sorted(known - here - quarantined)
    ]
    for client, operation, round, reason, lasting in left:
        tell(
            "failure",
            round=round,
            client=client,
            operation=operation,
            reason=reason,
            lasting=lasting,
        )
    came = sorted(here - known)
    for client in came:
        tell("joined", round=finished, client=client)
    fed |= {
        "failures": fed["failures"] + left,
        "pending": [p for p in fed["pending"] if p["client"] in here],
        "flying": [entry for entry in fed["flying"] if entry[1] in here],
        "released": fed["released"] | {c: 0 for c in came},
        "waiting": [c for c in fed["waiting"] if c in here] + (came if fed["visits"] else []),
        "visits": fed["visits"] | ({c: finished for c in came} if fed["visits"] else {}),
    }
    return saved


def ordered(infos: dict[str, ClientInfo], config: dict[str, Any]) -> dict[str, ClientInfo]:
    """Clients as the scenario has them, then others by name: whoever came first over the wire plays no part."""
    ids = members(config)
    return {
        id: infos[id]
        for id in sorted(infos, key=lambda id: (ids.index(id) if id in ids else len(ids), id))
    }


def serve(folder: Path, line: Line, timeout: float) -> None:
    """The server's program: a run to its end. A mistake of the user's or too few clients is left in the folder: it is not tried again.
    So is why the line broke, since an engine may take a while to see that the program is over."""
    there = Folder(folder)
    attempt = there.read_json("attempt.json")
    try:
        RemoteRun(there, line, timeout).execute()
    except (ValueError, QuorumError) as error:
        there.write_json(
            "problem.json", {"problem": str(error), "user": isinstance(error, ValueError)}
        )
    except EngineError as error:
        there.write_json("broken.json", {"attempt": attempt, "reason": str(error)})
        raise


def broken(folder: Folder) -> str | None:
    """Why the server's program that was last started is over, if it said so."""
    told = folder.read_json("broken.json")
    return (
        told["reason"]
        if told is not None and told["attempt"] == folder.read_json("attempt.json")
        else None
    )


def identity(folder: Folder) -> str:
    """What clients know the run by: the same when it is resumed, another for every run."""
    if (known := folder.read_json("run.json")) is None:
        known = {
            "run": f"{folder.config['name']}-{time.strftime('%Y%m%d-%H%M%S')}-{hex(hash((str(folder.path), time.time_ns())))[-6:]}"
        }
        folder.write_json("run.json", known)
    return str(known["run"])


def follow(
    folder: Folder, watch: Watch, submit: Callable[[], Callable[[], str | None]], every: float = 0.3
) -> dict[str, Any]:
    """Results of a run that goes on elsewhere, its events told here. `submit` starts it and returns what tells how it ended, None while
    it goes on; ended without results, it is started again, and goes on from its last checkpoint."""
    identity(folder)
    (folder.path / "problem.json").unlink(missing_ok=True)
    watch("folder", path=folder.path)
    events = Tail(folder.path / "events.jsonl")

    def start() -> Callable[[], str | None]:
        folder.write_json(
            "attempt.json", time.time_ns()
        )  # a server of before that still goes on saves nothing any more
        return submit()

    ended, idle = start(), 0
    while True:
        reason = ended()
        told = events.read()
        for event in told:
            watch(
                event["event"],
                **{key: value for key, value in event.items() if key not in ("event", "time")},
            )
            if event["event"] in ("start", "resume"):
                watch("stage", text=event["algorithm"], round=event["round"])
        if (done := folder.results) is not None:
            return done
        if (problem := folder.read_json("problem.json")) is not None:
            raise (
                UserError(problem["problem"])
                if problem["user"]
                else RuntimeError(problem["problem"])
            )
        idle = 0 if any(event["event"] == "round" for event in told) else idle
        if reason is not None:
            idle += 1
            folder.record("restart", reason=reason)  # told by the next look
            if idle >= ATTEMPTS:
                raise EngineError(
                    f"the run ended {idle} times without finishing a round: {reason}; resume it when that is mended"
                )
            ended = start()
        time.sleep(every)


class Tail:
    """New lines of a file that another process writes."""

    def __init__(self, path: Path):
        self.path, self.at = path, path.stat().st_size if path.exists() else 0

    def read(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self.at)
            whole, newline, _ = file.read().rpartition(b"\n")
        self.at += len(whole) + len(newline)
        return [json.loads(line) for line in whole.splitlines() if line.startswith(b"{")]
