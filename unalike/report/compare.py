"""Several finished runs of one scenario compared, with confidence intervals over seeds."""

import math
from collections.abc import Callable, Iterable
from operator import methodcaller
from pathlib import Path
from statistics import stdev
from typing import Any

from unalike.base.errors import UserError
from unalike.report.folder import Run, read
from unalike.report.formatting import to_number
from unalike.report.outcome import (
    degraded_clients,
    federation_metrics,
    gains,
    higher_is_better,
    unit_of,
)

LEVEL = 0.95
# The parts of a config that may distinguish two runs.
CONFIG_PARTS = (
    "algorithm",
    "training",
    "federation",
    "data",
    "public",
    "clients",
    "test",
    "dtype",
)
ROUNDING = 1e-9  # an interval this close to 0 does not exclude it


def compare(paths: Iterable[str | Path], against: str | None = None) -> dict:
    """Group runs by algorithm and differing settings, average over seeds, compare with the first.

    Args:
        paths: folders of finished runs of one scenario.
        against: algorithm or label of the group that is the one baseline of all, such as "local".
            Gains are then over its values with the same seed; by default each run's gains are over
            its own local baseline, whose model differs by method.
    Returns: a dict with
        scenario, level: the scenario's name and the level of the intervals.
        against: label of the group that gains are over; None where each run has its own baseline.
        clients, left_out: clients with a value in every run, and the others.
        units, lower_is_better: unit by client; clients whose metric should fall.
        labels: labels of multi-label tasks that were measured in every run.
        groups: averages of each group: mean gain (`delta`), lowest decile and spread of gains over
            clients, degraded clients (`losers`) and more, `labels` with an average of each label
            and metric; an average is {"mean", "low", "high", "n"}, with one seed without an
            interval (low and high are None).
        differences: each group against the first, paired by seed, positive where better;
            `same_alone` says whether both had the same local baselines (None: no pair).
    Raises: UserError if the runs cannot be compared.
    """
    runs = [read(path) for path in paths]
    if len(runs) < 2:
        raise UserError(f"A comparison needs two runs or more, got {len(runs)}.")
    _check_comparable(runs)
    common = _common_clients(runs)
    if not common:
        raise UserError(
            "These runs have no client in common that ended with a value, so nothing can be "
            "compared."
        )
    every_client: dict[str, None] = {}
    for run in runs:
        every_client |= dict.fromkeys(run.clients)

    groups: dict[str, list[Run]] = {}
    settings: dict[str, dict] = {}
    for run, fields in zip(runs, _differing_settings(runs)):
        label = _label(run.algorithm, fields)
        groups.setdefault(label, []).append(run)
        settings[label] = fields
    by_seed = {label: _index_by_seed(label, members) for label, members in groups.items()}
    reference = next(iter(groups)) if against is None else _find_group(against, groups)
    remaining = [label for label in groups if label != reference]
    baseline = None if against is None else by_seed[reference]
    entries = {client: runs[0].clients[client] for client in common}
    labels = _common_labels(runs)
    return {
        "scenario": runs[0].scenario,
        "level": LEVEL,
        "against": None if against is None else reference,
        "clients": common,
        "left_out": [client for client in every_client if client not in common],
        "units": {client: unit_of(entry) for client, entry in entries.items()},
        "lower_is_better": [c for c, entry in entries.items() if not higher_is_better(entry)],
        "labels": labels,
        "groups": [
            _summarise_group(label, settings[label], by_seed[label], common, baseline)
            | {"labels": _average_labels(groups[label], labels)}
            for label in (reference, *remaining)
        ],
        "differences": [
            _compare_groups(label, by_seed[label], reference, by_seed[reference], common)
            for label in remaining
        ],
    }


