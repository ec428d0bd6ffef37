"""A run's folder: config, events, ledger, checkpoints, results. Knows nothing of methods."""

import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import yaml

from unalike.base import events
from unalike.base.errors import UserError
from unalike.base.integrity import (
    MANIFEST,
    Manifest,
    describe_bytes,
    describe_file,
    find_change,
    hash_file,
    read_manifest,
    unseal,
    write_whole,
)
from unalike.base.json_text import parse_json
from unalike.base.ledger import check_ledger
from unalike.base.lock import lock
from unalike.base.record import (
    TEXT,
    WHOLE,
    find_problem_in_config,
    find_problem_in_results,
    required,
)
from unalike.base.version import __version__
from unalike.base.yaml_text import dump_yaml, load_yaml
from unalike.engines.store import (
    INDEX,
    CheckpointError,
    Store,
    check_digest,
    file_name,
    load,
    read_index,
    unreadable,
)

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
    "tracking",
    "tensorboard",
)
RESULTS = "results.json"
BASELINE = "alone.json"  # metrics of the local baseline
# What a run writes, and a manifest of a finished run lists.
FILES_OF_A_RUN = ("config.yaml", BASELINE, "ledger.csv", "events.jsonl")
FOLDERS_OF_A_RUN = ("checkpoints", "pictures")
# Settings that say where a run is computed and kept, not what comes of it: they may change
# between a start and a resume.
RESUMABLE = ("engine", "workers", "threads", "device", "data_dir", "checkpoint", "modules", "track")
SERVER_STATE = required(
    federation=required(finished=WHOLE),
    manifest=required(clients=TEXT, archive=TEXT),
    ledger=required(bytes=WHOLE, sha256=TEXT),
    config=TEXT,
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
        client_store: the same, to be read; engines write to it.
        ledger: ledger.csv, the bytes that were sent.
        journal: the ledger as it was appended to, kept when ledger.csv becomes a sorted table.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self.server = Store(self.path / "checkpoints" / "server")
        self.clients = self.path / "checkpoints" / "clients"
        self.client_store = Store(self.clients)
        self.ledger = self.path / "ledger.csv"
        self.journal = self.path / "checkpoints" / "ledger.csv"
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
            folder.path.mkdir(parents=True, exist_ok=True)
            with folder.lock():
                folder._begin(config)
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"the run folder {path} cannot be written: {reason}") from None
        return folder

    def _begin(self, config: dict[str, Any]) -> None:
        if self.holds_failed_start():
            self.set_aside_failed_start()
        if (self.path / "config.yaml").exists():
            how = "resume=True" if config.get("python") else f"`unalike resume {self.path}`"
            raise UserError(
                f"{self.path} already holds a run; resume it with {how} or choose another folder"
            )
        self.write("config.yaml", dump_yaml(config))

    def lock(self) -> AbstractContextManager[None]:
        """Keep other processes from working on this run; raises UserError where one does."""
        return lock(self.path)

    @classmethod
    def open(cls, path: Path) -> "Folder":
        """Open the folder of a run that was begun.

        Raises: UserError where there is no config.yaml.
        """
        if not (Path(path) / "config.yaml").is_file():
            raise UserError(f"{path} is no run folder: it has no config.yaml")
        for name in (RESULTS, MANIFEST, events.FILE):  # reading a pipe would never end
            file = Path(path) / name
            if file.exists() and not file.is_file():
                raise UserError(f"{file} is no file: put a copy of the run's in its place")
        return cls(path)

    def holds_failed_start(self) -> bool:
        """Whether a run ended here with an exception before its first checkpoint."""
        if (self.path / RESULTS).exists() or any(self._server_checkpoints()):
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
            config = load_yaml(path.read_text())
        except (OSError, ValueError, yaml.YAMLError):
            config = None
        if not isinstance(config, dict):
            raise UserError(f"{path} cannot be read: it was cut short or is no run's config")
        problem = find_problem_in_config(config)
        if problem:
            raise UserError(f"{path} is not the config of a run: {problem}")
        return config

    @property
    def config_at_start(self) -> dict[str, Any] | None:
        """The config as it was when the run began, or was last extended; None before it began."""
        start = next(self.events("start"), {})
        config = start.get("config")
        if not isinstance(config, dict):
            return None
        for rounds in self.extensions():
            config = with_rounds(config, rounds)
        return config

    def extensions(self) -> list[int]:
        """The numbers of rounds that the run was extended to, one after another."""
        return [event["rounds"] for event in self.events("extended")]

    def extend(self, rounds: int) -> None:
        """Make an unfinished run of more rounds out of a finished one; keep its results aside."""
        before = self.config["training"]["rounds"]
        (self.path / RESULTS).replace(self.path / f"results-{before}.json")
        (self.path / MANIFEST).unlink(missing_ok=True)
        (self.path / BASELINE).unlink(missing_ok=True)
        self.record("extended", rounds=rounds, before=before)
        self.write("config.yaml", dump_yaml(with_rounds(self.config, rounds)))

    @property
    def results(self) -> dict[str, Any] | None:
        """The run's results, with the folder as it is called now; None before the end.

        Raises: UserError where they are not as the run wrote them.
        """
        path = self.path / RESULTS
        if not path.exists():
            return None
        manifest = read_manifest(self.path) or {}
        change = find_change(self.path, RESULTS, manifest[RESULTS]) if RESULTS in manifest else None
        results = None
        if change is None:
            try:
                results = parse_json(path.read_text())
            except (OSError, ValueError) as error:
                change = f"{path} cannot be read ({error})"
        problem = find_problem_in_results(results) if change is None else None
        if problem:
            change = f"{path} holds no results: {problem}"
        if change is not None or results is None:
            raise UserError(
                f"{change}. Restore it from a copy; or move it to another folder and resume the "
                "run, which goes on from its last checkpoint and writes the results again"
            )
        results["folder"] = str(self.path)
        return results

    def finish(self, results: dict[str, Any]) -> None:
        """Write the results, and before them the manifest that they are proven by."""
        text = json.dumps(results)
        manifest = self.describe_files()
        manifest[RESULTS] = describe_bytes(text.encode())
        self.write(MANIFEST, json.dumps(manifest, indent=1))
        self.write(RESULTS, text)

    def describe_files(self) -> Manifest:
        """Size and hash of every file that a run writes before its results."""
        paths = [self.path / name for name in FILES_OF_A_RUN]
        for name in FOLDERS_OF_A_RUN:
            paths += sorted((self.path / name).rglob("*"))
        return {
            path.relative_to(self.path).as_posix(): describe_file(path)
            for path in paths
            if path.is_file() and path.suffix not in (".partial", ".token")
        }

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
        write_whole(self.path / name, text.encode())

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file whole, or not at all."""
        self.write(name, json.dumps(value))

    def read_json(self, name: str) -> Any:
        """Read a JSON file; None where there is none.

        Raises: UserError where it cannot be read.
        """
        path = self.path / name
        try:
            return parse_json(path.read_text()) if path.exists() else None
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read ({error}); restore it from a copy") from None

    def hash_baseline(self) -> str | None:
        """Hash of the file with the local baseline; None where there is none."""
        path = self.path / BASELINE
        return hash_file(path) if path.exists() else None

    def read_baseline(self, digest: str | None = None) -> dict[str, Any] | None:
        """Metrics of the local baseline; None where they are missing or were changed.

        Args:
            digest: hash that the file must have, where it is known.
        """
        path = self.path / BASELINE
        if not path.exists() or (digest is not None and hash_file(path) != digest):
            return None
        try:
            return unseal(parse_json(path.read_text()))
        except (OSError, ValueError):
            return None

    def checkpoint_manifest(self, round: int) -> dict[str, str]:
        """One hash each for the states of clients and the archive as of the end of a round."""
        return {"clients": self.client_store.digest(round), "archive": self.archive.digest(round)}

    def last_checkpoint(self, emit: Callable[..., None] | None = None) -> dict[str, Any] | None:
        """Return the newest server state that is proven, together with all that belongs to it.

        Where a file of a checkpoint is missing or was changed, that is reported as an event, and
        the checkpoint before it is used: the end is the same.

        Raises: UserError where there are checkpoints and none is whole.
        """
        damages: list[str] = []
        for path, digest in self._find_checkpoints(damages):
            try:
                check_digest(path, digest)
                state = load_server_state(path)
                finished = state["federation"]["finished"]
                self.client_store.check(finished, state["manifest"]["clients"])
                self.archive.check(finished, state["manifest"]["archive"])
                check_ledger(self.ledger, state["ledger"])
            except UserError as error:
                damages.append(str(error))
                continue
            for damage in damages:
                reason = f"{damage}; the run goes on from round {finished}"
                (emit or self.record)("damaged", reason=reason, round=finished)
            return state
        if damages:
            raise UserError(f"no checkpoint of {self.path} can be read: {damages[-1]}")
        return None

    def _find_checkpoints(self, damages: list[str]) -> list[tuple[Path, str]]:
        """The server's checkpoints that its index lists, the newest first, each with its hash."""
        entry = self.path / "checkpoints" / "server" / "server"
        try:
            self.server.complete("server")
            index = read_index(entry)
        except CheckpointError as error:
            damages.append(str(error))
            return []
        if not index and any(self._server_checkpoints()):
            damages.append(f"{entry / INDEX} is missing or lists no checkpoint")
        rounds = sorted(index, reverse=True)
        return [(entry / file_name(round), index[round]) for round in rounds]

    def has_checkpoints(self) -> bool:
        """Whether there is anything to go on from."""
        return any(self._server_checkpoints())

    def _server_checkpoints(self) -> Iterator[Path]:
        """Snapshots of the server; what was being written when a process was killed is none."""
        return (self.path / "checkpoints" / "server" / "server").glob("[0-9]*.safetensors")


