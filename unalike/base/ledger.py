"""Who sent how many bytes to whom, for what and in which round. Counts what passes the door; knows nothing of what it means."""

import csv
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from unalike.base.errors import UserError

Key = tuple[int, str, str, str]  # round, client, direction, operation
COLUMNS = ("round", "client", "direction", "operation", "messages", "bytes")
MEASUREMENTS = (
    "evaluate",
    "appraise",
    "explain",
    "embed",
    "describe",
    "safeguard",
    "grouped",
)  # looking at the outcome is no traffic of a method


@dataclass
class Ledger:
    """Messages and bytes per round, client, direction ("up" to the server, "down" from it) and operation.

    While a run goes on its file grows by what is new (`append`), so that a long run costs no more a round than a short one; what was
    appended for a round that did not come to its end is cut off by whoever goes on (`read`).
    """

    rows: dict[Key, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    fresh: dict[Key, list[int]] = field(
        default_factory=lambda: defaultdict(lambda: [0, 0])
    )  # since the last `append`
    sums: dict[str, int] = field(default_factory=lambda: {"up": 0, "down": 0})
    rounds: dict[tuple[int, str], int] = field(
        default_factory=lambda: defaultdict(int)
    )  # bytes a client sent in a round

    def add(
        self, round: int, client: str, direction: str, operation: str, size: int, messages: int = 1
    ) -> None:
        for rows in (self.rows, self.fresh):
            row = rows[round, client, direction, operation]
            row[0] += messages
            row[1] += size
        if operation not in MEASUREMENTS:
            self.sums[direction] += size
        if direction == "up":
            self.rounds[round, client] += size

    def sent(self, round: int, client: str) -> int:
        """Bytes of all replies of a client in a round."""
        return self.rounds.get((round, client), 0)

    def total(
        self,
        direction: str,
        round: int | None = None,
        client: str | None = None,
        operation: str | None = None,
    ) -> int:
        """Bytes in one direction, of the method itself unless an operation is named (evaluation is left out)."""
        if round is None and client is None and operation is None:
            return self.sums[direction]
        return sum(
            row[1]
            for (r, c, d, o), row in self.rows.items()
            if d == direction
            and round in (None, r)
            and client in (None, c)
            and (o == operation if operation else o not in MEASUREMENTS)
        )

    def append(self, path: Path) -> int:
        """What is new goes to the end of the file; returns its length."""
        with path.open("a", newline="") as file:
            out = csv.writer(file)
            if not file.tell():
                out.writerow(COLUMNS)
            out.writerows([*key, *row] for key, row in sorted(self.fresh.items()))
            self.fresh.clear()
            file.flush()
            return file.tell()

    def write(self, path: Path) -> None:
        """The whole as a table in order, a row for each key."""
        partial = path.with_name(path.name + ".partial")
        self.fresh = defaultdict(lambda: [0, 0], self.rows)
        partial.unlink(missing_ok=True)
        self.append(partial)
        partial.replace(path)

    @classmethod
    def read(cls, path: Path, length: int) -> "Ledger":
        """A ledger from its file as it was at that length; the rest is cut off."""
        ledger = cls()
        if not length:
            path.unlink(missing_ok=True)
            return ledger
        if not path.exists() or path.stat().st_size < length:
            raise UserError(
                f"{path} is gone or was cut short, and a run cannot go on without what it has counted: put it back or run anew"
            )
        with path.open("r+b") as file:
            file.truncate(length)
        with path.open(newline="") as file:
            for round, client, direction, operation, messages, size in list(csv.reader(file))[1:]:
                ledger.add(int(round), client, direction, operation, int(size), int(messages))
        ledger.fresh.clear()
        return ledger
