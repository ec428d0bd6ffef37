"""A run's folder: config, events, ledger, checkpoints, results. Knows nothing of methods."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from unalike.base import events
from unalike.base.errors import UserError
from unalike.base.version import __version__
from unalike.engines.store import CheckpointError, Store, load

# Everything that a start writes before its first checkpoint.
FILES_OF_A_START = (
    "config.yaml",
    "events.jsonl",
    "ledger.csv",
    "alone.json",
    "run.json",
    "attempt.json",
    "problem.json",
    "broken.json",
    "checkpoints",
    "pictures",
)
REPOSITORY = Path(__file__).parents[2]


class Folder:
    """The files of one run.

    Events and the ledger are appended to while the run goes on; everything else is written whole
    or not at all.

    Attributes:
        path: the folder.
        server: checkpoints of the server.
        archive: large values of the server, saved before its checkpoint.
        clients: folder with the states of clients.
        ledger: ledger.csv, the bytes that were sent.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self.server = Store(self.path / "checkpoints" / "server")
        self.clients = self.path / "checkpoints" / "clients"
        self.ledger = self.path / "ledger.csv"
        # Three versions, as of clients: it is saved before the server.
        self.archive = Store(self.path / "checkpoints" / "archive", snapshots=3)

    @classmethod
    def create(cls, path: Path, config: dict[str, Any]) -> "Folder":
        """Make the folder of a new run and write its config.

        What is left of a start that failed before its first checkpoint is moved to `failed-N`.

        Raises: UserError where the folder holds a run, or cannot be written.
        """
        folder = cls(path)
        try:
            if folder.holds_failed_start():
                folder.set_aside_failed_start()
            if (folder.path / "config.yaml").exists():
                how = "resume=True" if config.get("python") else f"`unalike resume {path}`"
                raise UserError(
                    f"{path} already holds a run; resume it with {how} or choose another folder"
                )
            folder.path.mkdir(parents=True, exist_ok=True)
            text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
            folder.write("config.yaml", text)
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"the run folder {path} cannot be written: {reason}") from None
        return folder

    @classmethod
    def open(cls, path: Path) -> "Folder":
        """Open the folder of a run that was begun.

        Raises: UserError where there is no config.yaml.
        """
        if not (Path(path) / "config.yaml").is_file():
            raise UserError(f"{path} is no run folder: it has no config.yaml")
        return cls(path)

    def holds_failed_start(self) -> bool:
        """Whether a run ended here with an exception before its first checkpoint."""
        if (self.path / "results.json").exists() or any(self._server_checkpoints()):
            return False
        last = None
        for event in self.events():
            last = event["event"]
        return last == "failed"

    def set_aside_failed_start(self) -> None:
        """Move what a failed start wrote to a folder of its own inside this one."""
        number = 1
        while (self.path / f"failed-{number}").exists():
            number += 1
        target = self.path / f"failed-{number}"
        target.mkdir()
        for name in FILES_OF_A_START:
            if (self.path / name).exists():
                shutil.move(self.path / name, target / name)

    @property
    def config(self) -> dict[str, Any]:
        """The run's config.yaml."""
        path = self.path / "config.yaml"
        try:
            config = yaml.safe_load(path.read_text())
        except (OSError, ValueError, yaml.YAMLError):
            config = None
        if not isinstance(config, dict):
            raise UserError(f"{path} cannot be read: it was cut short or is no run's config")
        return config

    @property
    def config_at_start(self) -> dict[str, Any] | None:
        """The config as it was when the run began; None where it has not begun."""
        start = next(self.events("start"), None)
        return start.get("config") if start is not None else None

    @property
    def results(self) -> dict[str, Any] | None:
        """The run's results, with the folder as it is called now; None before the end."""
        results = self.read_json("results.json")
        if isinstance(results, dict):
            results["folder"] = str(self.path)
        return results

    def record(self, event: str, **facts: Any) -> None:
        """Append an event to events.jsonl."""
        events.append_event(self.path / events.FILE, event, **facts)

    def events(self, kind: str | None = None) -> Iterator[dict[str, Any]]:
        """Events in the order they happened, all or those of one kind.

        Half a line of a killed run is left out.
        """
        return events.read_events(self.path / events.FILE, kind)

    def write(self, name: str, text: str) -> None:
        """Write a file whole, or not at all."""
        partial = self.path / f"{name}.{os.getpid()}.partial"
        partial.write_text(text)
        partial.replace(self.path / name)

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file whole, or not at all."""
        self.write(name, json.dumps(value))

    def read_json(self, name: str) -> Any:
        """Read a JSON file; None where there is none.

        Raises: UserError where it cannot be read.
        """
        path = self.path / name
        try:
            return json.loads(path.read_text()) if path.exists() else None
        except (OSError, ValueError) as error:
            message = f"{path} cannot be read ({error}); take it away to have it made again"
            raise UserError(message) from None

    def last_checkpoint(self, emit: Callable[..., None] | None = None) -> dict[str, Any] | None:
        """Return the newest server state that can be read together with its clients' states.

        A damaged one is reported as an event, and the one before it is used.

        Raises: UserError where there are checkpoints and none can be read.
        """
        damages: list[str] = []
        for path in sorted(self._server_checkpoints(), reverse=True):
            try:
                state = load(path)
                finished = state["federation"]["finished"]
                Store(self.clients).check_readable(finished)
            except CheckpointError as error:
                damages.append(str(error))
                continue
            for damage in damages:
                reason = f"{damage}; the run goes on from round {finished}"
                (emit or self.record)("damaged", reason=reason, round=finished)
            return state
        if damages:
            raise UserError(f"no checkpoint of {self.path} can be read: {damages[-1]}")
        return None

    def _server_checkpoints(self) -> Iterator[Path]:
        return (self.path / "checkpoints" / "server" / "server").glob("*.safetensors")


def commit() -> str:
    """The git commit of this code, with + where it was changed since; else the version."""
    if not (REPOSITORY / ".git").exists():
        return __version__
    revision = _git("rev-parse", "--short=12", "HEAD")
    if not revision:
        return __version__
    return f"{revision}+" if _git("status", "--porcelain", "--", "unalike") else revision


def _git(*words: str) -> str:
    """Output of a git command in our repository; empty where git is missing or fails."""
    command = ["git", "-C", str(REPOSITORY), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""
