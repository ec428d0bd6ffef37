"""How many bytes each client sent and received, by round and operation."""

import csv
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from unalike.base.errors import UserError

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

    def append(self, path: Path) -> int:
        """Append the new rows to the file; returns the file's length in bytes."""
        with path.open("a", newline="") as file:
            writer = csv.writer(file)
            if not file.tell():
                writer.writerow(COLUMNS)
            writer.writerows([*key, *row] for key, row in sorted(self.unwritten.items()))
            self.unwritten.clear()
            file.flush()
            return file.tell()

    def write(self, path: Path) -> None:
        """Replace the file by a sorted table with one row for each key."""
        partial = path.with_name(path.name + ".partial")
        self.unwritten = defaultdict(lambda: [0, 0], self.rows)
        partial.unlink(missing_ok=True)
        self.append(partial)
        partial.replace(path)

    @classmethod
    def read(cls, path: Path, length: int, measurements: frozenset[str] = frozenset()) -> "Ledger":
        """Read a ledger from the first `length` bytes of its file and cut the file off there.

        Raises: UserError, if the file is missing or shorter.
        """
        ledger = cls(measurements=measurements)
        if not length:
            path.unlink(missing_ok=True)
            return ledger
        if not path.exists() or path.stat().st_size < length:
            raise UserError(
                f"{path} is missing or was cut short. A run cannot be resumed without the bytes "
                "counted so far: restore the file or start a new run"
            )
        with path.open("r+b") as file:
            file.truncate(length)
        with path.open(newline="") as file:
            for round, client, direction, operation, messages, size in list(csv.reader(file))[1:]:
                ledger.add(int(round), client, direction, operation, int(size), int(messages))
        ledger.unwritten.clear()
        return ledger
