"""What the results of one run say: gains, degraded clients, failures, and a verdict in words.

Takes `results` as in results.json, where "alone" is the local baseline, "value" the federated
value, "delta" the mean gain and "losers" the number of degraded clients.
"""

import re
from typing import Any

from unalike.report.formatting import (
    count_noun,
    format_gain,
    format_metric,
    join_names,
    spell,
    to_number,
)


def unit_of(client: dict) -> str:
    """Return the unit of a client's metric, from its entry in the results; percent by default."""
    return str(client.get("unit", "%"))


def higher_is_better(client: dict) -> bool:
    """Return whether a client's metric should rise, from its entry in the results."""
    return client.get("higher_is_better", True) is not False


def common_unit(clients: dict[str, dict]) -> str:
    """Return the unit that the metrics of all clients share, or "" if they differ."""
    units = {unit_of(client) for client in clients.values()}
    return units.pop() if len(units) == 1 else ""


def falling_metrics(clients: dict[str, dict]) -> list[str]:
    """Return the names of metrics for which lower is better."""
    names = {str(c.get("metric")) for c in clients.values() if not higher_is_better(c)}
    return sorted(names)


def gains(results: dict) -> dict[str, float]:
    """Return each client's gain over its local baseline in percent, the worst first.

    Clients without a gain are left out.
    """
    known = {}
    for client, entry in results["clients"].items():
        gain = to_number(entry.get("gain"))
        if gain is not None:
            known[client] = gain
    return dict(sorted(known.items(), key=lambda pair: pair[1]))


def degraded_clients(results: dict) -> list[str]:
    """Return the clients that are worse than their local baseline, the worst first."""
    return [client for client, gain in gains(results).items() if gain < 0]


def flatten_metrics(metrics: Any, prefix: str = "") -> dict[str, str]:
    """Return every number in nested metrics as text, by its full name.

    >>> flatten_metrics({"accuracy": 80.04, "recall": {"at_1": 3}, "who": "server"})
    {'accuracy': '80.04', 'recall at 1': '3'}
    """
    if isinstance(metrics, dict):
        flat: dict[str, str] = {}
        for name, inner in metrics.items():
            flat |= flatten_metrics(inner, f"{prefix} {name}".replace("_", " ").strip())
        return flat
    value = to_number(metrics)
    return {} if value is None else {prefix or "value": f"{value:.4g}"}


def federation_metrics(results: dict) -> dict[str, float]:
    """Return metrics of all clients together by full name ("acc", "joint acc").

    Only those that the clients' common task asks to be shown (`Task.federation_metrics`): the
    others are means of what the table has.
    """
    shown = [str(name).replace("_", " ") for name in results.get("federation_metrics") or []]
    known = flatten_metrics(results.get("metrics") or {})
    return {name: float(known[name]) for name in shown if name in known}


def join_metrics(metrics: dict[str, float]) -> str:
    """Return metrics as text, those with a common first word behind it.

    >>> join_metrics({"acc": 71.26, "nmi": 65.0, "joint acc": 69.9, "joint nmi": 64.0})
    'acc 71.3, nmi 65.0; joint acc 69.9, nmi 64.0'
    """
    groups: dict[str, list[str]] = {}
    for name, value in metrics.items():
        group, _, last = name.rpartition(" ")
        groups.setdefault(group, []).append(f"{last} {format_metric(value)}")
    return "; ".join(f"{group} {', '.join(texts)}".strip() for group, texts in groups.items())


def modality_names(client: dict) -> str:
    """Return the modalities of a client; empty if its input has no name.

    >>> modality_names({"modalities": ["left", "right"]}), modality_names({"modalities": ["x"]})
    ('left, right', '')
    """
    owned = client.get("modalities") or ["x"]
    return "" if owned == ["x"] else ", ".join(map(str, owned))


def kept_model(client: dict) -> str | None:
    """Return which model a client kept under the safeguard: "local", "federated" or "unjudged".

    "unjudged" is the federated one, kept because no other could be chosen.
    """
    choice = client.get("kept")
    if choice == "together":
        return "unjudged" if client.get("judged") == {} else "federated"
    return "local" if choice == "alone" else choice


