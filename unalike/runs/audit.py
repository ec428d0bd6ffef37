"""What each client would send and receive, to the byte, before it joins.

The whole run is rehearsed: the server's program with all its rounds, and the operations of each
client. An operation is executed once and answered the same when it is requested again with the
same names, shapes and numbers. The size of a message follows from these, so it is the run's.
"""

import inspect
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from unalike.base.errors import UserError, unknown_name
from unalike.base.message import Value, encoded_size, leaves
from unalike.core.client import Client
from unalike.core.engine import EngineSettings
from unalike.core.operations import is_protected, list_measurements
from unalike.core.privacy import Privacy
from unalike.core.runtime import build_runtime
from unalike.core.signatures import describe_leaves
from unalike.engines.host import Host
from unalike.engines.local import LocalEngine
from unalike.runs.execution import Run
from unalike.runs.plan import RunPlan, plan_to_dict
from unalike.runs.run_folder import Folder
from unalike.scenarios import load, load_mapping
from unalike.scenarios.client_config import load_client
from unalike.scenarios.site_policy import run_digest

MAX_PLAYED_CLIENTS = 64  # tried as the number of peers that a method needs at least


class RehearsalHost(Host):
    """Executes each operation once and records every message."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.results: dict[Any, dict[str, Any]] = {}
        # By client; equal messages of several rounds are one entry.
        self.messages: dict[str, dict[tuple, dict[str, Any]]] = {id: {} for id in self.clients}

    def handle(self, client: str, message: dict[str, Value]) -> dict[str, Any]:
        reply = super().handle(client, message)
        self._record(client, message, "down", message["body"], encoded_size(message))
        body = reply["body"] if "body" in reply else {"failure": reply["failure"]}
        self._record(client, message, "up", body, encoded_size(reply))
        return reply

    def _record(
        self, client: str, message: dict[str, Any], direction: str, body: Value, size: int
    ) -> None:
        """Count a message among those with the same operation, contents and size."""
        operation = message["operation"]
        contents = describe_leaves(body)
        runtime = self.wake(client)
        program = type(runtime.program)
        method = getattr(program, operation)
        entry = self.messages[client].setdefault(
            (operation, direction, repr(contents), size),
            {
                "operation": operation,
                "way": direction,
                "measuring": operation in list_measurements(program),
                "purpose": (inspect.getdoc(method) or "").partition("\n")[0],
                "sends": getattr(method, "sends", {}),
                "protected": is_protected(program, operation, runtime.privacy),
                "bytes": size,
                "rounds": {},
                "holds": [
                    {"name": path, "kind": kind, "shape": shape} for path, kind, shape in contents
                ],
            },
        )
        rounds = entry["rounds"]
        rounds[message["round"]] = rounds.get(message["round"], 0) + 1

    def _groups(self, messages: dict[str, dict[str, Value]]) -> list[list[str]]:
        """Execute clients one by one, so that each result can be used again."""
        return []

    def _run(self, client: str, message: dict[str, Value]) -> dict[str, Any]:
        key: list[Any] = [client, message["operation"]]
        for path, leaf in leaves(message["body"]):
            if isinstance(leaf, Tensor):
                key.append((path, leaf.dtype, leaf.shape))
            else:
                key.append((path, leaf))
        if tuple(key) not in self.results:
            self.results[tuple(key)] = super()._run(client, message)
        return dict(self.results[tuple(key)])


class Rehearsal(Run):
    """A run whose hosts record messages instead of computing everything."""

    def __init__(self, plan: RunPlan, shares_features: bool = True):
        super().__init__(plan)
        self.shares_features = shares_features
        self.hosts: list[RehearsalHost] = []

    def build_engine(
        self, folder: Path, guarded: bool = False, privacy: Privacy | None = None
    ) -> LocalEngine:
        plan = self.plan
        build = partial(
            build_runtime,
            algorithm=plan.algorithm,
            training=plan.training,
            seed=plan.seed,
            guarded=guarded,
            privacy=privacy,
            shares_features=self.shares_features,
        )
        settings = EngineSettings(tick=plan.federation.tick)
        engine: Any = LocalEngine(plan.clients, build, folder, settings)
        engine.shares_features = self.shares_features
        host = RehearsalHost(plan.clients, build, engine.store, plan.max_loaded_clients)
        engine.host = host
        self.hosts.append(host)
        return engine


def audit(
    plan: RunPlan,
    clients: Sequence[str] | None = None,
    with_baseline: bool = False,
    shares_features: bool = True,
) -> dict[str, Any]:
    """Rehearse a run and report what clients would send and receive. Nothing is kept of it.

    Args:
        plan: what to rehearse.
        clients: ids of those to report; all where it is None or empty.
        with_baseline: also report messages of the local baseline, if the plan has one.
        shares_features: whether measurements may answer with features; not between organisations.
    Returns: by client, what it announces (`card`), each kind of message with its contents, bytes
        and number in each round (`messages`), and the sums (`bytes`). A message also has the
        kinds of what its operation declares (`sends`) and whether the privacy mechanism is used
        on it (`protected`); with privacy, a client has what the whole run costs it (`privacy`,
        `sample_privacy`), and the whole report the fields `sample` and `central` of the method and
        what the models that are sent cost (`central_privacy`).
    Raises: UserError for a client that is not in the plan.
    """
    plan = replace(plan, local_baseline=plan.local_baseline and with_baseline, use_cache=False)
    rehearsal = Rehearsal(plan, shares_features)
    infos = rehearsal.infos
    for client in clients or ():
        if client not in infos:
            raise UserError(unknown_name("client", client, infos))
    with tempfile.TemporaryDirectory() as folder:
        rehearsal.folder = Folder.create(Path(folder) / "run", {"name": plan.name})
        results = rehearsal.execute()
    # The host of the local baseline, if there is one, was made first.
    *baseline, federated = rehearsal.hosts
    reports = {}
    for client in clients or infos:
        messages = list(federated.messages[client].values())
        for host in baseline:
            for message in host.messages[client].values():
                messages.append({**message, "measuring": True, "alone": True})
        reports[client] = {
            "card": infos[client].as_dict(),
            "messages": messages,
            "bytes": sum_bytes(messages),
            "privacy": results["clients"].get(client, {}).get("privacy"),
            "sample_privacy": results["clients"].get(client, {}).get("sample_privacy"),
        }
    return {
        "scenario": plan.name,
        "algorithm": plan.method,
        "seed": plan.seed,
        "rounds": plan.training.rounds,
        "engine": plan.engine,
        "privacy": plan.privacy.model_dump() if plan.privacy is not None else None,
        "sample": getattr(plan.algorithm, "sample", None),
        "central": getattr(plan.algorithm, "central", None),
        "central_privacy": results.get("central_privacy"),
        "clients": reports,
    }


def sum_bytes(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum bytes in each direction: of the method, of measurements, and of the method by round."""

    def total(direction: str, measuring: bool, round: int | None = None) -> int:
        count = 0
        for message in messages:
            if message["way"] == direction and message["measuring"] is measuring:
                rounds = message["rounds"]
                times = sum(rounds.values()) if round is None else rounds.get(round, 0)
                count += message["bytes"] * times
        return count

    rounds: set[int] = set()
    for message in messages:
        if not message["measuring"]:
            rounds |= message["rounds"].keys()
    return {
        "up": total("up", False),
        "down": total("down", False),
        "measuring": {"up": total("up", True), "down": total("down", True)},
        "by_round": {
            str(number): {"up": total("up", False, number), "down": total("down", False, number)}
            for number in sorted(rounds)
        },
    }


