"""Files that are written whole and reach the disk, and hashes that show when one was changed."""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypedDict

from unalike.base.errors import UserError
from unalike.base.json_text import parse_json

MANIFEST = "manifest.json"  # of a finished run
APPENDED = ("events.jsonl",)  # may grow later: what the manifest lists is how it begins
CHUNK = 2**20


class FileEntry(TypedDict):
    """Size and hash of a file in a manifest."""

    bytes: int
    sha256: str


Manifest = dict[str, FileEntry]  # by path inside the run's folder, with forward slashes


def hash_file(path: Path, length: int | None = None) -> str:
    """SHA-256 of a file, or of its first `length` bytes, as hexadecimal digits."""
    digest = hashlib.sha256()
    left = length if length is not None else path.stat().st_size
    with path.open("rb") as file:
        while left > 0:
            chunk = file.read(min(CHUNK, left))
            if not chunk:
                break
            digest.update(chunk)
            left -= len(chunk)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, have reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, even where the power fails."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.unlink(missing_ok=True)  # of a killed process; a link would be written through
        with partial.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def seal(value: Any) -> dict[str, Any]:
    """A JSON value together with its hash."""
    return {"sha256": _hash_value(value), "value": value}


def unseal(sealed: Any) -> Any | None:
    """The value that `seal` was given; None where it was changed since."""
    if not isinstance(sealed, dict) or sealed.keys() != {"sha256", "value"}:
        return None
    return sealed["value"] if _hash_value(sealed["value"]) == sealed["sha256"] else None


def _hash_value(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def describe_file(path: Path) -> FileEntry:
    """Size and hash of a file."""
    return {"bytes": path.stat().st_size, "sha256": hash_file(path)}


def describe_bytes(data: bytes) -> FileEntry:
    """Size and hash of what a file will hold."""
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a run's folder; None where there is none.

    Raises: UserError where it cannot be read.
    """
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        manifest = parse_json(path.read_text())
        return {
            str(name): {"bytes": int(entry["bytes"]), "sha256": str(entry["sha256"])}
            for name, entry in manifest.items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
        raise UserError(
            f"{path} cannot be read, so nothing shows whether the run is as it was written; "
            "restore the file from a copy"
        ) from None


def find_change(folder: Path, name: str, entry: FileEntry) -> str | None:
    """How a file differs from its entry in a manifest; None where it does not."""
    path = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts:
        return f"the manifest of {folder} names a file outside of it, {name}"
    if not path.is_file():
        return f"{path} is missing"
    size = path.stat().st_size
    if name in APPENDED:
        if size >= entry["bytes"] and hash_file(path, entry["bytes"]) == entry["sha256"]:
            return None
        return f"{path} is not as the run wrote it"
    if size != entry["bytes"]:
        return f"{path} has {size:,} bytes, the run wrote {entry['bytes']:,}"
    if hash_file(path) != entry["sha256"]:
        return f"{path} is not as the run wrote it"
    return None


def find_changes(folder: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """How files differ from a manifest, one sentence each; names it does not list are left out."""
    changes = []
    for name in names:
        change = find_change(folder, name, manifest[name]) if name in manifest else None
        if change is not None:
            changes.append(change)
    return changes
