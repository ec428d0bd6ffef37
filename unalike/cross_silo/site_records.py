"""What a client keeps of its own: an audit log, a privacy account, and each run's ledger.

All are in the folder `unalike` beside client.yaml. A server can neither read nor change them.
"""

import csv
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from unalike.base.errors import UserError
from unalike.base.ledger import COLUMNS
from unalike.core.privacy import composed_epsilon

AUDIT_LOG = "audit.jsonl"
PRIVACY_ACCOUNT = "privacy.jsonl"


class AuditLog:
    """Who ran what here, one JSON object a line, only ever appended to.

    Each line has in `chain` a hash of itself and the line before: `broken_line` finds where a
    line was changed or taken out. Whoever may write the file can still write all of it anew, so
    note the last `chain` elsewhere if that matters.

    Args:
        path: the file; made when something is written.
    """

    def __init__(self, path: Path):
        self.path = path

    def write(self, event: str, sync: bool = True, **facts: Any) -> None:
        """Append a line and, with `sync`, bring it to the disk."""
        with locked(self.path) as file:
            last = last_line(file)
            chain = json.loads(last)["chain"] if last else ""
            when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            entry = {"time": when, "event": event, **facts}
            entry["chain"] = _link(chain, entry)
            append_line(file, entry, sync)

    def entries(self) -> list[dict[str, Any]]:
        """All lines, in order."""
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text("utf-8").splitlines()]

    def broken_line(self) -> int | None:
        """The number of the first line that does not fit the one before; None: all do."""
        chain = ""
        for number, entry in enumerate(self.entries(), start=1):
            stored = entry.pop("chain", None)
            chain = _link(chain, entry)
            if stored != chain:
                return number
        return None


def _link(chain: str, entry: dict[str, Any]) -> str:
    return hashlib.sha256((chain + json.dumps(entry)).encode()).hexdigest()


class PrivacyAccount:
    """What all runs together have released of a client's data.

    A line is on the disk before the reply it counts leaves. Gaussian mechanisms compose by the
    sum of their squared inverse multipliers, whatever run each belongs to (Dong et al. 2022,
    cor. 3.3, https://arxiv.org/abs/1905.02383).

    Args:
        folder: of the client.
        limit: the most epsilon that may be spent; None: counted only.
        delta: of (epsilon, delta).
    """

    def __init__(self, folder: Path, limit: float | None, delta: float):
        self.path = folder / PRIVACY_ACCOUNT
        self.limit = limit
        self.delta = delta
        self.counts: dict[float, int] = {}  # by noise, of the first `offset` bytes of the file
        self.offset = 0

    def releases(self) -> dict[float, int]:
        """Releases so far, by noise.

        Raises: UserError where the file was changed: without it nothing may be released.
        """
        if self.path.exists():
            with self.path.open("rb") as file:
                self._read_new_lines(file)
        return self.counts

    def _read_new_lines(self, file: BinaryIO) -> None:
        """Count the lines that this or another process wrote since the last time."""
        if file.seek(0, os.SEEK_END) < self.offset:
            raise self._damaged()
        file.seek(self.offset)
        lines, newline, _ = file.read().rpartition(b"\n")
        for line in lines.splitlines():
            try:
                entry = json.loads(line)
                noise, count = float(entry["noise"]), int(entry["releases"])
            except (ValueError, KeyError, TypeError):
                raise self._damaged() from None
            self.counts[noise] = self.counts.get(noise, 0) + count
        self.offset += len(lines) + len(newline)

    def _damaged(self) -> UserError:
        return UserError(
            f"{self.path} was cut short, or has a line that is no entry of a privacy account: "
            "restore the file, what was spent is known from nowhere else"
        )

    def epsilon(self, noise: float = 0.0, releases: int = 0) -> float | None:
        """What is spent, or would be after so many more releases; None: nothing bounds it."""
        counts = dict(self.releases())
        counts[noise] = counts.get(noise, 0) + releases
        return composed_epsilon(counts, self.delta)

    def allows(self, noise: float, releases: int) -> bool:
        """Whether so many more releases would stay within the limit."""
        if self.limit is None:
            return True
        epsilon = self.epsilon(noise, releases)
        return epsilon is not None and epsilon <= self.limit

    def spend(self, noise: float, releases: int, **facts: Any) -> bool:
        """Count releases and bring that to the disk, unless they would exceed the limit.

        Returns: whether they were counted, and may leave.
        """
        with locked(self.path) as file:
            last_line(file)  # cuts off half a line of a killed process, whose reply never left
            if not self.allows(noise, releases):
                return False
            append_line(file, {"time": time.time(), "noise": noise, "releases": releases, **facts})
        return True


class SiteLedger:
    """The bytes of one run as the client counts them, in the form of a run's ledger.csv.

    Args:
        folder: of the run, at the client.
        client: its id.
    """

    def __init__(self, folder: Path, client: str):
        self.path = folder / "ledger.csv"
        self.client = client

    def add(self, round: int, operation: str, received: int, sent: int) -> None:
        """Count a message and its answer. What was sent again did leave, and counts again."""
        rows = [
            [round, self.client, "down", operation, 1, received],
            [round, self.client, "up", operation, 1, sent],
        ]
        with self.path.open("a", newline="") as file:
            writer = csv.writer(file)
            if not file.tell():
                writer.writerow(COLUMNS)
            writer.writerows(rows)


@contextmanager
def locked(path: Path) -> Iterator[BinaryIO]:
    """Open a file that only its owner may read, for appending, while no other process writes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file  # type: ignore[misc]


def last_line(file: BinaryIO) -> bytes:
    """The last whole line of a file; empty where there is none. Half a line is cut off."""
    length = file.seek(0, os.SEEK_END)
    size = 4096
    while True:
        start = max(0, length - size)
        file.seek(start)
        content = file.read(length - start)
        whole = content.rfind(b"\n") + 1
        if whole < len(content) and (whole or not start):
            file.truncate(start + whole)  # a process was killed while it wrote this
        lines = content[:whole].splitlines()
        if len(lines) > 1 or not start:
            return lines[-1] if lines else b""
        size *= 8


def append_line(file: BinaryIO, entry: dict[str, Any], sync: bool = True) -> None:
    """Append an entry as a line of JSON and, with `sync`, bring it to the disk."""
    file.seek(0, os.SEEK_END)
    file.write(json.dumps(entry).encode() + b"\n")
    file.flush()
    if sync:
        os.fsync(file.fileno())