def audit_client(
    plan: RunPlan, peers: int | None = None, with_baseline: bool = False
) -> dict[str, Any]:
    """Audit one client that knows none of its peers: copies of it stand for them.

    Args:
        plan: with that client alone.
        peers: how many take part besides it; by default as few as the method needs.
        with_baseline: as for `audit`.
    """
    (client,) = plan.clients
    public_rows = len(client.public) if client.public is not None else 0
    if peers is None:
        counts = range(1, MAX_PLAYED_CLIENTS + 1)
        fits = (n for n in counts if not plan.algorithm.check(n + 1, public_rows))
        peers = next(fits, 1)
    copies = [replace(client, id=f"{client.id}'{i}") for i in range(1, peers + 1)]
    plan = replace(plan, clients=[client, *copies])
    return audit(plan, [client.id], with_baseline, shares_features=False)


def audit_client_file(
    file: Path,
    run: str | None,
    algorithm: str | None,
    settings: list[str] | None,
    engine: str | None = None,
) -> dict[str, Any]:
    """Audit the client that a client.yaml describes, before it joins a run.

    Args:
        file: the client.yaml.
        run: the server's scenario, a file without clients; `engine.clients` in it is the number
            of participants, by default as few as the method needs.
        algorithm: name of the method, where there is no such file.
        settings: `key=value` of what the server sets.
        engine: that the server runs it with, where its file does not say; some methods have other
            defaults where a message takes seconds. Default: flare.
    """
    if run is None and algorithm is None:
        raise UserError(
            f"{file} describes a client: say what it would take part in, --algorithm NAME with "
            "--set of what the server sets, or --run FILE, the scenario that its server runs"
        )
    described_run = load_mapping(run) if run is not None else {"name": file.stem}
    for key in ("clients", "data", "public", "server"):
        described_run.pop(key, None)
    scenario, method = load(
        run or str(file),
        algorithm,
        settings,
        mapping={"engine": "flare", **described_run},
        engine=engine,
    )
    about = {"name": scenario.name, "algorithm": scenario.algorithm.name, "seed": scenario.seed}
    client: Client = load_client(file, about)
    count = scenario.engine.options.get("clients")
    plan = RunPlan(
        algorithm=method,
        clients=[client],
        training=scenario.training,
        federation=scenario.federation,
        name=client.id,
        method=scenario.algorithm.name,
        seed=scenario.seed,
        privacy=scenario.privacy,
        safeguard=scenario.safeguard,
    )
    peers = None if count is None else count - 1
    report = audit_client(plan, peers, with_baseline=scenario.alone)
    terms = plan_to_dict(
        method,
        scenario.algorithm.name,
        scenario.training,
        scenario.seed,
        scenario.safeguard,
        scenario.privacy,
    )
    return report | {"engine": scenario.engine.name, "digest": run_digest(terms)}
