"""A client's end of a cross-silo engine: bytes in, bytes out. Knows nothing of the transport.

A server may request `hello`, `begin`, `call`, `save` and `finish`. What the client's owner allows
is checked here (`site_law.py`) and recorded here (`site_records.py`). States stay in a folder
beside the client's file. So does the reason of a failure: it is written to `incidents.log` there
and to stderr, and the server gets one sentence with the incident's number. Only the text of a
`Refusal` reaches the server.
"""

import json
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
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
from unalike.cross_silo.site_law import SiteHost, SiteLaw
from unalike.cross_silo.site_records import AUDIT_LOG, AuditLog, SiteLedger
from unalike.cross_silo.versions import installed_versions
from unalike.engines.host import Request
from unalike.engines.store import Store, quote
from unalike.runs.plan import plan_from_dict
from unalike.runs.run_folder import Folder
from unalike.scenarios.client_config import load_client, read_config
from unalike.scenarios.site_policy import run_digest

PLACES = ("clients", "alone")  # the client's state in the federated run and in the local baseline
LOG = "incidents.log"  # reasons of failures, for the client's owner
REWOUND = "rewound"  # states that a server had this client go back behind, in a run's folder
TERMS = ("algorithm", "training", "seed", "guarded", "privacy")  # of a plan; nothing else is kept


class ClientEndpoint:
    """Answers requests for one client.

    Args:
        file: its client.yaml.
        name: the client's name in the engine, by certificate or key; its id must be the same.
            None: the engine does not say.
        resident: whether this process stays until the run ends, so that memory is enough between
            checkpoints. If not, the client is stored after each request.
        limit: bytes a message may have.
        submitter: who runs the job, by certificate. None: the engine does not say.
    """

    def __init__(
        self,
        file: str | Path,
        name: str | None = None,
        resident: bool = True,
        limit: int = MAX_BYTES,
        submitter: str | None = None,
    ):
        self.file = Path(file).resolve()
        self.name = name
        self.resident = resident
        self.limit = limit
        self.submitter = submitter
        self.folder = self.file.parent / "unalike"
        self.audit = AuditLog(self.folder / AUDIT_LOG)
        self._client: tuple[dict[str, Any], Client] | None = None  # and the run it was built for
        self._host: tuple[str, str, RecordingHost] | None = None  # of which run and place

    def answer(
        self, action: str, data: Any, run: str = "", place: str = "clients", tensors: Any = None
    ) -> bytes:
        """Answer one request, whatever it is. The text of an exception never leaves.

        Args:
            action: "hello", "begin", "call", "save" or "finish".
            data: the encoded arguments; for "call", the encoded message.
            run: id of the run.
            place: one of PLACES.
            tensors: the tensors of a large message, where they came apart.
        Returns: an encoded reply; `{"failure": sentence}` where something went wrong.
        """
        try:
            return self._dispatch(action, data, run, place, tensors)
        except Refusal as error:
            with suppress(OSError):
                self.audit.write(
                    "refused", run=str(run)[:200], action=str(action)[:40], reason=str(error)
                )
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
            "finish": self.finish,
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
        with suppress(OSError):
            self.audit.write("incident", number=incident.number, action=incident.operation)

    @property
    def law(self) -> SiteLaw:
        """What the client's owner allows, as the file says it now."""
        return SiteLaw(read_config(self.file), self.folder, self.submitter)

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
        versions = installed_versions()
        self.audit.write("hello", about=about, submitter=self.submitter, versions=versions)
        return {"version": VERSION, "card": client.info().as_dict(), "versions": versions}

    def begin(
        self, run: str, place: str, about: dict[str, Any], terms: dict[str, Any], round: int
    ) -> dict[str, Any]:
        """Prepare for a run, or refuse it now if it does not fit this client or its owner's law.

        Args:
            about: name, method and seed of the run.
            terms: its plan (`unalike.runs.plan`).
            round: the run continues after this round; 0: it is new.
        """
        terms = {name: terms[name] for name in TERMS if name in terms}
        plan = plan_from_dict(terms)
        client = self.client(about)
        law = self.law
        law.check_run(terms, plan, client)
        check_fit(plan, client, str(self.file))
        folder = self.folder / quote(run)
        store = Store(folder / "checkpoints" / place, snapshots=3)
        if place == "clients":
            self._keep_newest(folder, store, client.id, round, law.policy.rewind)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{place}.json").write_text(json.dumps({"about": about, "terms": terms}))
        if place == "clients":
            shutil.rmtree(folder / "checkpoints" / "alone", ignore_errors=True)
            # the client's own entries last: a server's terms override none of them
            config = {**terms, "about": about, "name": run, "client_file": str(self.file)}
            (folder / "config.yaml").write_text(yaml.safe_dump(config))
            Folder(folder).record(
                "resume" if round else "start",
                scenario=run,
                algorithm=terms["algorithm"]["name"],
                seed=plan["seed"],
                round=round,
                rounds=plan["training"].rounds,
                clients={client.id: client.info().as_dict()},
            )
        self.audit.write(
            "begin",
            run=run,
            place=place,
            digest=run_digest(terms),
            algorithm=terms["algorithm"]["name"],
            privacy=terms["privacy"],
            round=round,
            submitter=self.submitter,
        )
        self._host = None
        store.rewind(round)
        return {}

    def _keep_newest(
        self, folder: Path, store: Store, client: str, round: int, allowed: int
    ) -> None:
        """Keep a copy of the newest state that going back to a round would delete.

        Raises: Refusal where it would delete more saved rounds than the policy allows.
        """
        lost = [number for number in store.rounds(client) if number > round]
        if len(lost) > allowed:
            raise Refusal(
                f"it saved round {max(lost)} of this run, and its policy does not let a server go "
                f"back to round {round} (policy.rewind): begin a new run"
            )
        if lost:
            source = store.path(client, lost[-1])
            target = folder / REWOUND / source.parent.name / source.name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)

    def save(self, run: str, place: str, round: int) -> dict[str, Any]:
        """Store the client as of the end of a round."""
        host = self.host(run, place)
        for client in host.clients:
            host.wake(client)
        host.save(round)
        if place == "clients":
            Folder(self.folder / quote(run)).record("round", round=round)
        return {}

    def finish(self, run: str, place: str, finished: bool, reason: str) -> dict[str, Any]:
        """Take note of how the run ended for this client.

        Args:
            finished: whether all rounds were done.
            reason: why the client was left out, or the run ended; empty where all went well.
        """
        reason = " ".join(str(reason).split())[:500]
        event = "finish" if finished else "ended"
        self.audit.write(event, run=run, reason=reason)
        if (self.folder / quote(run) / "config.yaml").exists():
            Folder(self.folder / quote(run)).record(event, reason=reason)
        if not finished:
            with suppress(OSError, ValueError):  # stderr may be closed
                print(f"the run {run!r} ended for this client: {reason!r}", file=sys.stderr)
        return {}

    def client(self, about: dict[str, Any]) -> Client:
        """The client that the file describes; a factory may build another one for another run."""
        if self._client is None or self._client[0] != about:
            self._client = about, load_client(self.file, about)
        return self._client[1]

    def host(self, run: str, place: str) -> "RecordingHost":
        """The client's host in a run. A new process reads the plan of the run from disk."""
        if self._host is not None and self._host[:2] == (run, place):
            return self._host[2]
        folder = self.folder / quote(run)
        try:
            started = json.loads((folder / f"{place}.json").read_text())
        except OSError:
            raise Refusal(f"this client knows nothing of the run {run!r}: begin it first") from None
        plan = plan_from_dict(started["terms"])
        host = RecordingHost(
            [self.client(started["about"])],
            partial(build_runtime, shares_features=False, **plan),
            Store(folder / "checkpoints" / place, snapshots=3),
            report=self.report,
            law=self.law,
            audit=self.audit,
            run=run,
            place=place,
            folder=folder,
        )
        self._host = (run, place, host)
        return host