def load_server_state(path: Path) -> dict[str, Any]:
    """Return the server's state in a checkpoint. Raises: CheckpointError where it is none."""
    state = load(path)
    problem = SERVER_STATE(state, "")
    if problem is not None:
        raise unreadable(path, ValueError(problem))
    return state


def config_differences(before: Any, after: Any, path: str = "") -> list[str]:
    """Describe what changed between two configs; clients are compared by id.

    >>> config_differences({"training": {"rounds": 3}}, {"training": {"rounds": 5}})
    ['training.rounds was 3, is 5']
    """
    if path == "clients":
        before = {info["id"]: info for info in before or []}
        after = {info["id"]: info for info in after or []}
    if not isinstance(before, dict) or not isinstance(after, dict):
        return [] if before == after else [f"{path} was {before}, is {after}"]
    prefix = f"{path}." if path else ""
    changes = []
    for key in {**before, **after}:
        changes += config_differences(before.get(key), after.get(key), f"{prefix}{key}")
    return changes


def with_rounds(config: dict[str, Any], rounds: int) -> dict[str, Any]:
    """A config with another number of rounds."""
    return {**config, "training": {**config["training"], "rounds": rounds}}


def hash_config(config: dict[str, Any]) -> str:
    """Hash of the settings that may not change between a start and a resume."""
    text = json.dumps(without_resumable(config), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def without_resumable(config: dict[str, Any]) -> dict[str, Any]:
    """A config without the settings that may change between a start and a resume."""
    return {key: value for key, value in config.items() if key not in RESUMABLE}


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