def interval(values: list[float]) -> dict[str, Any]:
    """Return mean and Student's 95 % interval: mean ± t(0.975, n - 1) s / √n.

    One value has no interval, none has no mean.

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


def _check_comparable(runs: list[Run]) -> None:
    for run in runs:
        if run.results is None:
            raise UserError(
                f"{run.path} has not finished: resume it, or leave it out of the comparison."
            )
    for run in runs[1:]:
        if run.scenario != runs[0].scenario:
            names = f"{runs[0].path} is {runs[0].scenario}, {run.path} is {run.scenario}"
            raise UserError(f"Only runs of one scenario can be compared: {names}.")


def _common_clients(runs: list[Run]) -> list[str]:
    """Return the clients that have a value in every run."""
    common = list(runs[0].clients)
    for run in runs:
        common = [client for client in common if _has_value(run, client)]
    return common


def _differing_settings(runs: list[Run]) -> list[dict]:
    """Return for each run the settings that distinguish it.

    Settings of the algorithm are compared among runs of that algorithm, others among all runs.
    """
    flat = [_settings(run) for run in runs]
    names: dict[str, None] = {}
    for own in flat:
        names |= dict.fromkeys(own)
    differing = []
    for run, own in zip(runs, flat):
        same_algorithm = [
            peer for other, peer in zip(runs, flat) if other.algorithm == run.algorithm
        ]
        fields = {}
        for name in names:
            peers = same_algorithm if name.startswith("algorithm.") else flat
            if any(peer.get(name) != own.get(name) for peer in peers):
                fields[name.removeprefix("algorithm.")] = own.get(name)
        differing.append(fields)
    return differing


def _settings(run: Run) -> dict:
    """Return the settings of a run by full name.

    Clients made in Python do not count: what they announce changes with the seed.
    """
    parts = {part: run.config[part] for part in CONFIG_PARTS if part in run.config}
    if run.config.get("python"):
        parts.pop("clients", None)
    return flatten_settings(parts)


def flatten_settings(settings: Any, prefix: str = "") -> dict:
    """Return {"optimizer": {"lr": 0.1}} as {"optimizer.lr": 0.1}.

    Elements of a list of dicts go by their id or index; an empty dict sets nothing.
    """
    if (
        isinstance(settings, list)
        and settings
        and all(isinstance(value, dict) for value in settings)
    ):
        settings = {str(value.get("id", index)): value for index, value in enumerate(settings)}
    if not isinstance(settings, dict):
        return {prefix: settings}
    flat: dict = {}
    for name, value in settings.items():
        flat |= flatten_settings(value, f"{prefix}.{name}" if prefix else str(name))
    return flat


def _label(algorithm: str, fields: dict) -> str:
    return " ".join([algorithm, *(f"{name}={value}" for name, value in fields.items())])


def _index_by_seed(label: str, members: list[Run]) -> dict[Any, Run]:
    seeds: dict[Any, Run] = {}
    for run in members:
        if run.seed in seeds:
            raise UserError(
                f"{seeds[run.seed].path} and {run.path} are both {label} with seed {run.seed}: "
                "compare one of them."
            )
        seeds[run.seed] = run
    return seeds


def _find_group(wanted: str, groups: dict[str, list[Run]]) -> str:
    """Return the label of the only group with this label or algorithm."""
    found = [label for label, runs in groups.items() if wanted in (label, runs[0].algorithm)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(f"--against {wanted}: several groups are; write one of {', '.join(found)}")
    raise UserError(
        f"--against {wanted}: none of these runs is. There are: {', '.join(groups)}. Make one with "
        f"`unalike run SCENARIO --algorithm {wanted}` and name its folder, too"
    )


def _with_gains_over(run: Run, reference: Run | None, common: list[str]) -> dict:
    """Return a run's results with gains over the values of another run, on their common clients.

    Without such a run, of the same seed, it has no gains.
    """
    clients = {}
    for client in common:
        gain = None
        if reference is not None and _value(reference, client):
            percent = 100 * _improvement(run, reference, client) / abs(_value(reference, client))
            gain = percent if math.isfinite(percent) else None
        clients[client] = run.clients[client] | {"gain": gain}
    known = [entry["gain"] for entry in clients.values() if entry["gain"] is not None]
    delta = math.fsum(known) / len(known) if known else None
    return (run.results or {}) | {"clients": clients, "delta": delta}


def _summarise_group(
    label: str,
    fields: dict,
    seeds: dict[Any, Run],
    common: list[str],
    baseline: dict[Any, Run] | None,
) -> dict:
    runs = list(seeds.values())
    results = [run.results or {} for run in runs]
    if baseline is not None:
        results = [_with_gains_over(run, baseline.get(run.seed), common) for run in runs]
    traffic = [own.get("bytes") or {} for own in results]
    federation = [federation_metrics(own) for own in results]
    return {
        "label": label,
        "algorithm": runs[0].algorithm,
        "fields": fields,
        "seeds": list(seeds),
        "n": len(runs),
        "paths": [str(run.path) for run in runs],
        "delta": _average(results, lambda own: own.get("delta")),
        "value": interval([_mean_value(run, common) for run in runs]),
        "federation": {
            name: _average(federation, methodcaller("get", name)) for name in federation[0]
        },
        "decile": _average(results, _lowest_decile),
        "spread": _average(results, _spread),
        "losers": _average(results, _count_degraded),
        "bytes": {
            "up": _average(traffic, lambda own: own.get("up")),
            "down": _average(traffic, lambda own: own.get("down")),
        },
        "seconds": _average(results, lambda own: own.get("seconds")),
        "clients": {client: _average_value(runs, client) for client in common},
        "lost": _count_losses(results, common),
    }


def _average_value(runs: list[Run], client: str) -> dict:
    return interval([_value(run, client) for run in runs])


def _label_metrics(run: Run) -> dict[str, dict]:
    """Return the metrics of each label, which runs of multi-label tasks have."""
    by_label = (run.results or {}).get("by_label")
    return by_label if isinstance(by_label, dict) else {}


def _common_labels(runs: list[Run]) -> list[str]:
    """Return the labels that every run measured."""
    measured = [_label_metrics(run) for run in runs]
    return [label for label in measured[0] if all(label in other for other in measured)]


def _average_labels(runs: list[Run], labels: list[str]) -> dict[str, dict[str, dict]]:
    """Return {label: {metric: average over seeds}}."""
    averages: dict[str, dict[str, dict]] = {}
    for label in labels:
        of_runs = [_label_metrics(run)[label] for run in runs]
        names = dict.fromkeys(name for metrics in of_runs for name in metrics)
        averages[label] = {name: _average(of_runs, methodcaller("get", name)) for name in names}
    return averages


def _count_losses(results: list[dict], clients: list[str]) -> dict[str, int]:
    """Return in how many runs each client was degraded."""
    counts = dict.fromkeys(clients, 0)
    for own in results:
        for client in degraded_clients(own):
            if client in counts:
                counts[client] += 1
    return counts


def _count_degraded(results: dict) -> int | None:
    return len(degraded_clients(results)) if gains(results) else None


def _lowest_decile(results: dict) -> float | None:
    """Return the gain that a tenth of the clients stay below, between clients interpolated."""
    known = list(gains(results).values())  # the worst first
    if len(known) < 2:
        return None
    place = 0.1 * (len(known) - 1)
    low = int(place)
    return known[low] + (place - low) * (known[low + 1] - known[low])


def _spread(results: dict) -> float | None:
    """Return the standard deviation of gains over clients."""
    known = list(gains(results).values())
    return stdev(known) if len(known) > 1 else None


def _average(results: list[dict], get: Callable[[dict], Any]) -> dict:
    values = [to_number(get(own)) for own in results]
    return interval([value for value in values if value is not None])


def _compare_groups(
    label: str,
    group: dict[Any, Run],
    reference_label: str,
    reference: dict[Any, Run],
    common: list[str],
) -> dict:
    """Return the improvement of a group over the reference, over the seeds that both have."""
    shared = [seed for seed in group if seed in reference]
    means = []
    by_client: dict[str, list[float]] = {client: [] for client in common}
    same_baselines = True
    for seed in shared:
        run = group[seed]
        other = reference[seed]
        for client in common:
            by_client[client].append(_improvement(run, other, client))
            same_baselines &= _same_baseline(run, other, client)
        means.append(math.fsum(values[-1] for values in by_client.values()) / len(common))
    difference = interval(means)
    excludes_zero = None  # too few seeds to say
    if difference["low"] is not None:
        excludes_zero = difference["low"] > ROUNDING or difference["high"] < -ROUNDING
    return {
        "group": label,
        "reference": reference_label,
        "seeds": shared,
        **difference,
        "excludes_zero": excludes_zero,
        "same_alone": same_baselines if shared else None,
        "clients": {client: interval(values) for client, values in by_client.items()},
    }


def _same_baseline(run: Run, other: Run, client: str) -> bool:
    """Return whether a client's gains in two runs are over the same local baseline.

    True if one run has none: then there are no two gains to confuse.
    """
    first = to_number(run.clients[client].get("alone"))
    second = to_number(other.clients[client].get("alone"))
    return first is None or second is None or math.isclose(first, second)


def _has_value(run: Run, client: str) -> bool:
    return to_number(run.clients.get(client, {}).get("value")) is not None


def _value(run: Run, client: str) -> float:
    return float(run.clients[client]["value"])


def _improvement(run: Run, reference: Run, client: str) -> float:
    """Return the difference of a client's value, positive where `run` is better."""
    difference = _value(run, client) - _value(reference, client)
    return difference if higher_is_better(run.clients[client]) else -difference


def _mean_value(run: Run, common: list[str]) -> float:
    return math.fsum(_value(run, client) for client in common) / len(common)


def show_comparison(result: dict, console: Any = None, label_metric: str = "f1") -> None:
    """Print a comparison, as `compare` returns it, as tables.

    Args:
        result: what `compare` returned.
        console: of rich; by default the terminal.
        label_metric: in the table of labels: f1, auc, average_precision, precision or recall.
    """
    from rich.console import Console

    from unalike.report.comparison_formats import check_label_metric
    from unalike.report.comparison_table import tables

    console = console or Console()
    for part in tables(result, console.width, check_label_metric(label_metric)):
        console.print(part)
