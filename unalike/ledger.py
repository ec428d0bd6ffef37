"""Who sent how many bytes to whom, for what and in which round. Counts what passes the door; knows nothing of what it means."""

import csv
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

Key = tuple[int, str, str, str]          # round, client, direction, operation
COLUMNS = ("round", "client", "direction", "operation", "messages", "bytes")
FREE = ("evaluate", "appraise", "embed", "describe", "safeguard")   # looking at the outcome is no part of a method's traffic


@dataclass
class Ledger:
    """Messages and bytes per round, client, direction ("up" to the server, "down" from it) and operation."""

    rows: dict[Key, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))

    def add(self, round: int, client: str, direction: str, operation: str, size: int) -> None:
        row = self.rows[round, client, direction, operation]
        row[0] += 1
        row[1] += size

    def total(self, direction: str, round: int | None = None, client: str | None = None, operation: str | None = None) -> int:
        """Bytes in one direction, of the method itself unless an operation is named (evaluation is left out)."""
        return sum(row[1] for (r, c, d, o), row in self.rows.items()
                   if d == direction and round in (None, r) and client in (None, c)
                   and (o == operation if operation else o not in FREE))

    def write(self, path: Path) -> None:
        partial = path.with_name(path.name + ".partial")
        with partial.open("w", newline="") as file:
            out = csv.writer(file)
            out.writerow(COLUMNS)
            out.writerows([*key, *row] for key, row in sorted(self.rows.items()))
        partial.replace(path)

    def as_lists(self) -> list[list[int | str]]:
        return [[*key, *row] for key, row in self.rows.items()]

    @classmethod
    def from_lists(cls, lists: list[list[int | str]]) -> "Ledger":
        ledger = cls()
        for round, client, direction, operation, messages, size in lists:
            ledger.rows[int(round), str(client), str(direction), str(operation)] = [int(messages), int(size)]
        return ledger
