"""States on disk: snapshots by round, each written whole or not at all.

Knows nothing of what the states mean.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from unalike.base.errors import UserError
from unalike.base.integrity import hash_file, sync, write_whole
from unalike.base.json_text import parse_json
from unalike.base.message import encoded_size, from_json, to_json

SUFFIX = ".safetensors"
INDEX = "index.json"  # hashes of the snapshots of a state, by round
MAX_NAME = 200  # characters of a folder's name; file systems take 255 bytes
CURRENT = "current"  # the file of a state in the middle of a round


class CheckpointError(UserError):
    """A checkpoint that is missing, cannot be read or was changed."""


def save(path: Path, value: Any) -> None:
    """Write nested dicts and lists of tensors, numbers and strings as one safetensors file.

    Other processes see the old file or the new one, never a part.

    Raises: OSError where the disk is full.
    """
    tensors: dict[str, Any] = {}

    def add_tensor(name: str, tensor: Any) -> str:
        # "a/b" may be one key or two; "__metadata__" is safetensors' own
        while name in tensors or name == "__metadata__":
            name += "'"
        tensors[name] = tensor.detach().cpu().contiguous().clone()
        return name

    description = json.dumps(to_json(value, add_tensor))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        save_file(tensors, partial, metadata={"value": description})
    except SafetensorError as error:
        partial.unlink(missing_ok=True)
        raise OSError(
            f"{path} cannot be written ({error}); check whether the disk is full, "
            "then resume the run"
        ) from None
    partial.replace(path)


def load(path: Path) -> Any:
    """Read what `save` wrote; raises CheckpointError where that is not possible."""
    try:
        with safe_open(path, framework="pt") as file:
            return from_json(parse_json(file.metadata()["value"]), file.get_tensor)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise unreadable(path, error) from None


def unreadable(path: Path, error: Exception) -> CheckpointError:
    """The error for a file that cannot be read."""
    return CheckpointError(
        f"checkpoint {path} cannot be read ({error}); it was cut short or is no checkpoint"
    )


def check_digest(path: Path, digest: str) -> None:
    """Raise CheckpointError where a snapshot is missing or not the one with this SHA-256."""
    try:
        actual = hash_file(path)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {path} cannot be read ({error.strerror}); it was written before"
        ) from None
    if actual != digest:
        raise CheckpointError(
            f"checkpoint {path} cannot be read (its hash is not the one that was written down); "
            "it was changed since"
        )


class Store:
    """Snapshots of many named states in a folder.

    `NAME/000012.safetensors` is the state at the end of round 12, `NAME/current.safetensors` a
    later one in the middle of a round. `NAME/index.json` has the hash of each snapshot, so that one
    that is missing or was changed is noticed.

    Args:
        folder: made when something is written.
        snapshots: of each state, how many are kept.
    """

    def __init__(self, folder: Path, snapshots: int = 2):
        self.folder = Path(folder)
        self.snapshots = snapshots
        # Indexes that were read, with the time and file number they had.
        self._indexes: dict[str, tuple[tuple[int, int], dict[int, str]]] = {}

    def write_current(self, name: str, state: Any) -> None:
        """Write a state in the middle of a round."""
        save(self._path(name), state)

    def snapshot(self, name: str, state: Any | None, round: int) -> None:
        """Write the state at the end of a round and delete old snapshots.

        The index makes it count. It is written before the file gets its name, see `complete`.

        Args:
            state: None: the one that `write_current` wrote.
        """
        if state is not None:
            self.write_current(name, state)
        entry = self.folder / quote(name)
        current = self._path(name)
        digest = hash_file(current)
        sync(current)  # before the rename: a file under its name is whole even if the power fails
        index = {**read_index(entry), round: digest}
        for old_round in sorted(index)[: -self.snapshots]:
            del index[old_round]
        write_index(entry, index)
        current.replace(self._path(name, round))
        for old_round in self._rounds(entry.name)[: -self.snapshots]:
            self._path(name, old_round).unlink()

    def complete(self, name: str) -> None:
        """Give the last snapshot its name, where the process was killed just before that."""
        index = read_index(self.folder / quote(name))
        if not index or not self.has_current(name):
            return
        path = self._path(name, max(index))
        if not path.exists() and hash_file(self._path(name)) == index[max(index)]:
            self._path(name).replace(path)

    def has_current(self, name: str) -> bool:
        """Whether a state was written since the last snapshot."""
        return self._path(name).exists()

    def read_latest(self, name: str) -> Any | None:
        """The latest state; None where there is none.

        Raises: CheckpointError where it cannot be read, or is a snapshot that was changed.
        """
        path = self.latest_path(name)
        if path is None:
            return None
        if path.stem.isdigit():
            digest = read_index(path.parent).get(int(path.stem))
            if digest is not None:
                check_digest(path, digest)
        return load(path)

    def latest_path(self, name: str) -> Path | None:
        """The file of the latest state; None where there is none."""
        if self.has_current(name):
            return self._path(name)
        rounds = self._rounds(quote(name))
        return self._path(name, rounds[-1]) if rounds else None

    def manifest(self, round: int) -> dict[str, str]:
        """Hashes of the snapshots that belong to the end of a round, by their paths."""
        files: dict[str, str] = {}
        for entry in self._entries():
            index = self._cached_index(entry)
            rounds = [number for number in index if number <= round]
            if rounds:
                last = max(rounds)
                files[f"{entry.name}/{file_name(last)}"] = index[last]
        return files

    def digest(self, round: int) -> str:
        """One hash for all states as of the end of a round, their names included."""
        lines = sorted(f"{sha256} {path}" for path, sha256 in self.manifest(round).items())
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def check(self, round: int, digest: str | None = None) -> None:
        """Raise CheckpointError where a state as of a round is missing or was changed.

        Args:
            round: the state that belongs to its end is checked.
            digest: what `digest` returned then; also finds states that are missing altogether.
        """
        for entry in self._entries():
            written = [number for number in self._rounds(entry.name) if number <= round]
            index = read_index(entry)
            if written and written[-1] not in index:
                raise CheckpointError(
                    f"checkpoint {entry / file_name(written[-1])} cannot be read (it is not listed "
                    f"in {entry / INDEX})"
                )
        for path, sha256 in self.manifest(round).items():
            check_digest(self.folder / path, sha256)
        if digest is not None and self.digest(round) != digest:
            raise CheckpointError(
                f"checkpoint {self.folder} cannot be read (it does not hold the states that were "
                f"written by the end of round {round}); files are missing or were replaced"
            )

    def rewind(self, round: int) -> None:
        """Delete everything that was written after the end of a round.

        Raises: CheckpointError where a state as of that round is missing or was changed. Nothing
            is deleted then.
        """
        if round:
            self.check(round)
        for entry in self._entries():
            (entry / file_name(None)).unlink(missing_ok=True)
            later_rounds = [number for number in self._rounds(entry.name) if number > round]
            if later_rounds:
                index = read_index(entry) if round else {}
                write_index(entry, {r: h for r, h in index.items() if r <= round})
            for later_round in later_rounds:
                (entry / file_name(later_round)).unlink()

    def rounds(self, name: str) -> list[int]:
        """Rounds of the snapshots of a state, in order."""
        return self._rounds(quote(name))

    def path(self, name: str, round: int) -> Path:
        """The file of a state's snapshot at the end of a round."""
        return self._path(name, round)

    def _cached_index(self, entry: Path) -> dict[int, str]:
        """The index of a state, read again only where its file has changed."""
        try:
            stat = os.stat(f"{entry}/{INDEX}")
        except OSError:
            return {}
        version = (stat.st_mtime_ns, stat.st_ino)
        known = self._indexes.get(entry.name)
        if known is None or known[0] != version:
            known = (version, read_index(entry))
            self._indexes[entry.name] = known
        return known[1]

    def _entries(self) -> Iterator[Path]:
        """The folder of each state."""
        if self.folder.exists():
            yield from (entry for entry in self.folder.iterdir() if entry.is_dir())

    def _rounds(self, folder_name: str) -> list[int]:
        """Rounds of the snapshots in the folder of a state, in order."""
        paths = (self.folder / folder_name).glob(f"*{SUFFIX}")
        return sorted(int(path.stem) for path in paths if path.stem.isdigit())

    def _path(self, name: str, round: int | None = None) -> Path:
        return self.folder / quote(name) / file_name(round)


