"""How many bytes each client sent and received, by round and operation."""

import csv
import hashlib
import io
import os
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unalike.base.errors import UserError
from unalike.base.integrity import FileEntry, hash_file

Key = tuple[int, str, str, str]  # round, client, direction, operation
Rows = dict[Key, list[int]]  # [messages, bytes]
COLUMNS = ("round", "client", "direction", "operation", "messages", "bytes")


def _empty_rows() -> Rows:
    return defaultdict(lambda: [0, 0])


@dataclass
class Ledger:
    """Messages and bytes by round, client, direction and operation.

    The direction is "up" (to the server) or "down" (from it).

    During a run `append` writes only the new rows to the file, so that a round of a long run costs
    no more than one of a short run. When a run is resumed, `read` cuts off the rows of a round
    that did not finish.

    Attributes:
        measurements: operations that only measure. Their traffic is not counted as the method's.
    """

    measurements: frozenset[str] = frozenset()
    rows: Rows = field(default_factory=_empty_rows)
    unwritten: Rows = field(default_factory=_empty_rows)  # since the last `append`
    # Bytes in each direction without measurements, in all rounds.
    totals: dict[str, int] = field(default_factory=lambda: {"up": 0, "down": 0})
    # Bytes up by (round, client), measurements included.
    uploads: dict[tuple[int, str], int] = field(default_factory=lambda: defaultdict(int))
    # Of what `append` wrote, so that a long file is not read again in every round.
    digest: Any = field(default_factory=hashlib.sha256, compare=False)

    def add(
        self, round: int, client: str, direction: str, operation: str, size: int, messages: int = 1
    ) -> None:
        """Count `messages` messages of `size` bytes together."""
        for rows in (self.rows, self.unwritten):
            row = rows[round, client, direction, operation]
            row[0] += messages
            row[1] += size
        if operation not in self.measurements:
            self.totals[direction] += size
        if direction == "up":
            self.uploads[round, client] += size

    def upload_bytes(self, round: int, client: str) -> int:
        """Bytes of all replies of a client in a round."""
        return self.uploads.get((round, client), 0)

    def total(
        self,
        direction: str,
        round: int | None = None,
        client: str | None = None,
        operation: str | None = None,
    ) -> int:
        """Bytes in one direction, limited to a round, a client or an operation.

        Measurements are left out unless `operation` names one.
        """
        if round is None and client is None and operation is None:
            return self.totals[direction]
        total = 0
        for key, (_, size) in self.rows.items():
            if key[2] != direction or round not in (None, key[0]) or client not in (None, key[1]):
                continue
            if key[3] == operation or (operation is None and key[3] not in self.measurements):
                total += size
        return total

    def totals_by_client(self) -> dict[str, dict[str, int]]:
        """Bytes up and down of each client, without measurements."""
        totals: dict[str, dict[str, int]] = {}
        for (_, client, direction, operation), (_, size) in self.rows.items():
            total = totals.setdefault(client, {"up": 0, "down": 0})
            if operation not in self.measurements:
                total[direction] += size
        return totals

    def append(self, path: Path) -> FileEntry:
        """Append the new rows to the file; returns the length and the hash of the whole file."""
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        with path.open("ab") as file:
            if not file.tell():
                self.digest = hashlib.sha256()
                writer.writerow(COLUMNS)
            writer.writerows([*key, *row] for key, row in sorted(self.unwritten.items()))
            self.unwritten.clear()
            data = text.getvalue().encode()
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            self.digest.update(data)
            return {"bytes": file.tell(), "sha256": self.digest.hexdigest()}

    def write(self, path: Path) -> None:
        """Replace the file by a sorted table with one row for each key."""
        partial = path.with_name(path.name + ".partial")
        self.unwritten = defaultdict(lambda: [0, 0], self.rows)
        partial.unlink(missing_ok=True)
        self.append(partial)
        partial.replace(path)

    @classmethod
    def read(
        cls,
        path: Path,
        written: FileEntry | None = None,
        measurements: frozenset[str] = frozenset(),
    ) -> "Ledger":
        """Read a ledger from the beginning of its file and cut the file off there.

        Args:
            path: the file.
            written: what `append` returned then; None: the ledger is new, and the file deleted.
            measurements: see the class.
        Raises: UserError, if the file is missing, shorter, or begins otherwise.
        """
        ledger = cls(measurements=measurements)
        if written is None:
            path.unlink(missing_ok=True)
            return ledger
        check_ledger(path, written)
        with path.open("r+b") as file:
            file.truncate(written["bytes"])
        data = path.read_bytes()
        ledger.digest.update(data)
        for row in list(csv.reader(io.StringIO(data.decode(), newline="")))[1:]:
            round, client, direction, operation, messages, size = row
            ledger.add(int(round), client, direction, operation, int(size), int(messages))
        ledger.unwritten.clear()
        return ledger


def check_ledger(path: Path, written: FileEntry) -> None:
    """Raise UserError where a file does not begin with what a ledger wrote to it."""
    if not path.exists() or path.stat().st_size < written["bytes"]:
        problem = "is missing or was cut short"
    elif hash_file(path, written["bytes"]) != written["sha256"]:
        problem = "was changed"
    else:
        return
    raise UserError(
        f"{path} {problem}. A run cannot be resumed without the bytes counted so far: restore the "
        "file from a copy, or start a new run in another folder"
    )
