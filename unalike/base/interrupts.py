"""Ctrl-C: ends the process at once while packages are imported, and a run in order."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


def exit_on_interrupt() -> None:
    """From now on Ctrl-C ends this process at once, with code 130.

    An exception in the middle of an import can be lost or leave modules half loaded.
    """
    _set_handler(_exit)


def raise_on_interrupt() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt, as usual in Python."""
    if signal.getsignal(signal.SIGINT) is _exit:
        _set_handler(signal.default_int_handler)


def _set_handler(handler: Callable[[int, FrameType | None], Any]) -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, handler)


def _exit(number: int, frame: FrameType | None) -> None:
    os.write(2, b"unalike: stopped.\n")
    os._exit(130)