def describe_judged(results: dict) -> str:
    """Return how many clients the safeguard judged; empty if it judged all of them."""
    models = [kept_model(client) for client in results["clients"].values()]
    if "unjudged" not in models:
        return ""
    return f", {len(models) - models.count('unjudged')} of {len(models)} clients judged"


def why_no_gains(results: dict) -> str | None:
    """Return why no client has a gain; None if one has."""
    clients = results["clients"]
    if gains(results):
        return None
    if all(to_number(client.get("value")) is None for client in clients.values()):
        unlabelled = all(client.get("labelled") is False for client in clients.values())
        return "no client could be measured" + (", there are no labels" if unlabelled else "")
    return "there is one client" if len(clients) == 1 else "there is no local baseline"


def worst_client(results: dict) -> str | None:
    """Return the client with the smallest gain or, without gains, the worst value.

    None if nothing was measured, or if clients have metrics that cannot be ranked together.
    """
    known = gains(results)
    if known:
        client = next(iter(known))
        return f"{client} {format_gain(known[client])}"
    values = {}
    for client, entry in results["clients"].items():
        value = to_number(entry.get("value"))
        if value is not None:
            values[client] = value
    entries = [results["clients"][client] for client in values]
    directions = {higher_is_better(entry) for entry in entries}
    units = {unit_of(entry) for entry in entries}
    if len(directions) != 1 or len(units) != 1:
        return None
    choose = min if directions.pop() else max
    client = choose(values, key=lambda name: values[name])
    metric = results["clients"][client].get("metric") or "value"
    return f"{client} with {metric} {format_metric(values[client], units.pop())}"


def shares_nothing(results: dict) -> bool:
    """Return whether the method brought no two clients together."""
    return results.get("sharing") == {}


def describe_sharing(groups: dict[str, list[list[str]]], clients: list[str]) -> str:
    """Return who shares what with whom, and who shares nothing.

    >>> describe_sharing({"heads": [["a", "b"], ["c", "d"]]}, list("abcde"))
    'heads: a and b; c and d | nothing: e'
    >>> describe_sharing({"public set": [["a", "b"]]}, ["a", "b"])
    'public set: all'
    """
    parts = []
    alone = list(clients)
    for what, groups_of_kind in groups.items():
        texts = []
        for group in groups_of_kind:
            texts.append("all" if len(group) == len(clients) else join_names(group))
            members = set(group)
            alone = [client for client in alone if client not in members]
        parts.append(f"{what}: {'; '.join(texts)}")
    if alone:
        parts.append(f"nothing: {join_names(alone)}")
    return " | ".join(parts)


def sharing_line(results: dict) -> str:
    """Return who shared what with whom; empty where the results do not say."""
    groups = results.get("sharing")
    if not isinstance(groups, dict):
        return ""
    if not groups:
        return "nothing: no two clients worked together"
    clients = list(results["clients"])
    if isinstance(results.get("lazy"), dict):  # groups are of all participants
        sizes = [len(group) for groups_of_kind in groups.values() for group in groups_of_kind]
        return f"{join_names(list(groups))}, in groups of up to {max(sizes):,} clients"
    return describe_sharing(groups, clients)


