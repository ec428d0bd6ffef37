"""The FLARE engine: the server's program and the clients as one NVIDIA FLARE Collab job, over mutual TLS. Knows nothing of methods.

A client process that dies takes the whole job with it there: it is submitted again, and goes on from the run's last checkpoint.
No code travels with the job: sites allow the two classes it names, and have them installed.
"""

import io
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

from nvflare.collab import collab
from nvflare.collab.api import CallOption
from pydantic import Field

from unalike.base.errors import UserError
from unalike.core.engine import Watch
from unalike.cross_silo.client_endpoint import ClientEndpoint
from unalike.cross_silo.flare_kits import Local
from unalike.cross_silo.policy import ALLOWED, client_config
from unalike.engines.process import EngineError
from unalike.engines.remote import members

START = 60.0  # seconds a server may take until it can be talked to
REACH = 30.0  # and a site may be silent
Positive = Annotated[float, Field(gt=0)]


class FlareEngine:
    """A FLARE federation a run is carried out in: the one whose administrator's startup kit is given, which must be run on the server's
    machine; without `kit` one is provisioned and started here, with a site for each client of the scenario.

    It begins once `clients` sites are there (all of the scenario's, or one). One that does not answer within `timeout` s has failed.
    """

    hosts_clients: ClassVar[bool] = False
    uses_this_machine: ClassVar[bool] = False

    def __init__(
        self,
        folder: Any,
        *,
        kit: str | None = None,
        clients: Annotated[int, Field(ge=1)] | None = None,
        timeout: Positive = 600.0,
    ):
        self.folder = folder
        ids, path = members(folder.config), folder.path.resolve()
        if kit is None and not ids:
            raise UserError(
                "this run has no clients of its own: give the administrator's startup kit of the federation, engine.kit=FOLDER"
            )
        self.job = Job(
            ALLOWED["server"][1],
            {"folders": [str(path)], "timeout": timeout},
            clients or len(ids) or 1,
        )
        self.session = Session(
            Path(kit) if kit is not None else Local(path / "flare", ids, path / "config.yaml")
        )

    def launch(self, watch: Watch) -> dict[str, Any]:
        try:
            return carried(self.folder, watch, self.session, self.job)
        except BaseException:
            self.session.abort()
            raise
        finally:
            self.session.close()


def carried(folder: Any, watch: Any, session: "Session", job: "Job") -> dict[str, Any]:
    """Results of a run by jobs. FLARE takes about 8 s to end one whose server's program is over: the next is submitted meanwhile."""
    from unalike.cross_silo.remote_run import broken, follow

    def submit() -> Callable[[], str | None]:
        ended = session.submit(job)
        return lambda: broken(folder) or ended()

    return follow(folder, watch, submit)


@dataclass
class Job:
    """What is to run: the class of the server's half, with its arguments, once so many sites are there."""

    program: str
    args: dict[str, Any]
    least: int

    def write(self, to: Path) -> None:
        """As FLARE takes it: a class for the server and one for the clients, by name; no code."""
        part = lambda path, **args: {"path": path, "args": args}
        server = {
            "format_version": 2,
            "task_data_filters": [],
            "task_result_filters": [],
            "workflows": [
                {"id": "controller", **part(ALLOWED["server"][0], server_obj_id="program")}
            ],
            "components": [{"id": "program", **part(self.program, **self.args)}],
        }
        (to / "app" / "config").mkdir(parents=True)
        for name, told in (("config_fed_server", server), ("config_fed_client", client_config())):
            (to / "app" / "config" / f"{name}.json").write_text(json.dumps(told))
        about = {
            "name": "unalike",
            "resource_spec": {},
            "min_clients": self.least,
            "deploy_map": {"app": ["@ALL"]},
        }
        (to / "meta.json").write_text(json.dumps(about))


