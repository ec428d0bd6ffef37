"""The events and ledger of a run as curves and totals.

Where a round was repeated after a resume, the later one counts. Knows nothing of plots.
"""

from typing import Any

from unalike.report.folder import Run
from unalike.report.formatting import to_number

Curve = dict[int, float]  # value by round


def clients(run: Run) -> list[str]:
    """Return all clients, in the order of the results or, before there are any, of the start."""
    known = run.clients or client_infos(run)
    if known:
        return list(known)
    names: dict[str, None] = {}
    for training in ("together", "alone"):
        names |= dict.fromkeys(metric_curves(run, training))
    return list(names)


def metric_curves(run: Run, training: str, stage: str | None = None) -> dict[str, Curve]:
    """Return {client: {round: value}} of each client's own metric.

    Args:
        training: "together" for the federated models, "alone" for the local baseline.
        stage: only evaluations at this stage of a round; by default the last one of each round.
    """
    curves: dict[str, Curve] = {}
    for event in _evaluations(run, training):
        if stage is not None and event.get("when") != stage:
            continue
        for client, metrics in _items(event.get("values")):
            value = _own_metric(run, client, metrics)
            if value is not None:
                curves.setdefault(client, {})[int(event["round"])] = value
    return {client: dict(sorted(curve.items())) for client, curve in curves.items()}


def evaluation_stages(run: Run) -> list[str]:
    """Return the stages inside a round at which the federated models were evaluated, in order.

    Without "end", the evaluation after a round.
    """
    stages = [str(event.get("when")) for event in _evaluations(run, "together")]
    return [stage for stage in dict.fromkeys(stages) if stage not in ("end", "None")]


def metric_name(run: Run, client: str) -> str:
    """Return the name of the metric that a client's gain is computed from."""
    entry = run.clients.get(client) or client_infos(run).get(client)
    if isinstance(entry, dict) and entry.get("metric"):
        return str(entry["metric"])
    for event in run.events:
        if event["event"] == "evaluation":
            metrics = dict(_items(event.get("values"))).get(client)
            if metrics:
                return str(next(iter(metrics)))
    return "value"


def unit(run: Run, client: str) -> str:
    """Return the unit of a client's metric; percent where the run does not say."""
    entry = run.clients.get(client) or client_infos(run).get(client)
    return str(entry.get("unit", "%")) if isinstance(entry, dict) else "%"


def common_unit(run: Run) -> str:
    """Return the unit that the metrics of all clients share, or "" if they differ."""
    units = {unit(run, client) for client in clients(run)}
    return units.pop() if len(units) == 1 else ""


def logged_metrics(run: Run) -> dict[str, dict[str, Curve]]:
    """Return {name: {client: {round: value}}} of what the method logged as it went."""
    curves: dict[str, dict[str, Curve]] = {}
    for event in run.events:
        round_number = to_number(event.get("round"))
        if event["event"] != "note" or round_number is None:
            continue
        for client, logged in _items(event.get("values")):
            value = to_number(logged)
            if value is not None:
                by_client = curves.setdefault(str(event.get("name")), {})
                by_client.setdefault(client, {})[int(round_number)] = value
    for by_client in curves.values():
        for client, curve in by_client.items():
            by_client[client] = dict(sorted(curve.items()))
    return curves


def traffic_by_operation(run: Run) -> dict[str, dict[str, int]]:
    """Return {operation: {"up": bytes, "down": bytes}}, the heaviest first.

    What was sent again after a resume did travel, and counts.
    """
    totals: dict[str, dict[str, int]] = {}
    for row in run.ledger:
        total = totals.setdefault(row["operation"], {"up": 0, "down": 0})
        total[row["direction"]] = total.get(row["direction"], 0) + row["bytes"]
    return dict(sorted(totals.items(), key=lambda pair: -sum(pair[1].values())))


def total_bytes(run: Run) -> dict[str, int]:
    """Return {"up": bytes, "down": bytes} of the method itself, without evaluation.

    From the results or, before there are any, all that the ledger holds.
    """
    known = (run.results or {}).get("bytes")
    if known:
        return {way: int(to_number(known.get(way)) or 0) for way in ("up", "down")}
    traffic = traffic_by_operation(run).values()
    up = sum(total["up"] for total in traffic)
    down = sum(total["down"] for total in traffic)
    return {"up": up, "down": down}


