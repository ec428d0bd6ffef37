"""events.jsonl: one JSON object a line, `{"event", "time", ...}`, appended while a run goes on.

A process that is killed may leave half a line. Readers skip it, and the next writer ends it.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unalike.base.json_text import parse_json
from unalike.base.record import find_problem_in_event

FILE = "events.jsonl"


class EventError(ValueError):
    """An event that has another form than those we write."""


def parse_event(line: str | bytes, strict: bool = False) -> dict[str, Any] | None:
    """The event on a line; None where the line was cut short, is no event, or one of another form.

    Args:
        strict: raise EventError for an event of another form.
    """
    try:
        event = parse_json(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    problem = find_problem_in_event(event)
    if problem and strict:
        raise EventError(problem)
    return None if problem else event


def read_events(path: Path, kind: str | None = None) -> Iterator[dict[str, Any]]:
    """Events in a file, in order; none where there is no file.

    Args:
        kind: only events of this name. Lines of others are not parsed.
    """
    marker = None if kind is None else f'"event": "{kind}"'.encode()
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            if marker is not None and marker not in line:
                continue
            event = parse_event(line)
            if event is not None and kind in (None, event["event"]):
                yield event


def append_event(path: Path, event: str, **facts: Any) -> None:
    """Write an event to the end of a file, as a line of its own.

    What was sent with secret noise reaches the disk at once: it is counted even if the power fails.
    """
    line = json.dumps({"event": event, "time": time.time(), **facts}).encode() + b"\n"
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # a killed process left half a line
                file.write(b"\n")
        file.write(line)
        if event == "released":
            file.flush()
            os.fsync(file.fileno())


class EventTail:
    """Reads what another process appends to a file from now on.

    Args:
        path: the file.
        from_start: first read what it holds already.
    """

    def __init__(self, path: Path, from_start: bool = False):
        self.path = path
        exists = path.exists() and not from_start
        self.offset = path.stat().st_size if exists else 0
        self.file: int | None = path.stat().st_ino if exists else None

    def read(self) -> list[dict[str, Any]]:
        """Events on lines that were finished since the last call.

        A file that took the place of another is read from its start.
        """
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return []
        with file:
            identity = os.fstat(file.fileno()).st_ino
            if self.file not in (None, identity):
                self.offset = 0
            self.file = identity
            file.seek(self.offset)
            lines, newline, _ = file.read().rpartition(b"\n")
        self.offset += len(lines) + len(newline)
        events = map(parse_event, lines.splitlines())
        return [event for event in events if event is not None]
