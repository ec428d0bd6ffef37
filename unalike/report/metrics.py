"""The state of a run in the text format of Prometheus, from its events and its ledger.

https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from unalike.report import folder, history
from unalike.report.formatting import to_number


class Metric(NamedTuple):
    """A metric: its name without `unalike_`, its type, what it is, and (labels, value) pairs."""

    name: str
    kind: str
    help: str
    samples: list[tuple[dict[str, str], float]]


def format_metrics(path: Path) -> str:
    """The metrics of the run in a folder, finished or not.

    Raises: UserError if it is no run folder.
    """
    run = folder.read(path)
    common = {"run": path.resolve().name, "scenario": run.scenario, "algorithm": run.algorithm}
    lines = []
    for metric in collect_metrics(run):
        name = f"unalike_{metric.name}"
        lines += [f"# HELP {name} {metric.help}", f"# TYPE {name} {metric.kind}"]
        for labels, value in metric.samples:
            lines.append(f"{name}{{{format_labels(common | labels)}}} {float(value)!r}")
    return "\n".join(lines) + "\n"


def collect_metrics(run: folder.Run) -> list[Metric]:
    """The metrics of a run."""
    failed = failed_clients(run)
    active = set(history.clients(run)) - failed
    failures = sum(event["event"] == "failure" for event in run.events)
    states: list[tuple[dict[str, str], float]] = [
        ({"state": "active"}, len(active)),
        ({"state": "failed"}, len(failed)),
    ]
    traffic: list[tuple[dict[str, str], float]] = []
    for operation, sizes in history.traffic_by_operation(run).items():
        for direction in ("up", "down"):
            traffic.append(({"direction": direction, "operation": operation}, sizes[direction]))

    def single(name: str, kind: str, help: str, value: float) -> Metric:
        return Metric(name, kind, help, [({}, value)])

    planned = largest_fact(run, "rounds")
    finished = run.results is not None
    last = largest_fact(run, "time")
    return [
        single("rounds_finished", "gauge", "Rounds that ended.", history.count_rounds(run)),
        single("rounds_planned", "gauge", "Rounds of the whole run.", planned),
        single("finished", "gauge", "1 once the run has results.", finished),
        Metric("clients", "gauge", "Clients by state: active, or failed and left out.", states),
        single("failures_total", "counter", "Failures of clients.", failures),
        Metric(
            "bytes_total", "counter", "Bytes sent (up) and received (down) by clients.", traffic
        ),
        single("seconds", "gauge", "Seconds that the run took.", largest_fact(run, "seconds")),
        single("last_event_timestamp_seconds", "gauge", "When something last happened.", last),
    ]


def failed_clients(run: folder.Run) -> set[str]:
    """Clients that failed, in the round that is going on or for good, and were not asked again."""
    return set(absent_clients(run))


def absent_clients(run: folder.Run) -> dict[str, bool]:
    """Clients that do not take part now; true for those that failed, false for one round missed."""
    absent: dict[str, bool] = {}
    baseline = False
    for event in run.events:
        client = str(event.get("client"))
        if event["event"] == "evaluation" and event.get("who") == "alone":
            baseline = True
        elif baseline and history.ends_baseline(event):
            baseline = False  # whoever failed there is asked anew
            absent = {}
        if event["event"] == "failure":
            absent[client] = bool(event.get("lasting", True))
        elif event["event"] == "again":
            absent.pop(client, None)
        elif event["event"] == "round":
            absent = {client: True for client, lasting in absent.items() if lasting}
    return absent


def largest_fact(run: folder.Run, name: str) -> float:
    """The largest number under this name in any event; 0 where there is none."""
    numbers = [to_number(event.get(name)) for event in run.events]
    return max((number for number in numbers if number is not None), default=0.0)


def format_labels(labels: Mapping[str, str]) -> str:
    """Labels as Prometheus writes them.

    >>> format_labels({"run": 'a "b"', "direction": "up"})
    'run="a \\\\"b\\\\"",direction="up"'
    """
    texts = []
    for name, value in labels.items():
        value = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        texts.append(f'{name}="{value}"')
    return ",".join(texts)
