"""What a tracker does, and what it is told of a run. Knows no single tracker."""

import json
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from unalike.base.json_text import parse_json
from unalike.base.record import NAMES, NUMBER, TEXT, fields
from unalike.report.folder import check_inside

Point = tuple[str, int]  # name of a series, and step
ENTRY = fields(id=TEXT, step=NUMBER, names=NAMES)  # a line of a journal


@dataclass(frozen=True)
class TrackedRun:
    """A run, as trackers see it.

    Attributes:
        folder: the run's folder; a tracker may keep files in `folder / "tracking"`.
        project: name of the scenario.
        parameters: the config with dotted names: `{"training.lr": 0.001}`.
    """

    folder: Path
    project: str
    parameters: dict[str, Any]

    @property
    def name(self) -> str:
        """What the run is called in a tracker: the name of its folder."""
        return self.folder.resolve().name


class Tracker(Protocol):
    """Writes one run to a store. All calls come from one thread, in this order."""

    def open(self, run: TrackedRun) -> set[Point]:
        """Begin, or go on with, a run and its parameters; return the points it already has."""

    def log(self, values: dict[str, float], step: int) -> None:
        """Add one point to each of the series in `values`, so that others can see it now."""

    def close(self, files: list[Path], finished: bool) -> None:
        """Add files and end; `finished` is false for a run that can be resumed."""


class Journal:
    """The name of a run in a store, and the points sent to it, kept in the run's folder.

    For stores that cannot be asked which points they have. A point is written down before it is
    sent, so it is never sent twice.

    Args:
        run: the run.
        tracker: name of the tracker.
    """

    def __init__(self, run: TrackedRun, tracker: str):
        self.path = run.folder / "tracking" / f"{tracker}.jsonl"
        check_inside(self.path, run.folder)
        self.path.parent.mkdir(exist_ok=True)
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.known: set[Point] = set()
        self.id = ""
        for line in lines:
            entry = _parse(line)
            self.id = entry.get("id") or self.id
            step = entry.get("step")
            if step is not None:
                self.known |= {(name, step) for name in entry.get("names") or ()}

    def run_id(self) -> str:
        """Return the run's name in the store: that of an earlier start, or a new one."""
        if not self.id:
            self.id = uuid.uuid4().hex[:12]
            self._append({"id": self.id})
        return self.id

    def add(self, values: dict[str, float], step: int) -> None:
        """Write down which points are sent now."""
        self._append({"step": step, "names": list(values)})

    def _append(self, entry: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write("\n" + json.dumps(entry))  # the line before may have been cut short


def _parse(line: str) -> dict[str, Any]:
    """An entry of a journal; empty where the line was cut short or is none."""
    try:
        entry = parse_json(line)
    except ValueError:
        return {}
    return entry if ENTRY(entry, "") is None else {}
