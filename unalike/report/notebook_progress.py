"""The progress of a run below a cell of a notebook, without ipywidgets."""

import itertools
from collections.abc import Callable
from html import escape
from typing import Any


class NotebookBars:
    """Progress bars below a cell of a notebook: what `rich.progress.Progress` is in a terminal.

    Args:
        display: `IPython.display.display`, or one that takes the same arguments.
    """

    def __init__(self, display: Callable[..., Any]):
        self.display = display
        self.handle: Any = None
        self.tasks: dict[Any, dict[str, Any]] = {}
        self.ids = itertools.count()
        self.finished: dict[str, Any] = {}  # the last bar with a count that was taken away

    def add_task(self, description: str, **fields: Any) -> Any:
        """Begin a bar and return its id; `total` None is one without an end."""
        task = next(self.ids)
        self.tasks[task] = {"description": description, **fields}
        self.draw()
        return task

    def update(self, task: Any, **fields: Any) -> None:
        """Change fields of a bar: `completed`, `count`, `doing`."""
        self.tasks[task] |= fields
        self.draw()

    def remove_task(self, task: Any) -> None:
        """Take a bar away."""
        removed = self.tasks.pop(task)
        if removed.get("count"):
            self.finished = removed

    def close(self) -> None:
        """Leave one line: how far the last stage with rounds came."""
        counted = [task for task in self.tasks.values() if task.get("count")]
        self.finished = counted[-1] if counted else self.finished
        self.tasks = {}
        self.draw()

    def draw(self) -> None:
        """Show all bars in place of what was shown before."""
        from IPython.display import HTML

        bars = [_bar(task) for task in self.tasks.values()] or [
            _text(self.finished, "description", "count")
        ]
        content = HTML("".join(bars))
        if self.handle is None:
            self.handle = self.display(content, display_id=True)
        else:
            self.handle.update(content)


def _bar(task: dict[str, Any]) -> str:
    total = task.get("total")
    amount = "" if total is None else f" max='{total}' value='{task.get('completed', 0)}'"
    text = _text(task, "description", "count", "doing")
    return f"<div><progress{amount}></progress> {text}</div>"


def _text(task: dict[str, Any], *names: str) -> str:
    parts = [str(task.get(name) or "") for name in names]
    return escape(", ".join(part for part in parts if part))
