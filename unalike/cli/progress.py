"""A line that shows what a run is doing. Knows events, not methods."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


@contextmanager
def progress(quiet: bool = False) -> Iterator[Callable[..., None]]:
    """Gives a function to tell events to; draws on stderr, nothing if quiet. Not in a terminal: a line a round in ten."""
    console = Console(stderr=True)
    if quiet:
        yield lambda event, **facts: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(bar_width=28), MofNCompleteColumn(),
               TextColumn("{task.fields[doing]}", style="dim", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        shown = Shown(bars, console)
        yield shown


class Shown:
    def __init__(self, bars: Progress, console: Console):
        self.bars, self.console = bars, console
        self.task: TaskID | None = None
        self.rounds, self.name, self.drawn = 0, "", 0.0

    def __call__(self, event: str, **facts: Any) -> None:
        if event in ("start", "resume"):
            self.rounds, self.name = facts["rounds"], facts["algorithm"]
            self.bar(self.name, facts["round"])
        elif event == "stage":
            self.bar("alone" if facts["text"] == "each client alone" else facts["text"])
        elif event == "alone":
            self.move("alone", facts["round"], "training alone")
        elif event == "round":
            self.move(self.name, facts["round"], f"{(facts['bytes']['up'] + facts['bytes']['down']) / 1e6:.1f} MB so far")
        elif event == "call" and time.monotonic() - self.drawn > 0.1:
            self.drawn = time.monotonic()
            if self.task is not None:
                self.bars.update(self.task, doing=facts["operation"].replace("_", " "))
        elif event == "failure":
            self.console.print(f"{facts['client']} failed in {facts['operation']}, round {facts['round']}: {facts['reason']}", style="red",
                               markup=False, highlight=False)

    def bar(self, name: str, at: int = 0) -> TaskID:
        if self.task is not None:
            self.bars.remove_task(self.task)
        self.task, self.label = self.bars.add_task(name, total=self.rounds, completed=at, doing=""), name
        return self.task

    def move(self, name: str, at: int, doing: str) -> None:
        task = self.task if self.task is not None and self.label == name else self.bar(name)
        self.bars.update(task, completed=at, doing=doing)
        if not self.console.is_terminal and (at == self.rounds or at % max(1, self.rounds // 10) == 0):
            self.console.print(f"{name}: round {at} of {self.rounds}, {doing}", markup=False, highlight=False)