class Session:
    """An administrator's way into a federation: that of a startup kit, or one on this machine, which is started and kept up."""

    def __init__(self, where: "Path | Local"):
        self.here = where if isinstance(where, Local) else None
        self.kit = where.kit if isinstance(where, Local) else where.resolve()
        self.known: Any = None
        self.number: Any = None  # of the last job
        self.died: set[str] = set()  # whose process had to be started since it was submitted

    def submit(self, job: Job) -> Callable[[], str | None]:
        """Start a job; what is returned tells how it ended, None while it goes on."""
        with tempfile.TemporaryDirectory() as place:
            job.write(Path(place))
            self.number = number = self._submitted(place)
        if self.here is None:
            job.least = 1  # should it end early, the next is for those who are still there

        def ended() -> str | None:
            self._revive()
            if died := sorted(self.died):  # and are started again, but know nothing of the job
                self.abort()
                return f"the process of {', '.join(died)} died"
            try:
                status = str(self._session().get_job_status(number))
            except EngineError:
                raise
            except Exception:  # the server may be starting again
                self._forget()
                return None
            return f"FLARE says {status}" if status.startswith("FINISHED") else None

        return ended

    def _revive(self) -> None:
        """Start whoever is not running here."""
        if self.here is not None:
            self.died |= set(self.here.start())

    def _submitted(self, place: str) -> Any:
        """The job's number. A server that is just being started is waited for, also one that dies over it."""
        begun = time.monotonic()
        while True:
            try:
                session = self._session()
                self.died.clear()
                return session.submit_job(place)
            except (UserError, EngineError):
                raise
            except Exception as error:
                if time.monotonic() - begun > START:
                    raise EngineError(f"FLARE's server takes no job: {error}") from None
                self._forget()
                time.sleep(0.3)

    def abort(self) -> None:
        """End the job that was submitted last, if it still goes on."""
        with suppress(Exception):
            self._session().abort_job(self.number)

    def _session(self) -> Any:
        from nvflare.fuel.flare_api.flare_api import new_secure_session

        begun = time.monotonic()
        while self.known is None:
            self._revive()  # the server may die while it is knocked at
            try:
                with redirect_stdout(io.StringIO()):  # that is for results
                    self.known = new_secure_session(
                        username=self._admin(), startup_kit_location=str(self.kit), timeout=5.0
                    )
            except Exception as error:
                if isinstance(error, UserError):
                    raise
                if time.monotonic() - begun > START:
                    raise EngineError(f"no FLARE server lets {self.kit} in: {error}") from None
                time.sleep(0.3)
        return self.known

    def _admin(self) -> str:
        try:
            told = json.loads((self.kit / "startup" / "fed_admin.json").read_text())["admin"]
        except (OSError, ValueError, KeyError):
            raise UserError(
                f"{self.kit} is no administrator's startup kit: it has no startup/fed_admin.json"
            ) from None
        return told.get("username") or self.kit.name

    def _forget(self) -> None:
        if self.known is not None:
            with suppress(Exception):
                self.known.close()
            self.known = None

    def close(self) -> None:
        self._forget()
        if self.here is not None:
            self.here.stop()


# what runs in the job


class Program:
    """The server's half of a job: runs, one after another."""

    def __init__(self, folders: list[str], timeout: float):
        self.folders, self.timeout = folders, timeout
        dies_with_parent()

    @collab.main
    def main(self) -> None:
        from unalike.cross_silo.remote_run import serve

        line = job_line()
        for folder in self.folders:
            serve(Path(folder), line, self.timeout)


class Organisation:
    """A client's half of a job. Which client is told by client.yaml in the `local` folder of its startup kit."""

    def __init__(self) -> None:
        self.site: ClientEndpoint | None = None
        self.lock = threading.Lock()
        dies_with_parent()

    @collab.publish
    def present(self) -> bool:
        return True

    @collab.publish
    def answer(
        self, do: str, data: bytes, run: str, place: str, rest: bytes | None = None
    ) -> bytes:
        with self.lock:
            if self.site is None:
                import torch

                torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
                file = (
                    os.environ.get("UNALIKE_CLIENT")
                    or Path(collab.workspace.get_site_config_dir()) / "client.yaml"
                )
                self.site = ClientEndpoint(file, collab.site_name)
            return self.site.answer(do, data, run, place, rest)


