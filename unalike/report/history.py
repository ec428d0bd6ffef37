"""The events and ledger of a run as curves and totals; where a round was repeated after a resume, the later one wins.

Knows nothing of pictures.
"""

from unalike.report.folder import Run
from unalike.report.formatting import number

LATER = {
    "after local": 0,
    "after alignment": 1,
    "end": 2,
}  # the order of evaluations inside one round


def clients(run: Run) -> list[str]:
    """Every client, in the order of the results or, before there are any, of the start."""
    if run.clients or _cards(run):
        return list(run.clients or _cards(run))
    return list(
        dict.fromkeys(client for who in ("together", "alone") for client in courses(run, who))
    )


def courses(run: Run, who: str, when: str | None = None) -> dict[str, dict[int, float]]:
    """{client: {round: value}} of each client's own metric; the last evaluation of each round, or only those made `when`."""
    found: dict[str, dict[int, tuple[int, float]]] = {}
    for event in run.events:
        at, stage = number(event.get("round")), event.get("when")
        if (
            event["event"] != "evaluation"
            or event.get("who", "together") != who
            or at is None
            or (when and stage != when)
        ):
            continue
        for client, metrics in _items(event.get("values")):
            value = _own(run, client, metrics)
            course, rank = found.setdefault(client, {}), LATER.get(str(stage), 1)
            if value is not None and (int(at) not in course or rank >= course[int(at)][0]):
                course[int(at)] = (rank, value)
    return {
        client: {at: course[at][1] for at in sorted(course)}
        for client, course in found.items()
        if course
    }


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


def unit(run: Run, client: str) -> str:
    """Return the unit of a client's metric; percent where the run does not say."""
    entry = run.clients.get(client) or _cards(run).get(client)
    return str(entry.get("unit", "%")) if isinstance(entry, dict) else "%"


def common_unit(run: Run) -> str:
    """Return the unit that the metrics of all clients share, or "" if they differ."""
    units = {unit(run, client) for client in clients(run)}
    return units.pop() if len(units) == 1 else ""


def _cards(run: Run) -> dict[str, dict]:
    """What the clients told at the start; without events, none."""
    started = (event for event in run.events if event["event"] in ("start", "resume"))
    return dict(_items(next(started, {}).get("clients")))


def _own(run: Run, client: str, metrics) -> float | None:
    return (
        number(metrics.get(metric(run, client))) if isinstance(metrics, dict) else number(metrics)
    )


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
    return {
        name: {client: dict(sorted(course.items())) for client, course in its.items()}
        for name, its in found.items()
    }


def traffic(run: Run) -> dict[str, dict[str, int]]:
    """{operation: {"up": bytes, "down": bytes}}, the heaviest first. What was sent again after a resume did travel, and counts."""
    totals: dict[str, dict[str, int]] = {}
    for row in run.ledger:
        total = totals.setdefault(row["operation"], {"up": 0, "down": 0})
        total[row["direction"]] = total.get(row["direction"], 0) + row["bytes"]
    return dict(sorted(totals.items(), key=lambda pair: -sum(pair[1].values())))


def sent(run: Run) -> dict[str, int]:
    """{"up": bytes, "down": bytes}: the method's own, as the results tell it or, before there are any, all the ledger holds."""
    return (run.results or {}).get("bytes") or {
        way: sum(its[way] for its in traffic(run).values()) for way in ("up", "down")
    }


def figures(run: Run) -> dict[str, dict[int, float]]:
    """{name: {round: value}} of the whole federation, in the metrics its clients are judged by: "acc", "joint acc"."""
    judged = {metric(run, client) for client in clients(run)}
    found: dict[str, dict[int, float]] = {}
    for event in run.events:
        at = number(event.get("round"))
        if (
            event["event"] != "evaluation"
            or event.get("who", "together") != "together"
            or at is None
        ):
            continue
        for name, value in _leaves(event.get("figures")):
            if name[-1] in judged and (told := number(value)) is not None:
                found.setdefault(" ".join(name), {})[int(at)] = told
    return {name: dict(sorted(course.items())) for name, course in found.items()}


def visits(run: Run) -> dict[str, list[tuple[float, float]]]:
    """{client: [(begin, end)]} of its visits, in seconds, the quickest client first. A visit begins where the one before it ended, the
    first with its first reply; it ends with its last."""
    replies: dict[str, dict[float, set[float]]] = {}
    for event in run.events:
        if event["event"] == "arrival" and (at := number(event.get("at"))) is not None:
            visit = number(event.get("round"))
            replies.setdefault(str(event.get("client")), {}).setdefault(
                at if visit is None else visit, set()
            ).add(at)
    found = {}
    for client, its in replies.items():
        ends = sorted(max(moments) for moments in its.values())
        found[client] = list(zip([min(its[min(its)]), *ends], ends))
    pace = {
        client: -(number(info.get("speed")) or 0)
        for client, info in _cards(run).items()
        if isinstance(info, dict)
    }
    known = [client for client in dict.fromkeys([*clients(run), *found]) if client in found]
    return {
        client: found[client] for client in sorted(known, key=lambda client: pace.get(client, 0))
    }


def labels(run: Run) -> list[str]:
    """The classes' names, where the clients tell them."""
    told = next(
        (info.get("labels") for info in _cards(run).values() if isinstance(info, dict)), None
    )
    return [str(label) for label in told] if isinstance(told, list) else []


def failures(run: Run) -> list[dict]:
    """Who failed, when, at what and why: as the results tell it or, before there are any, the events."""
    if run.results:
        return [
            failure for failure in run.results.get("failures") or [] if isinstance(failure, dict)
        ]
    return [event for event in run.events if event["event"] == "failure"]


def rounds(run: Run) -> int:
    """How many rounds are recorded."""
    return len({event.get("round") for event in run.events if event["event"] == "round"})


def _leaves(told, above: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], object]]:
    if isinstance(told, dict):
        return [
            leaf for name, inner in told.items() for leaf in _leaves(inner, (*above, str(name)))
        ]
    return [(above, told)] if above else []


def _items(values) -> list[tuple]:
    return list(values.items()) if isinstance(values, dict) else []