def check_fit(plan: dict[str, Any], client: Client, source: str) -> None:
    """Raise where a run does not fit a client.

    Args:
        plan: `plan_from_dict` of the run's terms.
        source: what the problems are in, for their report.
    """
    from unalike.runs.compatibility import check_clients, task_problems

    algorithm, guarded = plan["algorithm"], plan["guarded"]
    if guarded and algorithm.holds_out():
        raise Refusal("the safeguard of this method holds rows out, which a site cannot do yet")
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
    report.raise_problems(source)


class RecordingHost(SiteHost):
    """A host that records every message in the client's audit log and the run's ledger.

    Args:
        audit: the client's audit log.
        place: one of PLACES.
        arguments, options: those of `SiteHost`.
    """

    def __init__(self, *arguments: Any, audit: AuditLog, place: str, **options: Any):
        super().__init__(*arguments, **options)
        self.audit = audit
        self.place = place
        self.ledger = SiteLedger(options["folder"], next(iter(self.clients)))
        self.current: dict[str, Any] = {}  # the message that is being answered, and its outcome

    def handle(self, client: str, message: dict[str, Any]) -> dict[str, Any]:
        answer = super().handle(client, message)
        self.current = {"failure": answer.get("failure")}
        for name in Request.__annotations__.keys() - {"body"}:
            self.current[name] = message.get(name) if isinstance(message, dict) else None
        return answer

    def answer(
        self, client: str, data: Any, limit: int = MAX_BYTES, tensors: Any = None
    ) -> bytearray:
        """Answer a message, and record it before the answer leaves."""
        self.current = {}
        reply = super().answer(client, data, limit, tensors)
        received = len(data) + len(tensors or b"")
        operation = str(self.current.get("operation"))[:80]
        round = self.current.get("round")
        alone = " (alone)" if self.place == "alone" else ""
        self.ledger.add(
            round if isinstance(round, int) else 0, operation + alone, received, len(reply)
        )
        self.audit.write(
            "call",
            sync=False,
            run=self.run,
            operation=operation + alone,
            round=round if isinstance(round, int) else None,
            received=received,
            sent=len(reply),
            failure=self.current.get("failure"),
        )
        return reply
