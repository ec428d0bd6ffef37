"""Passes a run to trackers: while it goes on, or afterwards from its events."""

import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unalike.base import events
from unalike.base.errors import UserError
from unalike.report.compare import flatten_settings
from unalike.report.folder import is_inside, read
from unalike.report.formatting import printable
from unalike.tracking import build_tracker
from unalike.tracking.points import PointReader, safe_name
from unalike.tracking.tracker import Point, TrackedRun

PATIENCE = 60.0  # seconds that a finished run waits for a tracker
SHORT_PATIENCE = 5.0  # and one that was stopped
LENGTH = 300  # characters of an error that are shown
FILES = ("report.html", "results.json", "config.yaml")  # added to a tracker at the end

# Of each tracker and run folder, the last thread in this process: a run that was stopped and
# resumed does not write to one store from two threads.
_threads: dict[tuple[str, Path], threading.Thread] = {}


class Recorder:
    """Feeds one tracker from a thread of its own, so that a slow store does not slow a run.

    Args:
        name: of the tracker.
        run: the run to track.
    """

    def __init__(self, name: str, run: TrackedRun):
        self.name = name
        self.run = run
        self.error: BaseException | None = None
        self.told = False
        self.files: list[Path] = []
        self.finished = False
        self.queue: queue.SimpleQueue[tuple[int, dict[str, float]] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name=f"track-{name}", daemon=True)
        key = (name, run.folder.resolve())
        self.previous = _threads.get(key)
        _threads[key] = self.thread
        self.thread.start()

    def put(self, step: int, values: dict[str, float]) -> None:
        """Pass points on; returns at once."""
        if values and self.error is None:
            self.queue.put((step, values))

    def close(self, files: list[Path], finished: bool) -> None:
        """Pass files on, and wait for the tracker, though not for ever."""
        self.files = files
        self.finished = finished
        self.queue.put(None)
        seconds = PATIENCE if finished else SHORT_PATIENCE
        if self.thread.is_alive():
            self.thread.join(seconds)
        if self.thread.is_alive() and self.error is None:
            self.error = TimeoutError(f"it did not answer within {seconds:g} s of the run's end")

    def _work(self) -> None:
        try:
            tracker = build_tracker(self.name)  # imports its package, which takes up to a second
            if self.previous is not None:
                self.previous.join()
            known: set[Point] = tracker.open(self.run)
            while True:
                item = self.queue.get()
                if item is None:
                    break
                step, values = item
                new = {name: value for name, value in values.items() if (name, step) not in known}
                if new:
                    tracker.log(new, step)
                    known |= {(name, step) for name in new}
            tracker.close(self.files, self.finished)
        except BaseException as error:  # SystemExit of a tracker's package must not go unseen
            self.error = error


class Tracking:
    """Passes the events of one run to several trackers.

    A tracker that fails is left out from then on, and `tell` is called once with a sentence.

    Args:
        folder: the run's folder. Events that are there already are passed on first.
        names: of the trackers.
        tell: takes a sentence for the user.
    """

    def __init__(self, folder: Path, names: list[str], tell: Callable[[str], None]):
        self.folder = folder
        self.tell = tell
        self.reader = PointReader()
        run = read(folder)
        parameters = {
            ".".join(map(safe_name, name.split("."))): value
            for name, value in flatten_settings(run.config).items()
        }
        tracked = TrackedRun(folder=folder, project=run.scenario, parameters=parameters)
        self.recorders = [Recorder(name, tracked) for name in dict.fromkeys(names)]
        for event in run.events:
            self.pass_on(event)

    def pass_on(self, event: dict[str, Any]) -> None:
        """Pass one event of the run on."""
        step, values = self.reader.read(event)
        for recorder in self.recorders:
            recorder.put(step, values)
        self._tell_errors()

    def close(self) -> None:
        """Pass on what the finished run left in its folder, and wait for the trackers."""
        results = read(self.folder).results
        files = [self.folder / name for name in FILES if (self.folder / name).exists()]
        files = [file for file in files if is_inside(file, self.folder)]
        if results is not None:
            step, values = self.reader.read_results(results)
            for recorder in self.recorders:
                recorder.put(step, values)
        for recorder in self.recorders:
            recorder.close(files if results is not None else [], results is not None)
        self._tell_errors()

    @property
    def failed(self) -> list[str]:
        """Names of the trackers that failed."""
        return [recorder.name for recorder in self.recorders if recorder.error is not None]

    def _tell_errors(self) -> None:
        for recorder in self.recorders:
            if recorder.error is not None and not recorder.told:
                recorder.told = True
                error = printable(f"{type(recorder.error).__name__}: {recorder.error}")[:LENGTH]
                self.tell(
                    f"{recorder.name} no longer tracks this run ({error}). When that is mended: "
                    f"unalike track {self.folder} --to {recorder.name}"
                )


@contextmanager
def track_live(
    folder: Path, names: list[str], watch: Callable[..., None], quiet: bool = False
) -> Iterator[Callable[..., None]]:
    """Track a run while it goes on.

    Yields a function to watch the run with; it calls `watch`, too.

    Args:
        names: of the trackers.
        watch: gets all events, and a "notice" where a tracker fails.
        quiet: nobody looks at notices: a tracker that fails is a Python warning.
    """
    if not names:
        yield watch
        return

    def tell(sentence: str) -> None:
        if quiet:
            warnings.warn(sentence, RuntimeWarning, stacklevel=2)
        else:
            watch("notice", text=sentence)

    tracking = Tracking(folder, names, tell)

    def track_and_watch(event: str, **facts: Any) -> None:
        tracking.pass_on({"event": event, **facts})
        watch(event, **facts)

    try:
        yield track_and_watch
    finally:
        try:
            tracking.close()
        except UserError as error:  # files of the run were changed; the run itself is over
            tell(str(error))


def replay(
    folder: Path,
    names: list[str],
    tell: Callable[[str], None],
    is_running: Callable[[], bool],
    every: float = 1.0,
) -> list[str]:
    """Track a run from its events; one that another process is at work on, until it ends.

    Args:
        folder: the run's folder.
        names: of the trackers.
        tell: takes a sentence where a tracker fails.
        is_running: says whether a process is at work on the run.
        every: seconds between looks at the events.
    Returns: names of the trackers that failed.
    """
    tail = events.EventTail(folder / events.FILE)  # before the events are read: none is missed
    tracking = Tracking(folder, names, tell)
    try:
        while is_running() and len(tracking.failed) < len(tracking.recorders):
            time.sleep(every)
            for event in tail.read():
                tracking.pass_on(event)
        for event in tail.read():
            tracking.pass_on(event)
    finally:
        tracking.close()
    return tracking.failed
