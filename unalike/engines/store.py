"""States on disk: snapshots by round, each written whole or not at all.

Knows nothing of what the states mean.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from unalike.base.errors import UserError
from unalike.base.message import encoded_size, from_json, to_json

SUFFIX = ".safetensors"
CURRENT = "current"  # the file of a state in the middle of a round


class CheckpointError(UserError):
    """A checkpoint that cannot be read."""


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
            return from_json(json.loads(file.metadata()["value"]), file.get_tensor)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise unreadable(path, error) from None


def unreadable(path: Path, error: Exception) -> CheckpointError:
    """The error for a file that cannot be read."""
    return CheckpointError(
        f"checkpoint {path} cannot be read ({error}); it was cut short or is no checkpoint"
    )


class Store:
    """Snapshots of many named states in a folder.

    `NAME/000012.safetensors` is the state at the end of round 12, `NAME/current.safetensors` a
    later one in the middle of a round.

    Args:
        folder: made when something is written.
        snapshots: of each state, how many are kept.
    """

    def __init__(self, folder: Path, snapshots: int = 2):
        self.folder = Path(folder)
        self.snapshots = snapshots

    def write_current(self, name: str, state: Any) -> None:
        """Write a state in the middle of a round."""
        save(self._path(name), state)

    def snapshot(self, name: str, state: Any | None, round: int) -> None:
        """Write the state at the end of a round and delete old snapshots.

        Args:
            state: None: the one that `write_current` wrote.
        """
        if state is not None:
            save(self._path(name, round), state)
            self._path(name).unlink(missing_ok=True)
        else:
            self._path(name).replace(self._path(name, round))
        for old_round in self._rounds(quote(name))[: -self.snapshots]:
            self._path(name, old_round).unlink()

    def has_current(self, name: str) -> bool:
        """Whether a state was written since the last snapshot."""
        return self._path(name).exists()

    def read_latest(self, name: str) -> Any | None:
        """The latest state; None where there is none."""
        path = self.latest_path(name)
        return load(path) if path is not None else None

    def latest_path(self, name: str) -> Path | None:
        """The file of the latest state; None where there is none."""
        if self.has_current(name):
            return self._path(name)
        rounds = self._rounds(quote(name))
        return self._path(name, rounds[-1]) if rounds else None

    def check_readable(self, round: int) -> None:
        """Raise CheckpointError where a state as of a round was cut short; reads headers only."""
        for entry in self._entries():
            rounds = [r for r in self._rounds(entry.name) if r <= round]
            if not rounds:
                continue
            path = entry / file_name(rounds[-1])
            try:
                safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise unreadable(path, error) from None

    def rewind(self, round: int) -> None:
        """Delete everything that was written after the end of a round."""
        for entry in self._entries():
            (entry / file_name(None)).unlink(missing_ok=True)
            for later_round in self._rounds(entry.name):
                if later_round > round:
                    (entry / file_name(later_round)).unlink()

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

    Characters other than letters, digits, "_" and "-" are written by their code.

    >>> quote("st. mary")
    'st%2e.%20.mary'
    """
    return re.sub(r"[^A-Za-z0-9_-]", lambda match: f"%{ord(match[0]):x}.", name) or "%"
