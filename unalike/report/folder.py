"""A run folder, read from disk. Knows the files and their form, not what the numbers mean."""

import csv
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

from unalike.base.errors import UserError
from unalike.base.events import EventError, parse_event
from unalike.base.integrity import find_changes, read_manifest
from unalike.base.json_text import parse_json
from unalike.base.record import (
    describe_kind,
    find_problem_in_config,
    find_problem_in_results,
)
from unalike.base.yaml_text import load_yaml

# Files of a finished run that reports are made of.
SHOWN = ("config.yaml", "results.json", "ledger.csv", "events.jsonl")
MAX_ARRAYS = 2**28  # bytes in a file of arrays: a small one may unfold to gigabytes
LEDGER_COLUMNS = ["round", "client", "direction", "operation", "messages", "bytes"]


@dataclass
class Run:
    """What one run wrote.

    Attributes:
        path: its folder.
        config: config.yaml.
        results: results.json; None while the run has not finished.
        events: the lines of events.jsonl.
        ledger: the rows of ledger.csv.
        unreadable: lines of events and ledger that were cut short, as a killed run leaves them.
    """

    path: Path
    config: dict
    results: dict | None
    events: list[dict] = field(default_factory=list)
    ledger: list[dict] = field(default_factory=list)
    unreadable: int = 0

    @property
    def clients(self) -> dict[str, dict]:
        """The results of each client; none while the run has not finished."""
        return self.results["clients"] if self.results else {}

    def method_arrays(self) -> dict[str, dict[int, dict]]:
        """Return {name: {round: arrays}}, what the method logged to be plotted.

        Files that cannot be read are left out.
        """
        arrays_by_name: dict[str, dict[int, dict]] = {}
        for file in sorted((self.path / "pictures").glob("*-*.npz")):
            name, _, round_number = file.stem.rpartition("-")
            is_shown = round_number.isdigit() and is_inside(file, self.path)
            arrays = _load_arrays(file) if is_shown else None
            if arrays:
                rounds = arrays_by_name.setdefault(name.replace("_", " "), {})
                rounds[int(round_number)] = arrays
        return arrays_by_name

    @property
    def scenario(self) -> str:
        name = (self.results or {}).get("scenario") or self.config.get("name")
        return str(name or self.path.name)

    @property
    def algorithm(self) -> str:
        config = self.config.get("algorithm")
        configured = config.get("name") if isinstance(config, dict) else config
        return str((self.results or {}).get("algorithm") or configured or "unknown")

    @property
    def seed(self) -> int | None:
        return (self.results or {}).get("seed", self.config.get("seed"))


def read(path: str | Path) -> Run:
    """Read the run in the folder `path`, finished or not.

    Raises: UserError if it is no run folder, a file in it is not of the expected form, or a file of
        a finished run is not as the run wrote it.
    """
    path = Path(path)
    _check_is_run(path)
    if (path / "results.json").is_file():
        changes = find_changes(path, read_manifest(path) or {}, SHOWN)
        if changes:
            raise UserError(
                f"{changes[0]}. Restore it from a copy; `unalike verify {path}` compares all files"
            )
    events, cut_events = read_events(path / "events.jsonl")
    ledger, cut_rows = _read_ledger(path / "ledger.csv")
    config = read_config(path)
    start = next((event for event in events if event["event"] == "start"), {})
    began_with = start.get("config")
    if isinstance(began_with, dict) and not began_with.keys() <= config.keys():
        missing = ", ".join(sorted(began_with.keys() - config.keys()))
        raise UserError(
            f"{path / 'config.yaml'} was cut short: the run began with more settings ({missing}); "
            "restore it from a copy"
        )
    return Run(
        path=path,
        config=config,
        results=_read_results(path / "results.json"),
        events=events,
        ledger=ledger,
        unreadable=cut_events + cut_rows,
    )


def _check_is_run(path: Path) -> None:
    if not path.is_dir():
        raise UserError(f"{path} is not a run folder: there is no such folder.")
    if not (path / "config.yaml").is_file():
        raise UserError(f"{path} is not a run folder: it has no config.yaml.")
    for name in SHOWN:
        check_inside(path / name, path)


def is_inside(file: Path, folder: Path) -> bool:
    """Return whether a file is in a folder once links are followed.

    A folder of somebody else may have links to files of whoever opens it, which would be shown,
    sent to a tracker, or written over.
    """
    return file.resolve().is_relative_to(folder.resolve())


def check_inside(file: Path, folder: Path) -> None:
    """Raise UserError where a file is a link to outside of the run's folder."""
    if not is_inside(file, folder):
        raise UserError(
            f"{file} is a link that leads out of the run's folder, and is neither read nor written "
            "to: put a copy in its place"
        )


def read_config(path: Path) -> dict:
    """Read the config.yaml of the run folder `path`.

    Raises: UserError if there is none, or it holds no settings.
    """
    import yaml

    _check_is_run(path)
    file = path / "config.yaml"
    try:
        config = load_yaml(_read_text(file))
    except yaml.YAMLError as error:
        raise UserError(f"{file} is not YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(config, dict):
        raise UserError(f"{file} should hold named settings, got {describe_kind(config)}.")
    problem = find_problem_in_config(config)
    if problem:
        raise UserError(f"{file} is not the config of a run: {problem}.")
    return config


def _read_results(file: Path) -> dict | None:
    if not file.is_file():
        return None
    try:
        results = parse_json(_read_text(file))
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}.") from None
    problem = find_problem_in_results(results)
    if problem:
        raise UserError(f"{file} does not hold the results of a run: {problem}.")
    return results


def read_events(file: Path) -> tuple[list[dict], int]:
    """Return the events in order, and how many lines were cut short.

    Raises: UserError for an event of another form than those a run writes.
    """
    text = _read_text(file) if file.is_file() else ""
    events = []
    unreadable = 0
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            event = parse_event(line, strict=True)
        except EventError as error:
            raise UserError(f"{file}, line {number}, is no event of a run: {error}.") from None
        if event is None:
            unreadable += 1
        else:
            events.append(event)
    return events, unreadable


def _read_ledger(file: Path) -> tuple[list[dict], int]:
    """Return the rows, with integers where numbers belong, and how many rows were cut short."""
    if not file.is_file():
        return [], 0
    try:
        lines = list(csv.reader(_read_text(file).splitlines()))
    except csv.Error as error:
        raise UserError(f"{file} is no table of bytes sent: {error}.") from None
    if not lines:
        return [], 0
    if lines[0] != LEDGER_COLUMNS:
        raise UserError(
            f"{file} should open with {','.join(LEDGER_COLUMNS)}, got {','.join(lines[0])}."
        )
    rows = [row for row in map(_parse_row, lines[1:]) if row]
    return rows, len(lines) - 1 - len(rows)


def _parse_row(cells: list[str]) -> dict | None:
    try:
        row = dict(zip(LEDGER_COLUMNS, cells, strict=True))
        numbers = {key: int(row[key]) for key in ("round", "messages", "bytes")}
    except ValueError:
        return None
    fits = all(number.bit_length() <= 64 for number in numbers.values())
    return row | numbers if fits else None


def _load_arrays(file: Path) -> dict | None:
    import numpy

    try:
        with zipfile.ZipFile(file) as packed:
            if sum(part.file_size for part in packed.infolist()) > MAX_ARRAYS:
                return None
        with numpy.load(file, allow_pickle=False) as arrays:
            return dict(arrays)
    except Exception:  # errors of zip and NumPy files have no common base class
        return None


def _read_text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")
