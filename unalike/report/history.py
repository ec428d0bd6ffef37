"""The events and ledger of a run as curves and totals; where a round was repeated after a resume, the later one wins.

Knows nothing of pictures.
"""

from unalike.report.folder import Run
from unalike.report.words import number

LATER = {"after local": 0, "after alignment": 1, "end": 2}  # the order of evaluations inside one round


def clients(run: Run) -> list[str]:
    """Every client, in the order of the results or, before there are any, of the start."""
    if run.clients or _cards(run):
        return list(run.clients or _cards(run))
    return list(dict.fromkeys(client for who in ("together", "alone") for client in courses(run, who)))


def courses(run: Run, who: str, when: str | None = None) -> dict[str, dict[int, float]]:
    """{client: {round: value}} of each client's own metric; the last evaluation of each round, or only those made `when`."""
    found: dict[str, dict[int, tuple[int, float]]] = {}
    for event in run.events:
        at, stage = number(event.get("round")), event.get("when")
        if event["event"] != "evaluation" or event.get("who", "together") != who or at is None or (when and stage != when):
            continue
        for client, metrics in _items(event.get("values")):
            value = _own(run, client, metrics)
            course, rank = found.setdefault(client, {}), LATER.get(str(stage), 1)
            if value is not None and (int(at) not in course or rank >= course[int(at)][0]):
                course[int(at)] = (rank, value)
    return {client: {at: course[at][1] for at in sorted(course)} for client, course in found.items() if course}


def metric(run: Run, client: str) -> str:
    """The name of the metric a client is judged by."""
    its = run.clients.get(client) or _cards(run).get(client)
    if isinstance(its, dict) and its.get("metric"):
        return str(its["metric"])
    for event in run.events:
        if event["event"] == "evaluation":
            for name in dict(_items(event.get("values"))).get(client) or {}:
                return str(name)
    return "value"


def _cards(run: Run) -> dict[str, dict]:
    """What the clients told at the start; without events, none."""
    started = (event for event in run.events if event["event"] in ("start", "resume"))
    return dict(_items(next(started, {}).get("clients")))


def _own(run: Run, client: str, metrics) -> float | None:
    return number(metrics.get(metric(run, client))) if isinstance(metrics, dict) else number(metrics)


def notes(run: Run) -> dict[str, dict[str, dict[int, float]]]:
    """{name: {client: {round: value}}}: what a method wrote down as it went."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for event in run.events:
        at = number(event.get("round"))
        if event["event"] != "note" or at is None:
            continue
        for client, value in _items(event.get("values")):
            if (told := number(value)) is not None:
                found.setdefault(str(event.get("name")), {}).setdefault(client, {})[int(at)] = told
    return {name: {client: dict(sorted(course.items())) for client, course in its.items()} for name, its in found.items()}


def traffic(run: Run) -> dict[str, dict[str, int]]:
    """{operation: {"up": bytes, "down": bytes}}, the heaviest first. What was sent again after a resume did travel, and counts."""
    totals: dict[str, dict[str, int]] = {}
    for row in run.ledger:
        total = totals.setdefault(row["operation"], {"up": 0, "down": 0})
        total[row["direction"]] = total.get(row["direction"], 0) + row["bytes"]
    return dict(sorted(totals.items(), key=lambda pair: -sum(pair[1].values())))


def sent(run: Run) -> dict[str, int]:
    """{"up": bytes, "down": bytes}: the method's own, as the results tell it or, before there are any, all the ledger holds."""
    return (run.results or {}).get("bytes") or {way: sum(its[way] for its in traffic(run).values()) for way in ("up", "down")}


def arrivals(run: Run) -> dict[str, list[float]]:
    """{client: the moments its replies arrived, in seconds}."""
    found: dict[str, set[float]] = {}
    for event in run.events:
        if event["event"] == "arrival" and (at := number(event.get("at"))) is not None:
            found.setdefault(str(event.get("client")), set()).add(at)
    return {client: sorted(moments) for client, moments in found.items()}


def failures(run: Run) -> list[dict]:
    """Who failed, when, at what and why: as the results tell it or, before there are any, the events."""
    if run.results:
        return [failure for failure in run.results.get("failures") or [] if isinstance(failure, dict)]
    return [event for event in run.events if event["event"] == "failure"]


def rounds(run: Run) -> int:
    """How many rounds are recorded."""
    return len({event.get("round") for event in run.events if event["event"] == "round"})


def _items(values) -> list[tuple]:
    return list(values.items()) if isinstance(values, dict) else []
