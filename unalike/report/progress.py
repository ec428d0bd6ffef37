"""A progress bar for runs, and a note on where the run is kept if it stops."""

import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from unalike.base.errors import Interrupted
from unalike.base.interrupts import raise_on_interrupt
from unalike.base.logs import log_event, logs_json
from unalike.report.formatting import format_bytes, replace_unprintable
from unalike.report.notebook_progress import NotebookBars
from unalike.report.outcome import describe_sharing


@contextmanager
def progress(quiet: bool = False) -> Iterator[Callable[..., None]]:
    """Show the progress of a run on stderr.

    Yields a function that takes the run's events. Outside a terminal ten lines are printed instead
    of a bar. An exception that ends the run gets a note that says where the run is kept.

    Args:
        quiet: show nothing; so it is where stderr is a log of JSON lines.
    Raises: Interrupted, instead of KeyboardInterrupt.
    """
    raise_on_interrupt()
    quiet = quiet or logs_json()
    console = Console(stderr=True, quiet=quiet)
    with _bars(console, quiet) as bars:
        display = ProgressDisplay(bars, console)
        try:
            yield display
        except KeyboardInterrupt:
            # The command line library would end a KeyboardInterrupt without showing the note.
            raise display.add_note(Interrupted("stopped.")) from None
        except Exception as error:
            display.add_note(error)
            raise


@contextmanager
def _bars(console: Console, quiet: bool) -> Iterator[Progress | NotebookBars]:
    """Bars for a terminal or a notebook; elsewhere they are not shown."""
    if console.is_jupyter and not quiet:
        from IPython.display import display

        bars = NotebookBars(display)
        try:
            yield bars
        finally:
            bars.close()
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=28),
        TextColumn("{task.fields[count]}"),
        TextColumn("{task.fields[doing]}", style="dim", markup=False),
        TimeElapsedColumn(),
    )
    hidden = quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        yield progress


def format_traffic(sizes: dict[str, int]) -> str:
    """`{"up": 2000, "down": 1000}` as `2 kB up, 1 kB down`."""
    return ", ".join(
        f"{format_bytes(sizes[direction])} {direction}" for direction in ("up", "down")
    )


