"""What each client would send and be sent, to the byte, before it joins. Knows methods only by what all of them share.

The whole run is rehearsed: the server's program with all its rounds, and each client's operations, each done once and answered the same
when it is asked again with the same names, shapes and numbers. A message's size follows from these (message.py), so it is the run's.
"""

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from unalike.base.errors import UserError, unknown_name
from unalike.base.ledger import MEASUREMENTS
from unalike.base.message import Value, encoded_size, leaves
from unalike.core.algorithm import Algorithm
from unalike.core.client import Client
from unalike.core.engine import EngineSettings
from unalike.core.federation import FederationConfig
from unalike.core.privacy import Privacy
from unalike.core.runtime import build_runtime
from unalike.core.signatures import described
from unalike.engines.host import Host
from unalike.engines.local import LocalEngine
from unalike.runs.run import Run
from unalike.runs.run_folder import Folder
from unalike.scenarios import load, load_mapping
from unalike.scenarios.client_config import load_client
from unalike.training.loop import Training


class Rehearsing(Host):
    """Does each operation once, and writes down what passes."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.done: dict[Any, dict[str, Any]] = {}
        self.passed: dict[str, dict[tuple, dict[str, Any]]] = {
            client: {} for client in self.clients
        }

    def handle(self, client: str, message: dict[str, Value]) -> dict[str, Any]:
        reply = super().handle(client, message)
        self.note(client, message, "down", message["body"], encoded_size(message))
        self.note(
            client,
            message,
            "up",
            reply["body"] if "body" in reply else {"failure": reply["failure"]},
            encoded_size(reply),
        )
        return reply

    def note(self, client: str, message: dict[str, Any], way: str, body: Value, bytes: int) -> None:
        form = described(body)
        entry = self.passed[client].setdefault(
            (message["operation"], way, repr(form), bytes),
            {
                "operation": message["operation"],
                "way": way,
                "measuring": message["operation"] in MEASUREMENTS,
                "bytes": bytes,
                "rounds": {},
                "holds": [
                    {"name": path, "kind": kind, "shape": shape} for path, kind, shape in form
                ],
            },
        )
        entry["rounds"][message["round"]] = entry["rounds"].get(message["round"], 0) + 1

    def _groups(self, messages: dict[str, dict[str, Value]]) -> list[list[str]]:
        return []

    def _run(self, client: str, message: dict[str, Value]) -> dict[str, Any]:
        key = (
            client,
            message["operation"],
            *(
                (path, leaf.dtype, leaf.shape) if isinstance(leaf, Tensor) else (path, leaf)
                for path, leaf in leaves(message["body"])
            ),
        )
        if key not in self.done:
            self.done[key] = super()._run(client, message)
        return dict(self.done[key])


def audit(made: Run, clients: list[str] | None = None, comparing: bool = False) -> dict[str, Any]:
    """Of these clients of a run that is ready to go, or of all: what each tells at the door, every kind of message with what it holds, its
    bytes and how many there are in each round, and the bytes in all; `comparing`: also what everyone does alone, if the run is to compare.
    Nothing is left of the rehearsal."""
    for client in clients or ():
        if client not in made.infos:
            raise UserError(unknown_name("client", client, made.infos))
    hosts: list[Rehearsing] = []

    def engine(place: Path, guarded: bool = False, privacy: Privacy | None = None) -> LocalEngine:
        build = partial(
            build_runtime,
            algorithm=made.algorithm,
            training=made.training,
            seed=made.seed,
            guarded=guarded,
            privacy=privacy,
        )
        settings = EngineSettings(tick=made.federation.tick)
        carrier = LocalEngine(made.clients, build, place, settings)
        carrier.host = Rehearsing(made.clients, build, carrier.store, made.alive)
        hosts.append(carrier.host)
        return carrier

    with tempfile.TemporaryDirectory() as folder:
        made.folder, made.engine = Folder.create(Path(folder) / "run", {"name": made.name}), engine  # type: ignore
        made.alone = made.alone and comparing
        made.go()
    *alone, together = hosts  # that of everyone alone, if any, was made first
    told = {}
    for client, entries in together.passed.items():
        own = [
            *entries.values(),
            *(
                {**each, "measuring": True, "alone": True}
                for host in alone
                for each in host.passed[client].values()
            ),
        ]
        if not clients or client in clients:
            told[client] = {
                "card": made.infos[client].as_dict(),
                "messages": own,
                "bytes": totals(own),
            }
    return {
        "scenario": made.name,
        "algorithm": made.method,
        "seed": made.seed,
        "rounds": made.training.rounds,
        "clients": told,
    }


def totals(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Bytes each way, of the method and of measuring, and of the method by round."""

    def total(way: str, measuring: bool, round: int | None = None) -> int:
        return sum(
            each["bytes"] * count
            for each in messages
            if each["way"] == way and each["measuring"] is measuring
            for number, count in each["rounds"].items()
            if round in (None, number)
        )

    rounds = sorted(
        {number for each in messages if not each["measuring"] for number in each["rounds"]}
    )
    return {
        "up": total("up", False),
        "down": total("down", False),
        "measuring": {way: total(way, True) for way in ("up", "down")},
        "by_round": {
            str(number): {way: total(way, False, number) for way in ("up", "down")}
            for number in rounds
        },
    }


def alone(
    client: Client,
    algorithm: Algorithm,
    training: Training,
    federation: FederationConfig | None = None,
    *,
    method: str,
    others: int | None = None,
    seed: int = 0,
    privacy: Privacy | None = None,
    safeguard: bool = False,
    comparing: bool = False,
) -> dict[str, Any]:
    """The audit of one client that knows none of the others: they are played by copies of it, as few as the method does with."""
    rows = len(client.public) if client.public is not None else 0
    count = (
        others
        if others is not None
        else next((n for n in range(1, 65) if not algorithm.check(n + 1, rows)), 1)
    )
    copies = [client, *(replace(client, id=f"{client.id}'{i}") for i in range(1, count + 1))]
    made = Run(
        None,
        algorithm,
        copies,
        training,
        federation or FederationConfig(),
        name=client.id,
        method=method,
        seed=seed,
        privacy=privacy,
        safeguard=safeguard,
    )
    return audit(made, [client.id], comparing)


def of_member(
    file: Path, run: str | None, algorithm: str | None, settings: list[str] | None
) -> dict[str, Any]:
    """The audit of the client that a file describes, before it joins a run: that of a file without clients, as its server has it, or of a
    method with these settings. `engine.clients` is how many take part; if not said, as few as the method does with."""
    if run is None and algorithm is None:
        raise UserError(
            f"{file} describes a client: say what it would take part in, --algorithm NAME with --set of what the server sets, "
            "or --run FILE, the scenario that its server runs"
        )
    told = load_mapping(run) if run is not None else {"name": file.stem}
    others = {
        key: value
        for key, value in told.items()
        if key not in ("clients", "data", "public", "server")
    }
    scenario, method = load(
        run or str(file), algorithm, settings, mapping={"engine": "flare", **others}
    )
    about = {"name": scenario.name, "algorithm": scenario.algorithm.name, "seed": scenario.seed}
    count = scenario.engine.options.get("clients")
    return alone(
        load_client(file, about),
        method,
        scenario.training,
        scenario.federation,
        method=scenario.algorithm.name,
        seed=scenario.seed,
        others=None if count is None else count - 1,
        privacy=scenario.privacy,
        safeguard=scenario.safeguard,
        comparing=scenario.alone,
    )
