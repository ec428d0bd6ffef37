"""Turns the events of a run into points of named series, `client/metric` by round."""

import re
from collections.abc import Mapping
from typing import Any

from unalike.report.formatting import to_number

FEDERATION = "federation"  # before what belongs to no single client
AT_END = ("end", None)  # evaluations after a round, not at a stage inside it


class PointReader:
    """Reads events in order and returns the points that each one adds.

    Names of series: `client/metric` of federated models after a round, `client/local/metric` of the
    local baseline, `client/STAGE/metric` inside a round, `client/NAME` of what the method logs,
    `federation/...` of all clients together.
    """

    def __init__(self) -> None:
        self.names: dict[str, str] = {FEDERATION: ""}  # client by its name in series
        self.rounds: int | None = None
        self.latest: dict[str, float] = {}  # at the last stage of the current round

    def read(self, event: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
        """Return the round of an event and its values by series; none for most events."""
        kind = event["event"]
        if kind in ("start", "resume"):
            self.rounds = event.get("rounds")
            for client in event.get("clients") or {}:
                self._client(client)
        round = to_number(event.get("round"))
        read = {
            "evaluation": self._evaluation,
            "note": self._note,
            "round": self._round,
        }.get(kind)
        if round is None or read is None:
            return 0, {}
        values = {name: to_number(value) for name, value in read(event).items()}
        return int(round), {name: value for name, value in values.items() if value is not None}

    def read_results(self, results: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
        """Return the last round and what results.json adds to the curves."""
        values = {"mean_gain": results.get("delta"), "degraded": results.get("losers")}
        known = {name: to_number(value) for name, value in values.items()}
        return int(results.get("rounds") or 0), {
            f"{FEDERATION}/{name}": value for name, value in known.items() if value is not None
        }

    def _evaluation(self, event: Mapping[str, Any]) -> dict[str, Any]:
        local = event.get("who") == "alone"
        stage = event.get("when")
        prefix = "local/" if local else ""
        if not local and stage not in AT_END:
            prefix = f"{safe_name(stage)}/"
        values = {}
        for client, metrics in (event.get("values") or {}).items():
            numbers = metrics if isinstance(metrics, dict) else {"value": metrics}
            for metric, value in numbers.items():
                name = safe_name(metric)
                values[f"{self._client(client)}/{prefix}{name}"] = value
                if prefix and not local:
                    self.latest[f"{self._client(client)}/{name}"] = value
        if not prefix:
            self.latest = {}
            for metric, value in (event.get("figures") or {}).items():
                values[f"{FEDERATION}/{safe_name(metric)}"] = value
        return values

    def _note(self, event: Mapping[str, Any]) -> dict[str, Any]:
        metric = safe_name(event.get("name"))
        logged = event.get("values") or {}
        return {f"{self._client(client)}/{metric}": value for client, value in logged.items()}

    def _round(self, event: Mapping[str, Any]) -> dict[str, Any]:
        sizes = event.get("bytes") or {}
        values = {
            f"{FEDERATION}/seconds": event.get("seconds"),
            f"{FEDERATION}/bytes_up": sizes.get("up"),
            f"{FEDERATION}/bytes_down": sizes.get("down"),
        }
        # Of a round that was evaluated at stages the last one counts; the end is measured again.
        if event["round"] != self.rounds:
            values |= self.latest
        self.latest = {}
        return values

    def _client(self, client: str) -> str:
        """Return the name of a client in series; no two clients have the same."""
        wanted = safe_name(client)
        name = wanted
        number = 2
        while self.names.setdefault(name, client) != client:
            name = f"{wanted}-{number}"
            number += 1
        return name


def safe_name(text: Any) -> str:
    """Return a part of a series' name that every tracker takes: letters, digits, `_`, `-`, `.`.

    >>> safe_name("after local"), safe_name("../a")
    ('after_local', '_a')
    """
    return re.sub(r"[^\w.-]", "_", str(text)).lstrip(".") or "_"
