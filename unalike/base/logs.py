"""Logging of the command: its level is UNALIKE_LOG; with UNALIKE_LOG_FORMAT=json lines are objects.

Only the logger "unalike" is set up, on stderr; those of other packages are left alone. Without
either variable nothing is, and Python shows warnings as ever.
"""

import json
import logging
import os
import time
from typing import Any

from unalike.base.errors import UserError, unknown_name

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
ROOT = logging.getLogger("unalike")
RUN = logging.getLogger("unalike.run")

# Events of a run that are told at a level of their own; all others are for debugging.
EVENT_LEVELS = {
    "start": logging.INFO,
    "resume": logging.INFO,
    "stage": logging.INFO,
    "round": logging.INFO,
    "again": logging.INFO,
    "finish": logging.INFO,
    "failure": logging.WARNING,
    "lost": logging.WARNING,
    "damaged": logging.WARNING,
}


class TextFormatter(logging.Formatter):
    """A line such as `2026-11-18T17:58:01Z INFO unalike.run: finish seconds=1.25`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%SZ")
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        facts = getattr(record, "facts", {})
        texts = [f"{key}={json.dumps(value)}" for key, value in facts.items()]
        return " ".join([super().format(record), *texts])


class JsonFormatter(logging.Formatter):
    """A JSON object: time (seconds), level, logger, message, the facts of an event, a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def configure_logging() -> None:
    """Set up logging as UNALIKE_LOG and UNALIKE_LOG_FORMAT say; again: instead of before.

    Raises: UserError for a level or format that there is not.
    """
    level = os.environ.get("UNALIKE_LOG", "").lower()
    style = os.environ.get("UNALIKE_LOG_FORMAT", "").lower()
    if level and level not in LEVELS:
        raise UserError(unknown_name("log level (UNALIKE_LOG)", level, LEVELS))
    if style and style not in FORMATS:
        raise UserError(unknown_name("log format (UNALIKE_LOG_FORMAT)", style, FORMATS))
    for handler in list(ROOT.handlers):
        if isinstance(handler.formatter, TextFormatter | JsonFormatter):
            ROOT.removeHandler(handler)
    ROOT.setLevel(logging.NOTSET)
    ROOT.propagate = True
    if level or style:
        handler = logging.StreamHandler()
        handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
        ROOT.addHandler(handler)
        ROOT.setLevel((level or "info").upper())
        ROOT.propagate = False


def logs_json() -> bool:
    """Whether stderr is a log of JSON lines, so that nothing else may be written to it."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in ROOT.handlers)


def log_event(event: str, facts: dict[str, Any]) -> None:
    """Log an event of a run with those of its facts that are short: numbers, words, bytes."""
    level = EVENT_LEVELS.get(event, logging.DEBUG)
    if not RUN.isEnabledFor(level) or not RUN.hasHandlers():  # progress shows them already
        return
    short: dict[str, Any] = {}
    for key, value in facts.items():
        if key == "bytes" and isinstance(value, dict):
            short |= {f"bytes_{direction}": count for direction, count in value.items()}
        elif isinstance(value, str | int | float):
            short[key] = value
    RUN.log(level, event, extra={"facts": short})