class ProgressDisplay:
    """Draws a bar for the current stage of a run and prints lines for failures."""

    def __init__(self, bars: Progress | NotebookBars, console: Console):
        self.bars = bars
        self.console = console
        self.shows_bars = console.is_terminal or console.is_jupyter
        self.task: TaskID | None = None
        self.folder: Path | None = None
        self.python = False  # the run was started from Python, and only there it can be resumed
        self.rounds = 0
        self.stage = ""
        self.updated = 0.0  # when the operation was last shown, in seconds
        self.tenths = 0  # tenths of the rounds that have been printed
        self.missed: set[str] = set()  # clients that missed the current round

    def __call__(self, event: str, **facts: Any) -> None:
        """Log and show an event of the run; those without a method `on_<event>` are not shown."""
        log_event(event, facts)
        handler = getattr(self, f"on_{event}", None)
        if handler is not None:
            handler(**facts)

    def on_folder(self, path: Path, python: bool = False, **_: Any) -> None:
        self.folder = path
        self.python = python

    def on_start(self, rounds: int, **_: Any) -> None:
        self.rounds = rounds

    on_resume = on_start

    def on_stage(self, text: str, round: int | None = None, **_: Any) -> None:
        """Start a new bar, at `round` if the stage has rounds; else one without an end."""
        if self.task is not None:
            self.bars.remove_task(self.task)
        self.stage = text
        self.missed = set()
        self.tenths = int(10 * (round or 0) / max(1, self.rounds))
        self.task = self.bars.add_task(
            text,
            total=None if round is None else self.rounds,
            completed=round or 0,
            doing="",
            count="" if round is None else self.format_count(round),
        )

    def on_alone(self, round: int, **_: Any) -> None:
        self.advance(round, "local baseline")

    def on_round(
        self, round: int, bytes: dict[str, int], progress: float | None = None, **_: Any
    ) -> None:
        position = round if progress is None else progress
        doing = f"{format_traffic(bytes)} so far"
        if position < self.rounds:
            self.advance(position, doing)
        else:  # the end is shown by `on_sent`: models may be sent after the last round
            self.update(completed=position, count=self.format_count(position), doing=doing)

    def on_sent(self, bytes: dict[str, int], **_: Any) -> None:
        self.advance(self.rounds, format_traffic(bytes))

    def on_call(self, operation: str, **_: Any) -> None:
        now = time.monotonic()
        if now - self.updated > 0.1:
            self.updated = now
            self.update(doing=operation.replace("_", " "))

    def on_failure(
        self,
        client: str,
        operation: str = "",
        round: int = 0,
        reason: str = "",
        lasting: bool = True,
        location: str = "",
        **_: Any,
    ) -> None:
        if not lasting:
            self.missed.add(client)
            return
        self.print(f"{client} failed in {operation}, round {round}: {reason}", "red")
        if location:  # of a bug: file, line and function
            self.print(f"  {location}; traceback in events.jsonl", "red")

    def on_damaged(self, reason: str, **_: Any) -> None:
        self.print(reason, "yellow")

    def on_restart(self, reason: str, **_: Any) -> None:
        self.print(f"{reason}; the run goes on from its last checkpoint", "yellow")

    def on_notice(self, text: str, **_: Any) -> None:
        self.print(text, "yellow")

    def on_sharing(self, groups: dict[str, list[list[str]]], clients: list[str], **_: Any) -> None:
        if len(clients) < 2:
            return
        if groups:
            self.print(f"Who shares what: {describe_sharing(groups, clients)}")
        else:
            text = f"no two of {len(clients)} clients share anything: each trains by itself"
            self.print(f"Warning: {text}", "bold yellow")

    def on_waiting(self, text: str, **_: Any) -> None:
        self.print(text, "yellow")

    def on_refused(self, client: str, reason: str, **_: Any) -> None:
        self.print(f"{client} was rejected: {reason}", "red")

    def on_joined(self, client: str, round: int, **_: Any) -> None:
        self.print(f"{client} joined; it takes part from round {round + 1} on")

    def add_note(self, error: Exception) -> Exception:
        """Add to an exception where the run is kept and, unless it would fail again, how to resume.

        Mistakes in the settings cannot be corrected in a run that has started.
        """
        if self.folder is None:
            return error
        folder = shlex.quote(str(self.folder))
        how = f"unalike resume {folder}"
        if self.python:
            how = "unalike.run(..., resume=True) in the program that started it"
        if isinstance(error, ValueError):
            advice = "."
        elif getattr(error, "repeats", False):
            advice = (
                ". Resuming will fail the same way unless the cause was external "
                f"(disk, network). To resume: {how}"
            )
        else:
            advice = f"; to resume: {how}"
        error.add_note(f"The run is kept in {folder}{advice}")
        return error

    def advance(self, position: float, doing: str) -> None:
        """Move the bar; outside a terminal print a line for every tenth of the rounds."""
        if self.missed:
            doing += f", {len(self.missed)} missed this round"
            self.missed = set()
        count = self.format_count(position)
        self.update(completed=position, count=count, doing=doing)
        tenths = int(10 * position / max(1, self.rounds))
        if not self.shows_bars and tenths > self.tenths:
            self.tenths = tenths
            self.print(f"{self.stage}: {count}, {doing}")

    def format_count(self, position: float) -> str:
        """`3 of 20 rounds`; for asynchronous methods the mean number of visits of a client."""
        plural = "" if self.rounds == 1 else "s"
        if isinstance(position, float):
            return f"{position:.1f} of {self.rounds} visit{plural} a client"
        return f"{position} of {self.rounds} round{plural}"

    def update(self, **fields: Any) -> None:
        """Change fields of the bar, if there is one."""
        if self.task is not None:
            self.bars.update(self.task, **fields)

    def print(self, line: str, style: str = "") -> None:
        """Print a line above the bar."""
        line = replace_unprintable(line)  # a client may have written it
        self.console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
