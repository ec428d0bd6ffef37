"""Several finished runs of one scenario, side by side, with how sure the numbers are. Knows run folders only."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from unalike.base.errors import UserError
from unalike.report import formatting as words
from unalike.report.folder import Run, read

LEVEL = 0.95
# the parts of a config that may set two runs apart
ROOMS = ("algorithm", "training", "federation", "data", "public", "clients", "test", "dtype")


def compare(paths: Iterable[str | Path]) -> dict:
    """Group runs by algorithm and by the settings that differ, average over seeds, and set each group against the first.

    Returns {"scenario", "level", "clients", "left_out", "groups": [...], "differences": [...]}. Every average is
    {"mean", "low", "high", "n"}; with one seed there is no interval, and low and high are None. A difference pairs the runs of
    the two groups that share a seed and is positive where the group is better; `same_alone` says whether the gains of those runs are against the same values alone
    (None: no pair to see it in).
    """
    runs = [read(path) for path in paths]
    if len(runs) < 2:
        raise UserError(f"A comparison needs two runs or more, got {len(runs)}.")
    _comparable(runs)
    common = [client for client in runs[0].clients if all(_ended(run, client) for run in runs)]
    if not common:
        raise UserError(
            "These runs have no client in common that ended with a value, so nothing can be compared."
        )
    everyone = dict.fromkeys(client for run in runs for client in run.clients)

    groups: dict[str, list[Run]] = {}
    settings = _differing(runs)
    for run, fields in zip(runs, settings):
        groups.setdefault(_label(run.algorithm, fields), []).append(run)
    fields = {_label(run.algorithm, its): its for run, its in zip(runs, settings)}
    seeds = {label: _by_seed(label, members) for label, members in groups.items()}
    told = [_group(label, fields[label], seeds[label], common) for label in groups]
    reference, *others = groups
    return {
        "scenario": runs[0].scenario,
        "level": LEVEL,
        "clients": common,
        "left_out": [client for client in everyone if client not in common],
        "units": {client: words.unit_of_client(runs[0].clients[client]) for client in common},
        "lower_is_better": [
            client for client in common if not words.higher_is_better(runs[0].clients[client])
        ],
        "groups": told,
        "differences": [
            _difference(other, seeds[other], reference, seeds[reference], common)
            for other in others
        ],
    }


def interval(values: list[float]) -> dict[str, Any]:
    """Mean and Student's 95 % interval: mean ± t(0.975, n - 1) s / √n. One value has no interval, none has no mean.

    >>> {key: round(value, 3) for key, value in interval([1.0, 2.0, 3.0]).items()}
    {'mean': 2.0, 'low': -0.484, 'high': 4.484, 'n': 3}
    """
    from scipy.stats import t

    n = len(values)
    if n < 2:
        return {"mean": values[0] if values else None, "low": None, "high": None, "n": n}
    mean = math.fsum(values) / n
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    half = float(t.ppf((1 + LEVEL) / 2, n - 1)) * spread / math.sqrt(n)
    return {"mean": mean, "low": mean - half, "high": mean + half, "n": n}


def _comparable(runs: list[Run]) -> None:
    for run in runs:
        if run.results is None:
            raise UserError(
                f"{run.path} has not finished: resume it, or leave it out of the comparison."
            )
    for run in runs[1:]:
        if run.scenario != runs[0].scenario:
            names = f"{runs[0].path} is {runs[0].scenario}, {run.path} is {run.scenario}"
            raise UserError(f"Only runs of one scenario can be compared: {names}.")


def _differing(runs: list[Run]) -> list[dict]:
    """For each run its settings that set it apart: of the algorithm among runs of that algorithm, the others among all runs."""
    flat = [_settings(run) for run in runs]
    names = list(dict.fromkeys(name for its in flat for name in its))
    told = []
    for run, its in zip(runs, flat):
        alike = [other for peer, other in zip(runs, flat) if peer.algorithm == run.algorithm]
        against = {name: alike if name.startswith("algorithm.") else flat for name in names}
        apart = [
            name for name in names if any(peer.get(name) != its.get(name) for peer in against[name])
        ]
        told.append({name.removeprefix("algorithm."): its.get(name) for name in apart})
    return told


def _settings(run: Run) -> dict:
    """The settings of a run by their full names. Clients given in Python do not count: their cards change with the seed."""
    rooms = [
        room
        for room in ROOMS
        if room in run.config and not (room == "clients" and run.config.get("python"))
    ]
    return _flat({room: run.config[room] for room in rooms})


def _flat(settings, above: str = "") -> dict:
    """{"optimizer": {"rate": 0.1}} as {"optimizer.rate": 0.1}; the parts of a list go by their id or place, an empty dict sets nothing."""
    if (
        isinstance(settings, list)
        and settings
        and all(isinstance(value, dict) for value in settings)
    ):
        settings = {str(value.get("id", place)): value for place, value in enumerate(settings)}
    if not isinstance(settings, dict):
        return {above: settings}
    flat: dict = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{above}.{name}" if above else str(name))
    return flat


def _label(algorithm: str, fields: dict) -> str:
    return " ".join([algorithm, *(f"{name}={value}" for name, value in fields.items())])


def _by_seed(label: str, members: list[Run]) -> dict:
    seeds: dict = {}
    for run in members:
        if run.seed in seeds:
            raise UserError(
                f"{seeds[run.seed].path} and {run.path} are both {label} with seed {run.seed}: compare one of them."
            )
        seeds[run.seed] = run
    return seeds


def _group(label: str, fields: dict, seeds: dict, common: list[str]) -> dict:
    runs = list(seeds.values())
    results = [run.results for run in runs]
    clients = {client: interval([_value(run, client) for run in runs]) for client in common}
    return {
        "label": label,
        "algorithm": runs[0].algorithm,
        "fields": fields,
        "seeds": list(seeds),
        "n": len(runs),
        "paths": [str(run.path) for run in runs],
        "delta": _over(results, lambda its: words.number(its.get("delta"))),
        "value": interval([_mean(run, common) for run in runs]),
        "federation": {
            name: _over(results, lambda its, name=name: words.federation(its).get(name))
            for name in words.federation(results[0])
        },
        "losers": _over(results, lambda its: len(words.losers(its)) if words.gains(its) else None),
        "bytes": {
            way: _over(
                results, lambda its, way=way: words.number((its.get("bytes") or {}).get(way))
            )
            for way in ("up", "down")
        },
        "seconds": _over(results, lambda its: words.number(its.get("seconds"))),
        "clients": clients,
        "lost": {client: sum(client in words.losers(its) for its in results) for client in common},
    }


def _over(results: list, of: Callable[..., float | None]) -> dict:
    return interval([float(value) for value in map(of, results) if value is not None])


def _difference(
    other: str, others: dict, reference: str, references: dict, common: list[str]
) -> dict:
    shared = [seed for seed in others if seed in references]
    clients = {
        client: interval([_improvement(others[seed], references[seed], client) for seed in shared])
        for client in common
    }
    means = []
    for seed in shared:
        each = [_improvement(others[seed], references[seed], client) for client in common]
        means.append(math.fsum(each) / len(each))
    told = interval(means)
    # None: too few seeds to say. The hair's breadth keeps rounding from passing for an effect.
    clear = None if told["low"] is None else told["low"] > 1e-9 or told["high"] < -1e-9
    alike = (
        all(
            _same_alone(others[seed], references[seed], client)
            for seed in shared
            for client in common
        )
        if shared
        else None
    )
    told |= {"excludes_zero": clear, "same_alone": alike}
    return {"group": other, "reference": reference, "seeds": shared, **told, "clients": clients}


def _same_alone(run: Run, other: Run, client: str) -> bool:
    """Whether a client's gains in two runs are against the same value; where one has none there are no two gains to mix up."""
    first, second = (words.number(its.clients[client].get("alone")) for its in (run, other))
    return first is None or second is None or math.isclose(first, second)


def _ended(run: Run, client: str) -> bool:
    return words.number(run.clients.get(client, {}).get("value")) is not None


def _value(run: Run, client: str) -> float:
    return float(run.clients[client]["value"])


def _improvement(run: Run, reference: Run, client: str) -> float:
    """Return the difference of a client's value, positive where the run is better."""
    difference = _value(run, client) - _value(reference, client)
    return difference if words.higher_is_better(run.clients[client]) else -difference


def _mean(run: Run, common: list[str]) -> float:
    return math.fsum(_value(run, client) for client in common) / len(common)


def show_comparison(result: dict, console=None) -> None:
    """Print a comparison as tables."""
    from rich.console import Console

    from unalike.report.side_by_side import tables

    console = console or Console()
    for part in tables(result, console.width):
        console.print(part)