def federation_curves(run: Run) -> dict[str, Curve]:
    """Return {name: {round: value}} of the whole federation, e.g. "acc" and "joint acc".

    Only of the metrics that clients' gains are computed from.
    """
    metrics = {metric_name(run, client) for client in clients(run)}
    curves: dict[str, Curve] = {}
    for event in _evaluations(run, "together"):
        for path, logged in _leaves(event.get("figures")):
            value = to_number(logged)
            if path[-1] in metrics and value is not None:
                curves.setdefault(" ".join(path), {})[int(event["round"])] = value
    return {name: dict(sorted(curve.items())) for name, curve in curves.items()}


def visits(run: Run) -> dict[str, list[tuple[float, float]]]:
    """Return {client: [(start, end)]} of its visits in seconds, the fastest client first.

    A visit starts where the one before it ended, the first one with its first reply; it ends
    with its last reply.
    """
    replies: dict[str, dict[float, set[float]]] = {}
    for event in run.events:
        time = to_number(event.get("at"))
        if event["event"] != "arrival" or time is None:
            continue
        number = to_number(event.get("round"))
        own = replies.setdefault(str(event.get("client")), {})
        own.setdefault(time if number is None else number, set()).add(time)
    spans = {}
    for client, times_by_visit in replies.items():
        ends = sorted(max(times) for times in times_by_visit.values())
        start = min(times_by_visit[min(times_by_visit)])
        spans[client] = list(zip([start, *ends], ends))
    speeds = {}
    for client, info in client_infos(run).items():
        if isinstance(info, dict):
            speeds[client] = to_number(info.get("speed")) or 0
    known = [client for client in dict.fromkeys([*clients(run), *spans]) if client in spans]
    known.sort(key=lambda client: -speeds.get(client, 0))
    return {client: spans[client] for client in known}


def label_names(run: Run) -> list[str]:
    """Return the names of the classes, if the clients announce them."""
    infos = [info for info in client_infos(run).values() if isinstance(info, dict)]
    labels = infos[0].get("labels") if infos else None
    return [str(label) for label in labels] if isinstance(labels, list) else []


def failures(run: Run) -> list[dict]:
    """Return failures of clients from the results or, before there are any, from the events.

    Of the local baseline only clients that failed, and only while it is under way.
    """
    if run.results:
        known = run.results.get("failures") or []
        return [failure for failure in known if isinstance(failure, dict)]
    failed: list[dict] = []
    baseline = False
    for event in run.events:
        if event["event"] == "failure":
            failed.append(event)
        elif event["event"] == "evaluation" and event.get("who") == "alone":
            baseline = True
            failed = [failure for failure in failed if failure.get("lasting", True)]
        elif baseline and ends_baseline(event):
            baseline = False
            failed = []
    return failed


def ends_baseline(event: dict) -> bool:
    """Return whether an event shows that the local baseline is over: clients work together."""
    return event["event"] in ("sharing", "round") or event.get("who") == "together"


def count_rounds(run: Run) -> int:
    """Return how many rounds are recorded."""
    return len({event.get("round") for event in run.events if event["event"] == "round"})


def _evaluations(run: Run, training: str) -> list[dict]:
    """Return evaluation events of the federated models or of the local baseline."""
    return [
        event
        for event in run.events
        if event["event"] == "evaluation"
        and event.get("who", "together") == training
        and to_number(event.get("round")) is not None
    ]


def client_infos(run: Run) -> dict[str, dict]:
    """Return what the clients announced at the start; empty without events."""
    for event in run.events:
        if event["event"] in ("start", "resume"):
            clients = event.get("clients")
            return clients if isinstance(clients, dict) else {}
    return {}


def _own_metric(run: Run, client: str, metrics: Any) -> float | None:
    if isinstance(metrics, dict):
        return to_number(metrics.get(metric_name(run, client)))
    return to_number(metrics)


def _leaves(nested: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Return the values in nested dicts with the names that lead to them."""
    if isinstance(nested, dict):
        leaves = []
        for name, inner in nested.items():
            leaves += _leaves(inner, (*path, str(name)))
        return leaves
    return [(path, nested)] if path else []


def _items(values: Any) -> list[tuple]:
    return list(values.items()) if isinstance(values, dict) else []
