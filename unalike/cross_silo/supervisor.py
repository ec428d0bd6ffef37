"""Runs a command and kills everything it started when it ends. A program of its own.

Usage: python supervisor.py PARENT ESSENTIAL COMMAND...

It ends with the process PARENT, too; with PARENT 0, only with its command. It also ends where a
process below the command ends whose command line has the word ESSENTIAL, if that is not empty. It
depends on the standard library alone, so that it starts at once.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import NoReturn

# options of Linux's prctl: a signal when the parent dies; orphaned descendants become children
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PARENT_POLL = 0.5  # seconds between checks whether the parent is alive
ESSENTIAL_POLL = 1.0  # and whether all essential processes are
GRACE = 5.0  # seconds the command has to end by itself after Ctrl-C


def command(words: list[str], parent: int, essential: str = "") -> list[str]:
    """The command line that runs `words` under a supervisor; all end with an essential process."""
    return [sys.executable, str(Path(__file__).resolve()), str(parent), essential, *words]


def prctl(option: int, value: int) -> None:
    """Linux's prctl; does nothing elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def all_processes() -> list[int]:
    """The processes of this machine; `glob` would fail where one of them ends meanwhile."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def descendants(pid: int) -> list[int]:
    """Processes that a process started, those that they started, and so on; no zombies."""
    children: dict[int, list[int]] = {}
    for other in all_processes():
        with suppress(OSError):
            # /proc/PID/stat: "pid (name) state ppid ..."; the name may hold brackets
            text = Path(f"/proc/{other}/stat").read_text()
            state, parent = text.rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(other)
    below: list[int] = []
    generation = children.get(pid, [])
    while generation:
        below += generation
        generation = list(chain.from_iterable(children.get(pid, []) for pid in generation))
    return below


def kill_tree() -> None:
    """Kill all descendants of this process, in whichever session they are.

    Processes that are started meanwhile are killed in the next turn of the loop.
    """
    pids = descendants(os.getpid())
    while pids:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
        pids = descendants(os.getpid())


def stop(supervisors: Iterable[subprocess.Popen]) -> None:
    """End these supervisors and what they run, at once."""
    processes = list(supervisors)
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait()


def exit_on_signal(*_: object) -> NoReturn:
    """A signal handler: raise SystemExit, so that `finally` blocks run."""
    sys.exit(1)


class Essentials:
    """The processes below this one whose command line has a word; none where it is empty."""

    def __init__(self, word: str):
        self.word = word.encode()
        self.seen: set[int] = set()
        self.last_look = time.monotonic()

    def one_ended(self) -> bool:
        """Whether one that was seen before has ended."""
        if not self.word or time.monotonic() - self.last_look < ESSENTIAL_POLL:
            return False
        self.last_look = time.monotonic()
        now: set[int] = set()
        for pid in descendants(os.getpid()):
            with suppress(OSError):
                if self.word in Path(f"/proc/{pid}/cmdline").read_bytes():
                    now.add(pid)
        is_lost = not self.seen <= now
        self.seen = now
        return is_lost


def supervise(parent: int, essential: str, words: list[str]) -> int:
    """Run a command until it, the parent or an essential process ends, then kill what it started.

    Ctrl-C reaches the command, too, which then has `GRACE` seconds to end by itself.

    Returns: the command's exit code; 1 where something else ended first.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP: so do we
            signal.signal(number, exit_on_signal)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    child = subprocess.Popen(words, preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL))
    essentials = Essentials(essential)
    try:
        while (not parent or os.getppid() == parent) and not essentials.one_ended():
            with suppress(subprocess.TimeoutExpired):
                return child.wait(PARENT_POLL)
    except KeyboardInterrupt:
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            return child.wait(GRACE)
    finally:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        child.kill()
        kill_tree()
    return 1


if __name__ == "__main__":
    sys.exit(supervise(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
