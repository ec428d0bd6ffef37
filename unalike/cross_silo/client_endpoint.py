"""A client's end of an engine between organisations: bytes in, bytes out. Knows its own client, and nothing of who carries them.

What a server may ask is `hello`, `begin`, `call` and `save`. States stay in the folder beside the client's file. So does why something
failed: it is in `incidents.log` there and on stderr, and the server gets one sentence with the incident's number. Only a `Refusal` is told.
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

PLACES = ("clients", "alone")  # with the others, and for comparison without them
LOG = "incidents.log"  # why something failed, for the client's owner


class ClientEndpoint:
    """One client, where it lives. `name` is who it is to the engine, by its certificate or key: its card must say the same.

    With `resident` the process stays and memory is enough between checkpoints; without, every message may find a new process, so
    that the client goes to disk after each.
    """

    def __init__(
        self,
        file: str | Path,
        name: str | None = None,
        resident: bool = True,
        limit: int = MAX_BYTES,
    ):
        self.file, self.name, self.resident, self.limit = (
            Path(file).resolve(),
            name,
            resident,
            limit,
        )
        self.folder = self.file.parent / "unalike"
        self.made: tuple[Any, Client] | None = None  # for which run, and the client
        self.open: tuple[str, str, Host] | None = None  # run, place, and the host there

    def answer(
        self, do: str, data: Any, run: str = "", place: str = "clients", rest: Any = None
    ) -> bytes:
        """What the client answers, whatever comes. No text of an exception is in it, but that of a Refusal."""
        try:
            if place not in PLACES:
                raise Refusal(
                    f"a client is asked in {' or '.join(PLACES)}, got {str(place)[:40]!r}"
                )
            if do == "call":
                host = self.host(run, place)
                (client,) = host.clients
                reply = host.answer(client, data, self.limit, rest)
                if not self.resident:
                    host.keep(client)
                return bytes(reply)
            asked: dict[str, Callable[..., dict[str, Any]]] = {
                "hello": self.hello,
                "begin": self.begin,
                "save": self.save,
            }
            if do not in asked:
                raise Refusal(
                    f"a client can be asked {', '.join(asked)} and call, got {str(do)[:40]!r}"
                )
            return bytes(encode(asked[do](run=run, place=place, **self.read(data))))
        except Refusal as error:
            return bytes(encode({"failure": str(error)}))
        except (Exception, SystemExit) as error:
            incident = Incident.of(error, self.name or self.file.parent.name, do)
            self.report(incident)
            return bytes(encode({"failure": incident.sentence}))

    def read(self, data: Any) -> dict[str, Any]:
        """What a server sent along; what is wrong with its bytes it may know."""
        try:
            return require_dict(decode(data, self.limit))
        except MessageError as error:
            raise Refusal(str(error)) from None

    def report(self, incident: Incident) -> None:
        incident.write(self.folder / LOG)

    def hello(self, run: str, place: str, version: int, about: dict[str, Any]) -> dict[str, Any]:
        """Who is here. A server of another version is refused before anything else is read."""
        if version != VERSION:
            raise Refusal(
                f"this client speaks version {VERSION} of the protocol, the server {version}: install the same unalike"
            )
        client = self.client(about)
        if self.name is not None and client.id != self.name:
            raise Refusal(
                f'its file describes client "{client.id}", but this site is known as "{self.name}": its id must be that'
            )
        return {"version": VERSION, "card": client.info().as_dict()}

    def begin(
        self, run: str, place: str, about: dict[str, Any], terms: dict[str, Any], round: int
    ) -> dict[str, Any]:
        """What the run will do here, and after which round it goes on; the client says now, not later, if that does not fit it."""
        from unalike.runs.compatibility import check_clients, task_problems

        made, client = plan_from_dict(terms), self.client(about)
        if client.privacy is not None and (why := client.privacy.unmet(made["privacy"])):
            raise Refusal(why)
        if problems := task_problems(made["algorithm"], [client], made["guarded"]):
            raise Refusal(" ".join(sentence for _, sentence in problems))
        report = check_clients(
            made["algorithm"],
            [replace(client, privacy=None)],
            made["training"],
            made["seed"],
            safeguard=made["guarded"],
        )
        report.raise_problems(str(self.file))
        here = self.folder / quote(run)
        here.mkdir(parents=True, exist_ok=True)
        (here / f"{place}.json").write_text(json.dumps({"about": about, "terms": terms}))
        if place == "clients":
            shutil.rmtree(here / "checkpoints" / "alone", ignore_errors=True)
            (here / "config.yaml").write_text(
                yaml.safe_dump(
                    {"name": run, "client_file": str(self.file), "about": about, **terms}
                )
            )
        self.open = None
        self.host(run, place).store.rewind(round)
        return {}

    def save(self, run: str, place: str, round: int) -> dict[str, Any]:
        host = self.host(run, place)
        for client in host.clients:
            host.wake(client)
        host.save(round)
        return {}

    def client(self, about: dict[str, Any]) -> Client:
        from unalike.scenarios.client_config import load_client

        if self.made is None or self.made[0] != about:
            self.made = about, load_client(self.file, about)
        return self.made[1]

    def host(self, run: str, place: str) -> Host:
        """Where the client is in a run; a new process finds what was agreed on disk."""
        if self.open is None or self.open[:2] != (run, place):
            here = self.folder / quote(run)
            try:
                told = json.loads((here / f"{place}.json").read_text())
            except OSError:
                raise Refusal(
                    f"this client knows nothing of the run {run!r}: begin it first"
                ) from None
            build = partial(build_runtime, **plan_from_dict(told["terms"]))
            self.open = (
                run,
                place,
                Host(
                    [self.client(told["about"])],
                    build,
                    Store(here / "checkpoints" / place, keeps=3),
                    report=self.report,
                ),
            )
        return self.open[2]