def read_index(entry: Path) -> dict[int, str]:
    """Hashes of the snapshots in the folder of a state, by round; empty where there is no index.

    Raises: CheckpointError where the index cannot be read.
    """
    path = entry / INDEX
    try:
        index = parse_json(path.read_text())
        return {int(round): str(digest) for round, digest in index.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        raise unreadable(path, error) from None


def write_index(entry: Path, index: dict[int, str]) -> None:
    """Write the hashes of the snapshots in the folder of a state."""
    write_whole(entry / INDEX, json.dumps({str(r): h for r, h in sorted(index.items())}).encode())


def file_name(round: int | None) -> str:
    """The file of a round's snapshot; None: of the state in the middle of a round."""
    return f"{CURRENT}{SUFFIX}" if round is None else f"{round:06d}{SUFFIX}"


class Archive:
    """A dict of large values: all on disk, the newest also in memory.

    `save` makes what was set part of a round's checkpoint.

    Args:
        store: where values go.
        limit: bytes that stay in memory.
    """

    def __init__(self, store: Store, limit: int = 2**30):
        self.store = store
        self.limit = limit
        self.in_memory: dict[str, Any] = {}  # the oldest first
        self.changed: set[str] = set()  # since the last checkpoint

    def __contains__(self, name: str) -> bool:
        return name in self.in_memory or self.store.latest_path(name) is not None

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        return self.in_memory[name] if name in self.in_memory else self.store.read_latest(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self.in_memory.pop(name, None)
        self.in_memory[name] = value
        self.changed.add(name)
        while self.in_memory and sum(map(encoded_size, self.in_memory.values())) > self.limit:
            oldest = next(iter(self.in_memory))
            old_value = self.in_memory.pop(oldest)
            if oldest in self.changed:
                self.store.write_current(oldest, old_value)

    def save(self, round: int) -> None:
        """Write everything that changed as of the end of a round."""
        for name in sorted(self.changed):
            self.store.snapshot(name, self.in_memory.get(name), round)
        self.changed.clear()

    def load(self, round: int) -> None:
        """Go back to the end of a round."""
        self.store.rewind(round)
        self.in_memory.clear()
        self.changed.clear()


def quote(name: str) -> str:
    """A client's id as a folder name.

    Characters other than letters, digits, "_" and "-" are written by their code. What is too long
    for a file system ends in a hash.

    >>> quote("st. mary")
    'st%2e.%20.mary'
    """
    quoted = re.sub(r"[^A-Za-z0-9_-]", lambda match: f"%{ord(match[0]):x}.", name) or "%"
    if len(quoted) <= MAX_NAME:
        return quoted
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{quoted[: MAX_NAME - 65]}%{digest}"  # "%" and no code: no other name ends so