def job_line() -> "FlareLine":
    """The line to the sites of the job this runs in."""
    context = collab.context
    logging.getLogger("nvflare.collab").setLevel(
        logging.WARNING
    )  # or there are two lines for every message
    return FlareLine(list(collab.clients), context.is_aborted)


class FlareLine:
    """Bytes to the sites of a job and back. FLARE does not say when a site is gone: one that is asked something is asked every so often
    whether it is there, and has failed once it says nothing for `reach` seconds."""

    def __init__(self, proxies: list[Any], aborted: Callable[[], bool], reach: float = REACH):
        self.proxies, self.aborted, self.reach = (
            {proxy.name: proxy for proxy in proxies},
            aborted,
            reach,
        )
        self.pool = ThreadPoolExecutor(4 * max(2, len(proxies)), thread_name_prefix="line")
        self.waiting: dict[
            str, Future[bytes]
        ] = {}  # answers that are not there yet: what is there may be large, and is not kept
        self.lock = threading.Lock()
        self.heard = dict.fromkeys(self.proxies, 0.0)
        self.gone: dict[str, EngineError] = {}
        for name in self.proxies:
            threading.Thread(target=self._watch, args=(name,), daemon=True).start()

    def names(self) -> list[str]:
        return sorted(self.proxies)

    def admit(self, name: str, id: str) -> None:
        if name != id:
            raise ValueError(
                f'the site {name} says it is "{id}", which is not the name on its certificate'
            )

    def ask(
        self,
        client: str,
        do: str,
        data: bytes,
        run: str,
        place: str,
        timeout: float,
        rest: bytearray | None = None,
    ) -> "Future[bytes]":
        what = {
            "do": do,
            "data": data,
            "run": run,
            "place": place,
            **({"rest": rest} if rest is not None else {}),
        }
        answer: Future[bytes] = Future()
        if client in self.gone:
            answer.set_exception(self.gone[client])
        else:
            with self.lock:
                self.heard[client], self.waiting[client] = time.monotonic(), answer
            answer.add_done_callback(partial(self._answered, client))
            self.pool.submit(self._ask, client, timeout, what, answer)
        return answer

    def _ask(
        self, client: str, timeout: float, what: dict[str, Any], answer: "Future[bytes]"
    ) -> None:
        try:
            told = self.proxies[client].call_func(CallOption(timeout=timeout), "answer", (), what)
            settle(answer, told)
        except Exception as error:
            late = isinstance(getattr(error, "cause", None) or error.__cause__, TimeoutError)
            settle(
                answer, EngineError(f"did not answer within {timeout:g} s" if late else str(error))
            )

    def _answered(self, client: str, answer: "Future[bytes]") -> None:
        with self.lock:
            if self.waiting.get(client) is answer:  # or the next was asked for already
                del self.waiting[client]

    def _watch(self, client: str) -> None:
        while not self.aborted():
            time.sleep(self.reach / 6)
            if client not in self.waiting:
                continue
            try:
                self.proxies[client].call_func(
                    CallOption(timeout=self.reach / 3), "present", (), {}
                )
                self.heard[client] = time.monotonic()
            except Exception:
                if (
                    time.monotonic() - self.heard[client] > self.reach
                    and (asked := self.waiting.get(client)) is not None
                ):
                    self.gone[client] = EngineError(
                        f"could not be reached for {self.reach:g} s: it left, or its network is cut"
                    )
                    settle(asked, self.gone[client])
                    del asked

    def check(self) -> None:
        if self.aborted():
            raise EngineError("FLARE ended the job")


def settle(answer: "Future[bytes]", told: bytes | Exception) -> None:
    """The first word counts."""
    with suppress(InvalidStateError):
        if isinstance(told, Exception):
            answer.set_exception(told)
        else:
            answer.set_result(told)


def dies_with_parent() -> None:
    """A job process whose FLARE process is gone is of no use to anyone."""
    parent = os.getppid()

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()
