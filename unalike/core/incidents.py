"""Failures as a client's owner keeps them. Other organisations learn only an incident number."""

import os
import secrets
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from unalike.base.errors import describe_error


@dataclass(frozen=True)
class Incident:
    """One failure: what was asked of which client, why it failed, and where in the code."""

    client: str
    operation: str
    reason: str
    traceback: str
    number: str = field(
        default_factory=lambda: secrets.token_hex(6)
    )  # drawn, so that it tells nothing
    when: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S"))

    @classmethod
    def of(cls, error: BaseException, client: str, operation: str) -> "Incident":
        """The incident that an exception is."""
        try:
            why = describe_error(error)
        except Exception:  # an exception of somebody's own may not even say what it is
            why = type(error).__name__
        return cls(client, str(operation)[:80], why, "".join(traceback.format_exception(error)))

    @property
    def sentence(self) -> str:
        """All that another organisation is told: the same whatever happened, but for the number."""
        return f"it failed; its own log says why, under incident {self.number}"

    def write(self, log: Path) -> None:
        """Add it to a log that only its owner may read, and say it on stderr."""
        what = f"client {self.client} failed at {self.operation}: {self.reason}"
        text = f"{self.when} incident {self.number}: {what}\n{self.traceback}\n"
        with suppress(OSError, ValueError):  # stderr may be closed
            print(text, file=sys.stderr, flush=True)
        with suppress(OSError):  # a full disk may be the reason itself
            log.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(
                os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600),
                "a",
                encoding="utf-8",
                errors="replace",
            ) as file:
                file.write(text)
