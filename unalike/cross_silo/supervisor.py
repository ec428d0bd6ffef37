"""Runs a command and sees that nothing it started outlives it. A program of its own, which knows nothing of what it runs.

Usage: python keeper.py PARENT COMMAND...; it ends with the process PARENT too, 0: with none but its command.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

DEATH_SIGNAL, SUBREAPER = (
    1,
    36,
)  # of prctl: a signal when the parent dies; orphans of descendants become this one's children
EVERY = 0.5  # seconds between looks whether the parent is there
PATIENCE = 5.0  # seconds the command has to end by itself once it was asked to


def command(what: list[str], parent: int) -> list[str]:
    """What to start instead of a command."""
    return [sys.executable, str(Path(__file__).resolve()), str(parent), *what]


def prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def below(pid: int) -> list[int]:
    """Processes that a process started, and those that they did."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, above = path.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents.setdefault(int(above), []).append(int(path.parent.name))
    found, known = [], [pid]
    while known:
        known = [child for each in known for child in parents.get(each, [])]
        found += known
    return found


def end_all() -> None:
    """Whoever is below, whichever session it is in; one that is started meanwhile is found by the next look."""
    while left := below(os.getpid()):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def stop(keepers: Iterable[subprocess.Popen]) -> None:
    """End what these keep, at once."""
    for each in (keepers := list(keepers)):
        each.terminate()
    for each in keepers:
        each.wait()


def leave(*_: object) -> NoReturn:
    sys.exit(1)


def keep(parent: int, what: list[str]) -> int:
    """Its exit code, once the command is over. Ctrl-C, which reaches the command too, leaves it a while to end by itself."""
    for each in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(each) is not signal.SIG_IGN:  # as nohup wants it
            signal.signal(each, leave)
    prctl(SUBREAPER, 1)
    child = subprocess.Popen(what, preexec_fn=lambda: prctl(DEATH_SIGNAL, signal.SIGKILL))
    try:
        while not parent or os.getppid() == parent:
            with suppress(subprocess.TimeoutExpired):
                return child.wait(EVERY)
    except KeyboardInterrupt:
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            return child.wait(PATIENCE)
    finally:
        for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        child.kill()
        end_all()
    return 1


if __name__ == "__main__":
    sys.exit(keep(int(sys.argv[1]), sys.argv[2:]))
