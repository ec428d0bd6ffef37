"""Numbers and results in plain words. Knows nothing of files, terminals or pages."""

import math
import re
from typing import Any

SMALL = [
    "no",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
]
NOTHING = "–"


def number(value: Any) -> float | None:
    """`value` as a float, or None where there is none: missing, not a number, or infinite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def printable(text) -> str:
    """`text` on one line, without what could steer a terminal or break a page.

    >>> printable("a\\n\\x1b[31mb")
    'a �[31mb'
    """
    return visible(" ".join(str(text).split()))


def visible(line: str) -> str:
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in line
    )


def percent(value) -> str:
    """One decimal.

    >>> percent(83.04), percent(None)
    ('83.0', '–')
    """
    value = number(value)
    return NOTHING if value is None else f"{value:.1f}"


def metric_value(value, unit: str = "%") -> str:
    """Return a metric as text: one decimal in percent, else three significant digits.

    >>> metric_value(83.04), metric_value(0.01234, unit=""), metric_value(None)
    ('83.0', '0.0123', '–')
    """
    known = number(value)
    if known is None or unit == "%":
        return percent(known)
    return f"{known:.3g}" if abs(known) < 1000 else f"{known:,.0f}"


def unit_of_client(client: dict) -> str:
    """Return the unit of a client's metric, from its entry in the results; percent by default."""
    return str(client.get("unit", "%"))


def higher_is_better(client: dict) -> bool:
    """Return whether a client's metric should rise, from its entry in the results."""
    return client.get("higher_is_better", True) is not False


def common_unit(clients: dict[str, dict]) -> str:
    """Return the unit that the metrics of all clients share, or "" if they differ."""
    units = {unit_of_client(client) for client in clients.values()}
    return units.pop() if len(units) == 1 else ""


def in_unit(noun: str, unit: str) -> str:
    """Return an axis label or heading with its unit, if there is one.

    >>> in_unit("value", "%"), in_unit("value", "")
    ('value (%)', 'value')
    """
    return f"{noun} ({unit})" if unit else noun


def signed(gain) -> str:
    """A gain with its sign; a small one is never rounded to nothing.

    >>> signed(35.61), signed(-0.02), signed(0)
    ('+35.6 %', '−0.02 %', '0.0 %')
    """
    gain = number(gain)
    if gain is None:
        return NOTHING
    if gain == 0:
        return "0.0 %"
    return (f"{gain:+.1f} %" if abs(gain) >= 0.05 else f"{gain:+.1g} %").replace("-", "−")


def epsilon(spent) -> str:
    """What a client's privacy cost, from its entry in the results.

    >>> epsilon({"epsilon": 12.345}), epsilon({"epsilon": None}), epsilon(None)
    ('12.3', 'unbounded', '–')
    """
    if not isinstance(spent, dict):
        return NOTHING
    value = number(spent.get("epsilon"))
    return "unbounded" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def privacy(spent: dict) -> str:
    """What the cost means.

    >>> privacy({"epsilon": 12.345, "delta": 1e-5, "releases": 20})
    'at most, delta 1e-05, 20 releases'
    """
    return f"at most, delta {spent.get('delta')}, {spent.get('releases')} release{'' if spent.get('releases') == 1 else 's'}"


def data(size) -> str:
    """Bytes in units of 1000.

    >>> data(999), data(1_234_567)
    ('999 B', '1.23 MB')
    """
    size = number(size)
    if size is None:
        return NOTHING
    scale, unit = unit_of(size)
    return f"{size:.0f} B" if scale == 1 else f"{size / scale:.3g} {unit}"


