"""A client's end of a cross-silo engine: bytes in, bytes out. Knows nothing of the transport.

A server may request `hello`, `begin`, `call` and `save`. States stay in a folder beside the
client's file. So does the reason of a failure: it is written to `incidents.log` there and to
stderr, and the server gets one sentence with the incident's number. Only the text of a `Refusal`
reaches the server.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from unalike.base.errors import Refusal
from unalike.base.message import MAX_BYTES, MessageError, decode, encode, require_dict
from unalike.core.client import VERSION, Client
from unalike.core.incidents import Incident
from unalike.core.runtime import build_runtime
from unalike.engines.host import Host
from unalike.engines.store import Store, quote
from unalike.runs.plan import plan_from_dict

PLACES = ("clients", "alone")  # the client's state in the federated run and in the local baseline
LOG = "incidents.log"  # reasons of failures, for the client's owner


class ClientEndpoint:
    """Answers requests for one client.

    Args:
        file: its client.yaml.
        name: the client's name in the engine, by certificate or key; its id must be the same.
            None: the engine does not say.
        resident: whether this process stays until the run ends, so that memory is enough between
            checkpoints. If not, the client is stored after each request.
        limit: bytes a message may have.
    """

    def __init__(
        self,
        file: str | Path,
        name: str | None = None,
        resident: bool = True,
        limit: int = MAX_BYTES,
    ):
        self.file = Path(file).resolve()
        self.name = name
        self.resident = resident
        self.limit = limit
        self.folder = self.file.parent / "unalike"
        self._client: tuple[dict[str, Any], Client] | None = None  # and the run it was built for
        self._host: tuple[str, str, Host] | None = None  # of which run and place

    def answer(
        self, action: str, data: Any, run: str = "", place: str = "clients", tensors: Any = None
    ) -> bytes:
        """Answer one request, whatever it is. The text of an exception never leaves.

        Args:
            action: "hello", "begin", "call" or "save".
            data: the encoded arguments; for "call", the encoded message.
            run: id of the run.
            place: one of PLACES.
            tensors: the tensors of a large message, where they came apart.
        Returns: an encoded reply; `{"failure": sentence}` where something went wrong.
        """
        try:
            return self._dispatch(action, data, run, place, tensors)
        except Refusal as error:
            return bytes(encode({"failure": str(error)}))
        except (Exception, SystemExit) as error:
            incident = Incident.of(error, self.name or self.file.parent.name, action)
            self.report(incident)
            return bytes(encode({"failure": incident.sentence}))

    def _dispatch(self, action: str, data: Any, run: str, place: str, tensors: Any) -> bytes:
        if place not in PLACES:
            raise Refusal(f"a client is asked in {' or '.join(PLACES)}, got {str(place)[:40]!r}")
        if action == "call":
            host = self.host(run, place)
            (client,) = host.clients
            reply = host.answer(client, data, self.limit, tensors)
            if not self.resident:
                host.store_client(client)
            return bytes(reply)
        actions: dict[str, Callable[..., dict[str, Any]]] = {
            "hello": self.hello,
            "begin": self.begin,
            "save": self.save,
        }
        if action not in actions:
            names = ", ".join(actions)
            raise Refusal(f"a client can be asked {names} and call, got {str(action)[:40]!r}")
        return bytes(encode(actions[action](run=run, place=place, **self.decode(data))))

    def decode(self, data: Any) -> dict[str, Any]:
        """Decode the arguments of a request. The server is told what is wrong with its bytes."""
        try:
            return require_dict(decode(data, self.limit))
        except MessageError as error:
            raise Refusal(str(error)) from None

    def report(self, incident: Incident) -> None:
        """Write a failure down for the client's owner."""
        incident.write(self.folder / LOG)

    def hello(self, run: str, place: str, version: int, about: dict[str, Any]) -> dict[str, Any]:
        """Announce the client.

        Args:
            version: of the server's protocol; with another than ours nothing else is read.
            about: name, method and seed of the run.
        """
        if version != VERSION:
            raise Refusal(
                f"this client speaks version {VERSION} of the protocol, the server {version}: "
                "install the same unalike"
            )
        client = self.client(about)
        if self.name is not None and client.id != self.name:
            raise Refusal(
                f'its file describes client "{client.id}", but this site is known as '
                f'"{self.name}": its id must be that'
            )
        return {"version": VERSION, "card": client.info().as_dict()}

    def begin(
        self, run: str, place: str, about: dict[str, Any], terms: dict[str, Any], round: int
    ) -> dict[str, Any]:
        """Prepare for a run, or refuse it now if it does not fit this client.

        Args:
            about: name, method and seed of the run.
            terms: its plan (`unalike.runs.plan`).
            round: the run continues after this round; 0: it is new.
        """
        plan = plan_from_dict(terms)
        client = self.client(about)
        self._check_plan(plan, client)
        folder = self.folder / quote(run)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{place}.json").write_text(json.dumps({"about": about, "terms": terms}))
        if place == "clients":
            shutil.rmtree(folder / "checkpoints" / "alone", ignore_errors=True)
            config = {"name": run, "client_file": str(self.file), "about": about, **terms}
            (folder / "config.yaml").write_text(yaml.safe_dump(config))
        self._host = None
        self.host(run, place).store.rewind(round)
        return {}

    def _check_plan(self, plan: dict[str, Any], client: Client) -> None:
        """Raise where a run has less privacy than the client asks for, or does not fit it."""
        from unalike.runs.compatibility import check_clients, task_problems

        algorithm, guarded = plan["algorithm"], plan["guarded"]
        if client.privacy is not None:
            shortfall = client.privacy.shortfall(plan["privacy"])
            if shortfall:
                raise Refusal(shortfall)
        misfits = task_problems(algorithm, [client], guarded)
        if misfits:
            raise Refusal(" ".join(sentence for _, sentence in misfits))
        # with data in hand; what is found may tell of the data, and is no Refusal
        report = check_clients(
            algorithm,
            [replace(client, privacy=None)],
            plan["training"],
            plan["seed"],
            safeguard=guarded,
        )
        report.raise_problems(str(self.file))

    def save(self, run: str, place: str, round: int) -> dict[str, Any]:
        """Store the client as of the end of a round."""
        host = self.host(run, place)
        for client in host.clients:
            host.wake(client)
        host.save(round)
        return {}

    def client(self, about: dict[str, Any]) -> Client:
        """The client that the file describes; a factory may build another one for another run."""
        from unalike.scenarios.client_config import load_client

        if self._client is None or self._client[0] != about:
            self._client = about, load_client(self.file, about)
        return self._client[1]

    def host(self, run: str, place: str) -> Host:
        """The client's host in a run. A new process reads the plan of the run from disk."""
        if self._host is not None and self._host[:2] == (run, place):
            return self._host[2]
        folder = self.folder / quote(run)
        try:
            started = json.loads((folder / f"{place}.json").read_text())
        except OSError:
            raise Refusal(f"this client knows nothing of the run {run!r}: begin it first") from None
        host = Host(
            [self.client(started["about"])],
            partial(build_runtime, **plan_from_dict(started["terms"])),
            Store(folder / "checkpoints" / place, snapshots=3),
            report=self.report,
        )
        self._host = (run, place, host)
        return host