def verdict(results: dict) -> str:
    """Return how the run went in a sentence or two: who gained, who lost, who failed."""
    known = gains(results)
    degraded = degraded_clients(results)
    clients = results["clients"]
    worst = worst_client(results)
    trained = "together" if len(clients) > 1 else "by itself"
    if shares_nothing(results):
        trained = "each by itself, because no two of them share anything with this method"
    parts = [f"{count_noun(len(clients), 'client')} trained {trained}".capitalize()]
    lazy = results.get("lazy")
    if isinstance(lazy, dict):
        parts = [
            f"{lazy['participants']:,} of {lazy['clients']:,} clients took part, "
            f"{lazy['measured']:,} of them were measured"
        ]
    if known:
        parts.append(_describe_gains(known, degraded, len(clients)))
        if to_number(results.get("delta")) is not None:
            parts.append(f"mean gain {format_gain(results['delta'])}")
        if not degraded and len(known) > 1:
            parts.append(f"the least gain is {worst}")
    else:
        if len(clients) > 1:
            parts.append(f"{why_no_gains(results)}, so gains are not known")
        if worst:
            parts.append(f"the worst is {worst}")
    sentence = "; ".join(parts) + "."
    safeguard = results.get("safeguard")
    if isinstance(safeguard, dict) and to_number(safeguard.get("delta")) is not None:
        remaining = count_noun(int(to_number(safeguard.get("losers")) or 0), "degraded client")
        sentence += (
            f" With the safeguard the mean gain is {format_gain(safeguard['delta'])}, "
            f"with {remaining}{describe_judged(results)}."
        )
    failures = lasting_failures(results.get("failures") or [])
    failed = list(dict.fromkeys(str(failure.get("client")) for failure in failures))
    if failed:
        who_failed = count_noun(len(failed), "client").capitalize()
        sentence += f" {who_failed} failed at least once: {join_names(failed)}."
    return sentence


def _describe_gains(known: dict[str, float], degraded: list[str], clients: int) -> str:
    gained = sum(gain > 0 for gain in known.values())
    level = len(known) - gained - len(degraded)
    unknown = clients - len(known)
    if gained == clients:
        return "all gained" if clients > 1 else "it gained"
    parts = [f"{_spell_none(gained)} gained"]
    if degraded:
        losses = [f"{client} {format_gain(known[client])}" for client in degraded]
        parts.append(f"{_spell_none(len(degraded))} lost ({join_names(losses)})")
    if level:
        parts.append(f"{_spell_none(level)} stayed level")
    if unknown:
        parts.append(f"of {_spell_none(unknown)} the gain is not known")
    return ", ".join(parts)


def _spell_none(amount: int) -> str:
    return spell(amount) if amount else "none"


def lasting_failures(failures: list[dict]) -> list[dict]:
    """Return the failures that put a client out for the rest of the run.

    The others only made it miss a round.
    """
    return [failure for failure in failures if failure.get("lasting", True)]


def describe_failures(failures: list[dict]) -> list[str]:
    """Return a sentence for each client, operation and reason that failed, with the rounds.

    Clients that only missed rounds have not failed.
    """
    rounds: dict[tuple[str, ...], list] = {}
    for failure in lasting_failures(failures):
        client, operation, reason = (
            str(failure.get(part) or "unknown") for part in ("client", "operation", "reason")
        )
        if failure.get("location"):  # of a bug: file, line and function
            reason = f"{reason} ({failure['location']})"
        rounds.setdefault((client, operation, reason), []).append(failure.get("round"))
    return [
        f"{client} failed at {operation} in {_describe_rounds(when)}: {reason}"
        for (client, operation, reason), when in rounds.items()
    ]


def count_missed_rounds(failures: list[dict]) -> tuple[dict[str, int], str]:
    """Return how many rounds each client missed, the most first, and the reasons.

    >>> away = {"client": "ada", "reason": "dropped out", "lasting": False}
    >>> count_missed_rounds([{**away, "round": 2}, {**away, "round": 2}, {**away, "round": 5}])
    ({'ada': 2}, 'dropped out')
    """
    missed = [failure for failure in failures if not failure.get("lasting", True)]
    rounds: dict[str, set] = {}
    reasons: dict[str, None] = {}
    for failure in missed:
        rounds.setdefault(str(failure.get("client")), set()).add(failure.get("round"))
        # Not how late a client was each time.
        reasons[re.sub("^late:.*", "late", str(failure.get("reason")))] = None
    ordered = sorted(rounds.items(), key=lambda pair: -len(pair[1]))
    return {client: len(when) for client, when in ordered}, join_names(list(reasons), 3)


def _describe_rounds(rounds: list) -> str:
    known = sorted({int(number) for number in map(to_number, rounds) if number is not None})
    if not known:
        return "an unknown round"
    if len(known) == 1:
        return f"round {known[0]}"
    if len(known) <= 6:
        return f"rounds {join_names(known)}"
    return f"{len(known)} rounds, {known[0]} to {known[-1]}"
