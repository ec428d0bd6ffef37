"""A line that shows what a run is doing, and where the run is kept should it stop. Knows events, not methods."""

import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from unalike.base.errors import Interrupted
from unalike.report.formatting import data


@contextmanager
def progress(quiet: bool = False) -> Iterator[Callable[..., None]]:
    """Gives a function to tell events to; draws on stderr, nothing if quiet. Not in a terminal: a line a round in ten.

    An error that ends the run leaves with a note of where the run is kept.
    """
    console = Console(stderr=True, quiet=quiet)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=28),
        TextColumn("{task.fields[count]}"),
        TextColumn("{task.fields[doing]}", style="dim", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=quiet or not console.is_terminal
    ) as bars:
        shown = Shown(bars, console)
        try:
            yield shown
        except (
            KeyboardInterrupt
        ):  # an error like others, or the command's frame would end it without a word
            raise shown.noted(Interrupted("stopped.")) from None
        except Exception as error:
            shown.noted(error)
            raise


def sent(sizes: dict[str, int]) -> str:
    return ", ".join(f"{data(sizes[way])} {way}" for way in ("up", "down"))


class Shown:
    def __init__(self, bars: Progress, console: Console):
        self.bars, self.console = bars, console
        self.task: TaskID | None = None
        self.folder: Path | None = None
        self.python = False  # whether only the program that began the run can go on with it
        self.rounds, self.name, self.drawn, self.tenths = 0, "", 0.0, 0
        self.missed: set[str] = set()

    def __call__(self, event: str, **facts: Any) -> None:
        if event == "folder":
            self.folder, self.python = facts["path"], facts.get("python", False)
        elif event in ("start", "resume"):
            self.rounds = facts["rounds"]
        elif event == "stage":
            self.stage(facts["text"], facts.get("round"))
        elif event == "alone":
            self.move(facts["round"], "training alone")
        elif event == "round":
            at, doing = facts.get("progress", facts["round"]), f"{sent(facts['bytes'])} so far"
            if at < self.rounds:
                self.move(at, doing)
            else:  # "sent" tells the end: models may be handed out after the last round
                self.update(completed=at, count=self.count(at), doing=doing)
        elif event == "sent":
            self.move(self.rounds, sent(facts["bytes"]))
        elif event == "call" and time.monotonic() - self.drawn > 0.1:
            self.drawn = time.monotonic()
            self.update(doing=facts["operation"].replace("_", " "))
        elif event == "failure" and facts.get("lasting", True):
            self.say(
                f"{facts['client']} failed in {facts['operation']}, round {facts['round']}: {facts['reason']}",
                "red",
            )
        elif event == "failure":
            self.missed.add(facts["client"])
        elif event == "damaged":
            self.say(facts["reason"], "yellow")
        elif event == "restart":
            self.say(f"{facts['reason']}; the run goes on from its last checkpoint", "yellow")
        elif event == "refused":
            self.say(f"{facts['client']} is refused: {facts['reason']}", "red")
        elif event == "joined":
            self.say(f"{facts['client']} takes part from round {facts['round'] + 1} on")

    def noted(self, error: Exception) -> Exception:
        """Where the run is kept and, where that may help, how to go on: what a run was told stays as it is, so do mistakes in it."""
        if self.folder is not None:
            kept = shlex.quote(str(self.folder))
            how = (
                "unalike.run(..., resume=True) in the program that began it"
                if self.python
                else f"unalike resume {kept}"
            )
            then = f"; to go on: {how}"
            if isinstance(error, ValueError):
                then = "."
            elif getattr(error, "repeats", False):
                then = f". It would end so again, unless the cause lay outside, say in a disk or a network, and is gone: {how}"
            error.add_note(f"The run is kept in {kept}{then}")
        return error

    def stage(self, name: str, at: int | None) -> None:
        """A new bar: from round `at` where the stage has rounds, else one that only says that something is going on."""
        if self.task is not None:
            self.bars.remove_task(self.task)
        self.name, self.missed, self.tenths = name, set(), int(10 * (at or 0) / max(1, self.rounds))
        self.task = self.bars.add_task(
            name,
            total=None if at is None else self.rounds,
            completed=at or 0,
            doing="",
            count="" if at is None else self.count(at),
        )

    def move(self, at: float, doing: str) -> None:
        if self.missed:
            doing += f", {len(self.missed)} missed this round"
            self.missed = set()
        self.update(completed=at, count=self.count(at), doing=doing)
        if (
            not self.console.is_terminal
            and (tenths := int(10 * at / max(1, self.rounds))) > self.tenths
        ):
            self.tenths = tenths
            self.say(f"{self.name}: {self.count(at)}, {doing}")

    def count(self, at: float) -> str:
        """Asynchronous methods have no rounds; they tell the visits a client has had, on average."""
        many = "s" * (self.rounds != 1)
        return (
            f"{at:.1f} of {self.rounds} visit{many} a client"
            if isinstance(at, float)
            else f"{at} of {self.rounds} round{many}"
        )

    def update(self, **what: Any) -> None:
        if self.task is not None:
            self.bars.update(self.task, **what)

    def say(self, line: str, style: str = "") -> None:
        self.console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
