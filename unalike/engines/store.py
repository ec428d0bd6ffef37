"""States on disk: numbered snapshots of clients and servers, each written whole or not at all. Knows nothing of what they mean."""

import json
import os
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from unalike.base.errors import UserError
from unalike.base.message import encoded_size, from_json, to_json


class CheckpointError(UserError):
    """A checkpoint that cannot be read."""


def save(path: Path, value: Any) -> None:
    """Write a tree of tensors, numbers and strings as safetensors; a reader sees the old file or the new one, never a part."""
    tensors: dict[str, Any] = {}

    def put(name: str, tensor: Any) -> str:
        while name in tensors or name == "__metadata__":  # "a/b" may be one key or two
            name += "'"
        tensors[name] = tensor.detach().cpu().contiguous().clone()
        return name

    described = json.dumps(to_json(value, put))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        save_file(tensors, partial, metadata={"value": described})
    except SafetensorError as error:
        partial.unlink(missing_ok=True)
        raise OSError(
            f"{path} cannot be written ({error}); look whether the disk is full, then resume the run"
        ) from None
    partial.replace(path)


def load(path: Path) -> Any:
    try:
        with safe_open(path, framework="pt") as file:
            return from_json(json.loads(file.metadata()["value"]), file.get_tensor)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise unreadable(path, error) from None


def unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path} cannot be read ({error}); it was cut short or is no checkpoint"
    )


class Store:
    """Snapshots of many states in a folder: `name/000012.safetensors` as of round 12, `name/current.safetensors` since then."""

    def __init__(self, folder: Path, keeps: int = 2):
        self.folder, self.keeps = Path(folder), keeps

    def keep(self, name: str, state: Any) -> None:
        """The state as it is now, in the middle of a round."""
        save(self._path(name), state)

    def snapshot(self, name: str, state: Any | None, round: int) -> None:
        """The state at the end of a round; None: what was last kept."""
        if state is not None:
            save(self._path(name, round), state)
            self._path(name).unlink(missing_ok=True)
        else:
            self._path(name).replace(self._path(name, round))
        for older in self._rounds(name)[: -self.keeps]:
            self._path(name, older).unlink()

    def unsettled(self, name: str) -> bool:
        """Whether something was kept since the last snapshot."""
        return self._path(name).exists()

    def newest(self, name: str) -> Any | None:
        """The latest state, None if nothing was ever saved."""
        path = self.newest_path(name)
        return load(path) if path is not None else None

    def newest_path(self, name: str) -> Path | None:
        if self.unsettled(name):
            return self._path(name)
        rounds = self._rounds(name)
        return self._path(name, rounds[-1]) if rounds else None

    def check(self, round: int) -> None:
        """Raises CheckpointError where a state as of a round was cut short; reads headers only."""
        for entry in self.folder.iterdir() if self.folder.exists() else ():
            if rounds := [r for r in self._rounds(entry.name, quoted=True) if r <= round]:
                path = entry / f"{rounds[-1]:06d}.safetensors"
                try:
                    safe_open(path, framework="pt")
                except (SafetensorError, OSError) as error:
                    raise unreadable(path, error) from None

    def rewind(self, round: int) -> None:
        """Forget everything after a round, and everything that is not a round's end."""
        for entry in self.folder.iterdir() if self.folder.exists() else ():
            if entry.is_dir():
                (entry / "current.safetensors").unlink(missing_ok=True)
                for later in (r for r in self._rounds(entry.name, quoted=True) if r > round):
                    (entry / f"{later:06d}.safetensors").unlink()

    def _rounds(self, name: str, quoted: bool = False) -> list[int]:
        folder = self.folder / (name if quoted else quote(name))
        return (
            sorted(int(p.stem) for p in folder.glob("*.safetensors") if p.stem.isdigit())
            if folder.exists()
            else []
        )

    def _path(self, name: str, round: int | None = None) -> Path:
        return (
            self.folder
            / quote(name)
            / f"{'current' if round is None else f'{round:06d}'}.safetensors"
        )


class Archive:
    """Values by name, the latest of them in memory up to so many bytes, all of them on disk; `save` makes them a round's."""

    def __init__(self, store: Store, limit: int = 2**30):
        self.store, self.limit = store, limit
        self.held: dict[str, Any] = {}
        self.changed: set[str] = set()  # since the last round that was saved

    def __contains__(self, name: str) -> bool:
        return name in self.held or self.store.newest_path(name) is not None

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        return self.held[name] if name in self.held else self.store.newest(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self.held.pop(name, None)
        self.held[name] = value
        self.changed.add(name)
        while self.held and sum(encoded_size(kept) for kept in self.held.values()) > self.limit:
            oldest = next(iter(self.held))
            kept = self.held.pop(oldest)
            if oldest in self.changed:
                self.store.keep(oldest, kept)

    def save(self, round: int) -> None:
        for name in sorted(self.changed):
            self.store.snapshot(name, self.held.get(name), round)
        self.changed.clear()

    def load(self, round: int) -> None:
        self.store.rewind(round)
        self.held.clear()
        self.changed.clear()


def quote(name: str) -> str:
    """A client's id as a folder name: whatever is not a plain character is written as its number."""
    return re.sub(r"[^A-Za-z0-9_-]", lambda m: f"%{ord(m[0]):x}.", name) or "%"
