"""A run folder, read from disk. Knows the files and their shape, not what the numbers mean."""

import csv
import json
from dataclasses import dataclass, field
from pathlib import Path

from unalike.base.errors import UserError
from unalike.base.events import parse_event

LEDGER = ["round", "client", "direction", "operation", "messages", "bytes"]


@dataclass
class Run:
    """What one run left behind. `results` is None while the run has not finished."""

    path: Path
    config: dict
    results: dict | None
    events: list[dict] = field(default_factory=list)
    ledger: list[dict] = field(default_factory=list)
    unreadable: int = (
        0  # lines of events.jsonl and ledger.csv cut short, as a killed run leaves them
    )

    @property
    def clients(self) -> dict[str, dict]:
        """The results of each client; none while the run has not finished."""
        return self.results["clients"] if self.results else {}

    def material(self) -> dict[str, dict[int, dict]]:
        """{name: {round: arrays}}: what the method left to be drawn. A file that cannot be read is left out."""
        found: dict[str, dict[int, dict]] = {}
        for file in sorted((self.path / "pictures").glob("*-*.npz")):
            name, _, at = file.stem.rpartition("-")
            if at.isdigit() and (arrays := _arrays(file)):
                found.setdefault(name.replace("_", " "), {})[int(at)] = arrays
        return found

    @property
    def scenario(self) -> str:
        return str(
            (self.results or {}).get("scenario") or self.config.get("name") or self.path.name
        )

    @property
    def algorithm(self) -> str:
        named = self.config.get("algorithm")
        return str(
            (self.results or {}).get("algorithm")
            or (named.get("name") if isinstance(named, dict) else named)
            or "unknown"
        )

    @property
    def seed(self) -> int | None:
        return (self.results or {}).get("seed", self.config.get("seed"))


def read(path: str | Path) -> Run:
    """The run kept in the folder `path`, finished or not."""
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"{path} is not a run folder: there is no such folder.")
    if not (path / "config.yaml").is_file():
        raise UserError(f"{path} is not a run folder: it has no config.yaml.")
    events, cut = _events(path / "events.jsonl")
    ledger, torn = _ledger(path / "ledger.csv")
    return Run(
        path,
        _config(path / "config.yaml"),
        _results(path / "results.json"),
        events,
        ledger,
        cut + torn,
    )


def _config(file: Path) -> dict:
    import yaml

    try:
        config = yaml.load(
            _text(file), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        )  # the C one is ten times as quick
    except yaml.YAMLError as error:
        raise UserError(f"{file} is not YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(config, dict):
        raise UserError(f"{file} should hold named settings, got {type(config).__name__}.")
    return config


def _results(file: Path) -> dict | None:
    if not file.is_file():
        return None
    try:
        results = json.loads(_text(file))
    except json.JSONDecodeError as error:
        raise UserError(f"{file} is not JSON: {error}.") from None
    clients = results.get("clients") if isinstance(results, dict) else None
    if not isinstance(clients, dict) or not all(
        isinstance(client, dict) for client in clients.values()
    ):
        raise UserError(
            f"{file} should name the clients and give each its results, as a finished run does."
        )
    return results


def _events(file: Path) -> tuple[list[dict], int]:
    """The events in order, and how many lines were cut short: the last one, or one before a resume."""
    lines = [line for line in _text(file).splitlines() if line.strip()] if file.is_file() else []
    events = [event for event in map(parse_event, lines) if event is not None]
    return events, len(lines) - len(events)


def _ledger(file: Path) -> tuple[list[dict], int]:
    """Rows with whole numbers for round, messages and bytes, and how many rows were cut short."""
    if not file.is_file():
        return [], 0
    lines = list(csv.reader(_text(file).splitlines()))
    if not lines:
        return [], 0
    if lines[0] != LEDGER:
        raise UserError(f"{file} should open with {','.join(LEDGER)}, got {','.join(lines[0])}.")
    rows = [row for row in map(_row, lines[1:]) if row]
    return rows, len(lines) - 1 - len(rows)


def _row(cells: list[str]) -> dict | None:
    try:
        row = dict(zip(LEDGER, cells, strict=True))
        return row | {key: int(row[key]) for key in ("round", "messages", "bytes")}
    except ValueError:
        return None


def _arrays(file: Path) -> dict | None:
    import numpy

    try:
        with numpy.load(file, allow_pickle=False) as held:
            return dict(held)
    except Exception:  # those of zip and NumPy files have no common kind
        return None


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")
