"""A run while it goes on, as its events.jsonl tells: how far it is, how long it will take."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from unalike.base import events
from unalike.base.errors import UserError
from unalike.report import folder, history, outcome
from unalike.report.formatting import to_number
from unalike.report.history import Curve
from unalike.report.metrics import absent_clients
from unalike.report.page import read_written

# Events that the live page shows; the others are many, or matter only to the report.
SHOWN = (
    "start", "resume", "evaluation", "round", "failure", "again", "finish", "failed", "lost",
    "damaged", "restart", "refused", "joined", "waiting", "notice", "sharing",
)  # fmt: skip
ENDS = ("start", "resume", "finish", "failed")
WINDOW = 10  # rounds that the speed of a run is taken from


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        stage: what it does: "local baseline", or the name of its method.
        rounds: of the whole run.
        position: rounds that are over; of an asynchronous method visits in the mean over clients.
        elapsed: seconds of work so far, without the time in which it was stopped.
        left: seconds until the last round is over; None where that cannot be said.
    """

    stage: str = ""
    rounds: int = 0
    position: float = 0.0
    elapsed: float = 0.0
    left: float | None = None


class LiveRun:
    """Follows a run's folder; whoever works on the run, and on which engine, does not matter.

    Args:
        path: the run's folder.
        is_running: says whether a process is at work on the run.
        own: whether this is the page of the very process that runs it. Then it ends with the report
            that the run draws at its end, so that nobody draws it twice.
    Raises: UserError where there is no run's config, or its events are not of a run.
    """

    def __init__(self, path: Path, is_running: Callable[[], bool], own: bool = False):
        self.path = path
        self.is_running = is_running
        self.own = own
        self.over = False  # its process has ended, or is about to
        self.report: str | None = None  # as the run has drawn it, below its heading
        self.running = is_running()
        self.tail = events.EventTail(path / events.FILE, from_start=True)
        self.run = folder.Run(path=path, config=folder.read_config(path), results=None)
        self.problem = ""  # why the results cannot be shown
        self.known: tuple = ()  # all but events that a page depends on, at the last update
        folder.read_events(path / events.FILE)  # of somebody else's run: may raise a UserError
        self.update()

    def update(self) -> bool:
        """Read what was written since the last call; return whether anything is new."""
        running = self.is_running()
        new = self.tail.read()
        for event in new:
            if event["event"] == "start":  # an earlier start failed and was set aside
                self.run.events = []
                self.run.results = None
                self.run.config = folder.read_config(self.path)
            elif event["event"] == "resume":
                self.run.results = None
                self.report = None
            if event["event"] in SHOWN:
                self.run.events.append(event)
        if self.run.results is None and self._has_finished():
            if self.own:
                self.report = read_written(self.path)
            if not self.awaits_report:
                self._read_results()
        self.running = running
        known = self.known
        self.known = (running, self.awaits_report, self.problem, self.run.results is None)
        return bool(new) or known != self.known

    @property
    def awaits_report(self) -> bool:
        """Whether the run has yet to draw its report."""
        return self.own and self.report is None and not self.over

    def _has_finished(self) -> bool:
        last = next((e for e in reversed(self.run.events) if e["event"] in ENDS), None)
        return last is not None and last["event"] == "finish"

    def _read_results(self) -> None:
        try:
            self.run.results = folder.read(self.path).results
        except UserError as error:
            self.problem = str(error)

    @property
    def state(self) -> str:
        """One of waiting, running, finished, failed, stopped."""
        if self._has_finished():
            return "finished"
        if self.running:
            return "running" if self.run.events else "waiting"
        if self.run.events and self.run.events[-1]["event"] == "failed":
            return "failed"
        return "stopped" if self.run.events else "waiting"

    def progress(self, now: float | None = None) -> Progress:
        """Return how far the run is.

        Args:
            now: seconds since 1970, by default of this moment.
        """
        now = time.time() if now is None else now
        rounds = 0
        stage = "starting"
        elapsed = 0.0
        last = 0.0  # when `elapsed` was so
        points: list[tuple[float, float]] = []  # (time, rounds that were over)
        for event in self.run.events:
            at = to_number(event.get("time")) or 0.0
            if event["event"] in ("start", "resume"):
                rounds = int(to_number(event.get("rounds")) or 0)
                points = [(at, to_number(event.get("round")) or 0.0)]
                last = at
            elif event["event"] == "evaluation" and event.get("who") == "alone":
                stage = f"first each client trains alone: round {event.get('round')} of {rounds}"
                points = [(at, 0.0)]
            elif event["event"] == "sharing" or event.get("who") == "together":
                stage = self.run.algorithm
            elif event["event"] == "round":
                stage = self.run.algorithm
                position = to_number(event.get("progress", event.get("round"))) or 0.0
                points.append((at, position))
                elapsed = to_number(event.get("seconds")) or elapsed
                last = at
        if self.state == "running" and last:
            elapsed += max(0.0, now - last)
        position = points[-1][1] if points else 0.0
        left = self._seconds_left(points[-WINDOW - 1 :], rounds, now)
        return Progress(stage, rounds, position, elapsed, left)

    def _seconds_left(
        self, points: list[tuple[float, float]], rounds: int, now: float
    ) -> float | None:
        if self.state != "running" or len(points) < 2 or points[-1][1] <= points[0][1]:
            return None
        (first, start), (last, position) = points[0], points[-1]
        per_round = (last - first) / (position - start)
        return max(0.0, per_round * (rounds - position) - (now - last))


def local_curves(run: folder.Run) -> dict[str, Curve]:
    """Return the local baseline of each client by round."""
    return history.metric_curves(run, "alone")


def gains_so_far(run: folder.Run) -> dict[str, float]:
    """Return each client's gain in percent over training alone for as many rounds.

    Clients that failed have none, as in the results.
    """
    local = local_curves(run)
    infos = history.client_infos(run)
    absent = absent_clients(run)
    gains = {}
    for client, curve in history.metric_curves(run, "together").items():
        if absent.get(client):
            continue
        last = max(curve)
        before = [number for number in local.get(client, {}) if number <= last]
        if not before or not local[client][max(before)]:
            continue
        baseline = local[client][max(before)]
        gain = 100 * (curve[last] - baseline) / abs(baseline)
        if math.isfinite(gain):
            gains[client] = gain if outcome.higher_is_better(infos.get(client) or {}) else -gain
    return gains
