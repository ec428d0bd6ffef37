"""A run's folder: config, events, ledger, checkpoints, results. Knows nothing of what happens in the run."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from unalike.base.errors import UserError
from unalike.engines.store import CheckpointError, Store, load


class Folder:
    """The files of one run. Events and the ledger are appended to as things happen; everything else is written whole or not at all."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self.server = Store(self.path / "checkpoints" / "server")
        self.clients = self.path / "checkpoints" / "clients"
        self.ledger = self.path / "ledger.csv"
        self.archive = Store(
            self.path / "checkpoints" / "archive", keeps=3
        )  # as for clients: saved before the server

    @classmethod
    def create(cls, path: Path, config: dict[str, Any]) -> "Folder":
        path = Path(path)
        if (path / "config.yaml").exists():
            how = "resume=True" if config.get("python") else f"`unalike resume {path}`"
            raise UserError(
                f"{path} already holds a run; resume it with {how} or choose another folder"
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
            folder = cls(path)
            folder.write("config.yaml", yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
        except OSError as error:
            raise UserError(
                f"the run folder {path} cannot be written: {error.strerror or error}"
            ) from None
        return folder

    @classmethod
    def open(cls, path: Path) -> "Folder":
        if not (Path(path) / "config.yaml").is_file():
            raise UserError(f"{path} is no run folder: it has no config.yaml")
        return cls(path)

    @property
    def config(self) -> dict[str, Any]:
        try:
            told = yaml.safe_load((self.path / "config.yaml").read_text())
        except (OSError, ValueError, yaml.YAMLError):
            told = None
        if not isinstance(told, dict):
            raise UserError(
                f"{self.path / 'config.yaml'} cannot be read: it was cut short or is no run's config"
            )
        return told

    @property
    def begun(self) -> dict[str, Any] | None:
        """The config as it was when the run began; None where it has not."""
        with suppress(FileNotFoundError), (self.path / "events.jsonl").open("rb") as lines:
            for line in lines:
                with suppress(ValueError):  # a killed run may leave half a line
                    if (told := json.loads(line))["event"] == "start":
                        return told.get("config")
        return None

    @property
    def results(self) -> dict[str, Any] | None:
        told = self.read_json("results.json")
        return (
            told | {"folder": str(self.path)} if isinstance(told, dict) else told
        )  # it may have been moved since

    def event(self, event: str, **facts: Any) -> None:
        with (self.path / "events.jsonl").open("ab+") as file:
            if (
                file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n"
            ):  # a killed run left half a line
                file.write(b"\n")
            file.write(json.dumps({"event": event, "time": time.time(), **facts}).encode() + b"\n")

    def events(self, kind: str) -> Iterator[dict[str, Any]]:
        """Those of a kind, as they happened; half a line of a killed run is none."""
        for line in (self.path / "events.jsonl").read_text().splitlines():
            with suppress(ValueError):
                if f'"event": "{kind}"' in line and (told := json.loads(line))["event"] == kind:
                    yield told

    def write(self, name: str, text: str) -> None:
        partial = self.path / f"{name}.{os.getpid()}.partial"
        partial.write_text(text)
        partial.replace(self.path / name)

    def write_json(self, name: str, value: Any) -> None:
        self.write(name, json.dumps(value))

    def read_json(self, name: str) -> Any:
        path = self.path / name
        try:
            return json.loads(path.read_text()) if path.exists() else None
        except (OSError, ValueError) as error:
            raise UserError(
                f"{path} cannot be read ({error}); take it away to have it made again"
            ) from None

    def last(self, tell: Callable[..., None] | None = None) -> dict[str, Any] | None:
        """The newest server state that can be read with its clients'; a damaged one is told of, and the one before it serves."""
        damaged: list[str] = []
        for path in sorted(
            (self.path / "checkpoints" / "server" / "server").glob("*.safetensors"), reverse=True
        ):
            try:
                saved = load(path)
                Store(self.clients).check(finished := saved["federation"]["finished"])
            except CheckpointError as error:
                damaged.append(str(error))
                continue
            for reason in damaged:
                (tell or self.event)(
                    "damaged",
                    reason=f"{reason}; the run goes on from round {finished}",
                    round=finished,
                )
            return saved
        if damaged:
            raise UserError(f"no checkpoint of {self.path} can be read: {damaged[-1]}")
        return None


def commit() -> str:
    """The commit this code is at, with + where it was changed since; the version where it is no checkout."""
    from unalike.base.version import __version__

    def git(*words: str) -> str:
        try:
            return subprocess.run(
                ["git", "-C", str(Path(__file__).parents[2]), *words],
                capture_output=True,
                text=True,
            ).stdout.strip()
        except OSError:
            return ""

    is_ours = (Path(__file__).parents[2] / ".git").exists() and git(
        "rev-parse", "--short=12", "HEAD"
    )
    return (
        f"{is_ours}{'+' if git('status', '--porcelain', '--', 'unalike') else ''}"
        if is_ours
        else __version__
    )