def unit_of(size: float) -> tuple[float, str]:
    """The unit a size reads best in, and how many bytes it holds."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= scale * 0.9995:  # so that 999 999 reads 1 MB, not 1e+03 kB
            return scale, unit
    return 1.0, "B"


def duration(seconds) -> str:
    """
    >>> duration(20.1), duration(200), duration(3720)
    ('20.1 s', '3 min 20 s', '1 h 02 min')
    """
    seconds = number(seconds)
    if seconds is None:
        return NOTHING
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def count(amount: int, noun: str) -> str:
    """
    >>> count(1, "client"), count(6, "client"), count(40, "client")
    ('one client', 'six clients', '40 clients')
    """
    return f"{SMALL[amount] if amount < len(SMALL) else amount} {noun}{'' if amount == 1 else 's'}"


def listed(names: list[str], most: int = 6) -> str:
    """
    >>> listed(["a", "b", "c"]), listed(["a", "b", "c", "d"], most=2)
    ('a, b and c', 'a, b and 2 more')
    """
    names = [str(name) for name in names]
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def gains(results: dict) -> dict[str, float]:
    """The gain of every client that has one, in percent of its own value alone; the worst first."""
    known = {
        client: gain
        for client, its in results["clients"].items()
        if (gain := number(its.get("gain"))) is not None
    }
    return dict(sorted(known.items(), key=lambda pair: pair[1]))


def losers(results: dict) -> list[str]:
    """Clients that would have done better alone; the worst first."""
    return [client for client, gain in gains(results).items() if gain < 0]


def figures(told, above: str = "") -> dict[str, str]:
    """Every number in a nest of named numbers, by its full name.

    >>> figures({"accuracy": 80.04, "recall": {"at_1": 3}, "who": "server"})
    {'accuracy': '80.04', 'recall at 1': '3'}
    """
    if isinstance(told, dict):
        parts = [
            figures(inner, f"{above} {name}".replace("_", " ").strip())
            for name, inner in told.items()
        ]
        return {name: value for part in parts for name, value in part.items()}
    return {} if number(told) is None else {above or "value": f"{number(told):.4g}"}


def federation(results: dict) -> dict[str, float]:
    """Return metrics of all clients together by full name ("acc", "joint acc").

    Only those that the clients' common task asks to be shown (`Task.federation_metrics`): the
    others are means of what the table has.
    """
    shown = [str(name).replace("_", " ") for name in results.get("federation_metrics") or []]
    known = figures(results.get("metrics") or {})
    return {name: float(known[name]) for name in shown if name in known}


def grouped(told: dict[str, float]) -> str:
    """Figures by their full name, those of one group behind its name.

    >>> grouped({"acc": 71.26, "nmi": 65.0, "joint acc": 69.9, "joint nmi": 64.0})
    'acc 71.3, nmi 65.0; joint acc 69.9, nmi 64.0'
    """
    groups: dict[str, list[str]] = {}
    for name, value in told.items():
        group, _, last = name.rpartition(" ")
        groups.setdefault(group, []).append(f"{last} {percent(value)}")
    return "; ".join(f"{group} {', '.join(its)}".strip() for group, its in groups.items())


def modalities(its: dict) -> str:
    """Which a client owns, or nothing where its input has no name.

    >>> modalities({"modalities": ["left", "right"]}), modalities({"modalities": ["x"]})
    ('left, right', '')
    """
    owned = its.get("modalities") or ["x"]
    return "" if owned == ["x"] else ", ".join(map(str, owned))


def kept(its: dict) -> str | None:
    """Which model a client left with under the safeguard; "unjudged": the one learnt together, because no other could be chosen."""
    return (
        "unjudged" if its.get("kept") == "together" and its.get("judged") == {} else its.get("kept")
    )


def judged(results: dict) -> str:
    """How many clients the safeguard judged, where not all could be."""
    told = [kept(its) for its in results["clients"].values()]
    return (
        f", {len(told) - told.count('unjudged')} of {len(told)} clients judged"
        if "unjudged" in told
        else ""
    )


def unmeasured(results: dict) -> str | None:
    """Why nobody has a gain, None: somebody has."""
    clients = results["clients"]
    if gains(results):
        return None
    if all(number(its.get("value")) is None for its in clients.values()):
        unlabelled = all(its.get("labelled") is False for its in clients.values())
        return "no client could be measured" + ", there are no labels" * unlabelled
    return "there is one client" if len(clients) == 1 else "nothing was trained alone"


def worst(results: dict) -> str | None:
    """Return the client with the smallest gain, or without gains the worst value, and that number.

    None if nothing was measured, or if clients have metrics that cannot be ranked together.
    """
    gained = gains(results)
    if gained:
        client = next(iter(gained))
        return f"{client} {signed(gained[client])}"
    values = {
        client: value
        for client, its in results["clients"].items()
        if (value := number(its.get("value"))) is not None
    }
    entries = {client: results["clients"][client] for client in values}
    directions = {higher_is_better(its) for its in entries.values()}
    units = {unit_of_client(its) for its in entries.values()}
    if len(directions) != 1 or len(units) != 1:
        return None
    choose = min if directions.pop() else max
    client = choose(values, key=lambda client: values[client])
    metric = entries[client].get("metric") or "value"
    return f"{client} with {metric} {metric_value(values[client], units.pop())}"


def verdict(results: dict) -> str:
    """How it went, in one sentence or two: who gained, who lost, who failed."""
    gained, lost, clients = gains(results), losers(results), results["clients"]
    parts = [
        f"{count(len(clients), 'client')} learnt {'together' if len(clients) > 1 else 'by itself'}".capitalize()
    ]
    if not gained:
        parts += [f"{unmeasured(results)}, so who gained is not known"] if len(clients) > 1 else []
        if worst(results):
            parts += [f"the worst is {worst(results)}"]
    else:
        parts += [_gainers(gained, lost, len(clients))]
        if number(results.get("delta")) is not None:
            parts += [f"Delta {signed(results['delta'])}"]
        if not lost and len(gained) > 1:
            parts += [f"the least gain is {worst(results)}"]
    sentence = "; ".join(parts) + "."
    safeguard = results.get("safeguard")
    if isinstance(safeguard, dict) and number(safeguard.get("delta")) is not None:
        left = count(int(number(safeguard.get("losers")) or 0), "loser")
        sentence += f" With the safeguard Delta is {signed(safeguard['delta'])}, with {left}{judged(results)}."
    failed = list(
        dict.fromkeys(
            str(failure.get("client")) for failure in lasting(results.get("failures") or [])
        )
    )
    if failed:
        sentence += (
            f" {count(len(failed), 'client').capitalize()} failed at least once: {listed(failed)}."
        )
    return sentence


def _gainers(gained: dict[str, float], lost: list[str], clients: int) -> str:
    winners = sum(gain > 0 for gain in gained.values())
    level = len(gained) - winners - len(lost)
    unknown = clients - len(gained)
    if winners == clients:
        return "all gained" if clients > 1 else "it gained"
    parts = [f"{_said(winners)} gained"]
    if lost:
        parts += [
            f"{_said(len(lost))} lost ({listed([f'{client} {signed(gained[client])}' for client in lost])})"
        ]
    if level:
        parts += [f"{_said(level)} stayed level"]
    if unknown:
        parts += [f"of {_said(unknown)} the gain is not known"]
    return ", ".join(parts)


def _said(amount: int) -> str:
    return "none" if amount == 0 else SMALL[amount] if amount < len(SMALL) else str(amount)


def lasting(told: list[dict]) -> list[dict]:
    """The failures that put a client out for the rest of the run; the others only made it miss a round."""
    return [failure for failure in told if failure.get("lasting", True)]


def failures(told: list[dict]) -> list[str]:
    """One sentence for each client, operation and reason that failed, with its rounds. Who only missed rounds has not failed."""
    rounds: dict[tuple, list] = {}
    for failure in lasting(told):
        key = tuple(
            str(failure.get(part) or "unknown") for part in ("client", "operation", "reason")
        )
        rounds.setdefault(key, []).append(failure.get("round"))
    return [
        f"{client} failed at {operation} in {_rounds(when)}: {reason}"
        for (client, operation, reason), when in rounds.items()
    ]


def misses(told: list[dict]) -> tuple[dict[str, int], str]:
    """How many rounds each client missed, the most first, and for what reasons.

    >>> misses([{"client": "ada", "round": at, "reason": "dropped out", "lasting": False} for at in (2, 2, 5)])
    ({'ada': 2}, 'dropped out')
    """
    missed = [failure for failure in told if not failure.get("lasting", True)]
    rounds: dict[str, set] = {}
    for failure in missed:
        rounds.setdefault(str(failure.get("client")), set()).add(failure.get("round"))
    why = dict.fromkeys(
        re.sub("^late:.*", "late", str(failure.get("reason"))) for failure in missed
    )  # not how late each time
    return {
        client: len(when) for client, when in sorted(rounds.items(), key=lambda pair: -len(pair[1]))
    }, listed(list(why), 3)


def _rounds(when: list) -> str:
    when = sorted({int(value) for value in map(number, when) if value is not None})
    if not when:
        return "an unknown round"
    if len(when) == 1:
        return f"round {when[0]}"
    return (
        f"rounds {listed(when)}"
        if len(when) <= 6
        else f"{len(when)} rounds, {when[0]} to {when[-1]}"
    )
