"""Finds the user's code in a traceback, to tell a bug there from a recognised mistake."""

import os
import sysconfig
import traceback
from pathlib import Path

from unalike.base.errors import RunError, UserError

PACKAGE = str(Path(__file__).parents[1])
LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")})
DEBUG = "UNALIKE_DEBUG"  # environment variable: stop at the first exception, with its traceback


def is_debugging() -> bool:
    """Whether UNALIKE_DEBUG is set: exceptions are raised at once instead of collected."""
    return bool(os.environ.get(DEBUG))


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Frames of the user's code that ours called, outermost first.

    Frames before the first of ours are left out: they are the program that called us.
    """
    frames = traceback.extract_tb(error.__traceback__)
    first = next((i for i, f in enumerate(frames) if f.filename.startswith(PACKAGE)), len(frames))
    return [frame for frame in frames[first:] if not _is_library(frame.filename)]


def _is_library(filename: str) -> bool:
    return filename.startswith((PACKAGE, "<frozen", *LIBRARIES))


def user_location(error: BaseException) -> str | None:
    """File, line and function of the user's code that raised or led to it; None if there is none.

    The result reads like `mine.py, line 12, in loss`. A bug in a file of this package, where
    methods and tasks are added, has a place too; an error that torch raised for us has none.
    """
    frames = user_frames(error)
    if not frames:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__)][-1:]
        if not frames or not frames[0].filename.startswith(PACKAGE) or not is_bug(error):
            return None
    return f"{frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name}"


def is_bug(error: BaseException) -> bool:
    """Whether an exception is a bug, in the user's code or in ours, to be shown with its traceback.

    Mistakes that this package recognised explain themselves: `UserError`, `RunError`, and a
    ValueError that our own code raised (torch and user code raise it for bugs, too).
    """
    if isinstance(error, UserError | RunError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    raised_by_us = bool(frames) and frames[-1].filename.startswith(PACKAGE)
    return not (isinstance(error, ValueError) and raised_by_us)


def format_traceback(error: BaseException) -> str:
    """The whole traceback as Python prints it, causes included."""
    return "".join(traceback.format_exception(error)).rstrip()
