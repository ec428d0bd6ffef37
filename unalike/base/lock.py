"""A lock on a run's folder: one process at a time works on a run."""

import errno
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from unalike.base.errors import UserError

try:
    import fcntl
except ImportError:  # not on Windows: there only runs of one process exclude each other
    fcntl = None  # type: ignore[assignment]

FILE = ".lock"
PATIENCE = 0.3  # seconds: `is_locked` of another process holds the lock for a moment
_held: set[Path] = set()  # by this process


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder inside; the system releases it when the process ends.

    A process forked from this one does not hold it, so that a worker that outlives a killed run
    does not keep the next one out.

    Raises: UserError where another process, or another run in this one, holds it.
    """
    path = _path(folder)
    if path in _held:
        raise _busy(folder, "this process")
    with open(path, "a+", opener=_open_no_link) as file:
        if fcntl is not None and not _acquire(file):
            raise _busy(folder, _read_owner(file))
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
        _held.add(path)
        try:
            yield
        finally:
            _held.discard(path)


def _path(folder: Path) -> Path:
    return folder.resolve() / FILE


def _open_no_link(path: str, flags: int) -> int:
    """Open a lock, but no link: it is truncated, and may lead to any file of the reader's."""
    try:
        return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UserError(
                f"{path} is a link, which a lock never is: remove it if no run goes on there"
            ) from None
        raise


def _acquire(file: IO[str]) -> bool:
    """Take the lock of an open file; return whether that succeeded."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)


def is_locked(folder: Path) -> bool:
    """Return whether a process is at work on the run in a folder. Writes nothing there."""
    path = _path(folder)
    if path in _held:  # closing another file of it would release the lock
        return True
    if fcntl is None or not path.is_file():
        return False
    with path.open() as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False  # closing the file gave the lock back


def _read_owner(file: IO[str]) -> str:
    file.seek(0)
    return file.read(200) or "another process"


def _busy(folder: Path, owner: str) -> UserError:
    return UserError(
        f"{folder} is in use by {owner}: wait until that run has ended, or stop it, then try again"
    )
