"""A comparison as tables in the terminal, from what `compare` returns."""

from collections.abc import Callable
from string import ascii_uppercase
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from unalike.report.comparison_formats import LABEL_METRIC, LABEL_TITLES, NO_AVERAGE
from unalike.report.formatting import (
    MISSING,
    count_noun,
    format_bytes,
    format_duration,
    format_metric,
    join_names,
    printable,
)

DEGRADED = "▼"  # as on the page: colour alone is not seen everywhere
CLIENT_WIDTH = 18  # columns of the terminal for a client's name
GROUP_WIDTH = 15  # and for each group


def tables(result: dict, width: int = 80, label_metric: str = LABEL_METRIC) -> list[Any]:
    """Return the parts to print: groups by letter, averages, clients, labels, and differences.

    Args:
        result: what `compare` returned.
        width: columns of the terminal.
        label_metric: of each label in the table of labels, one of LABEL_TITLES.
    """
    groups = {_letter(place): group for place, group in enumerate(result["groups"])}
    units = result.get("units", {})
    unit = _common_unit(units)
    title = f"{result['scenario']}: {count_noun(len(groups), 'group')}"
    parts: list[Any] = [Text(printable(title), style="bold")]
    for letter, group in groups.items():
        plural = "s" if group["n"] > 1 else ""
        seeds = f"  seed{plural} {join_names(group['seeds'], 12)}"
        label = (printable(group["label"]), "bold")
        parts.append(Text.assemble(f"  {letter}  ", label, (seeds, "dim")))
    parts.append(_averages(groups, unit))
    parts += _federation(groups, unit)
    parts += _clients(groups, result["clients"], width, units)
    parts += _labels(groups, result["labels"], width, label_metric)
    if result["differences"]:
        parts.append(_differences(result, groups, units))
    return parts + _footnotes(result, groups)


def _common_unit(units: dict[str, str]) -> str:
    """Return the unit of all clients' metrics, or "" if they differ."""
    different = set(units.values()) or {"%"}
    return different.pop() if len(different) == 1 else ""


def _averages(groups: dict[str, dict], unit: str) -> Table:
    value = f"mean value {unit}".strip()
    table = _table("", "mean gain %", "lowest decile", value, "degraded", "up", "down", "time")
    for letter, group in groups.items():
        degraded = group["losers"]["mean"]
        text = MISSING if degraded is None else f"{degraded:.3g}"
        table.add_row(
            letter,
            _average(group["delta"], sign=True),
            _average(group["decile"], sign=True),
            _average(group["value"], unit=unit),
            Text(text, style="bold red" if degraded else ""),
            format_bytes(group["bytes"]["up"]["mean"]),
            format_bytes(group["bytes"]["down"]["mean"]),
            format_duration(group["seconds"]["mean"]),
        )
    return table


def _federation(groups: dict[str, dict], unit: str) -> list[Table]:
    """Return a table of metrics of all clients together, if the task has any to show."""
    names: dict[str, None] = {}
    for group in groups.values():
        names |= dict.fromkeys(group["federation"])
    if not names:
        return []
    table = _table("federation", *(f"{name} {unit}".strip() for name in names))
    for letter, group in groups.items():
        averages = [group["federation"].get(name, {"mean": None}) for name in names]
        table.add_row(letter, *(_average(average) for average in averages))
    return [table]


def _clients(
    groups: dict[str, dict], clients: list[str], width: int, units: dict[str, str]
) -> list[Table]:
    """Return each client's value in each group, as many groups side by side as fit."""

    def cell(group: dict, client: str) -> Text:
        degraded = bool(group["lost"][client])
        unit = units.get(client, "%")
        return _average(group["clients"][client], degraded=degraded, unit=unit)

    return _by_group("client", groups, clients, width, cell)


def _labels(groups: dict[str, dict], labels: list[str], width: int, metric: str) -> list[Table]:
    """Return a metric of each label in each group, as many groups side by side as fit."""

    def cell(group: dict, label: str) -> Text:
        return _average(group["labels"][label].get(metric, NO_AVERAGE))

    title = f"label, {LABEL_TITLES[metric]} %"
    return _by_group(title, groups, labels, width, cell) if labels else []


def _by_group(
    title: str,
    groups: dict[str, dict],
    names: list[str],
    width: int,
    cell: Callable[[dict, str], Text],
) -> list[Table]:
    """Return tables with a row per name and a column per group, as many groups as fit."""
    fitting = max(1, (width - CLIENT_WIDTH) // GROUP_WIDTH)
    parts = []
    letters = list(groups)
    for start in range(0, len(letters), fitting):
        shown = letters[start : start + fitting]
        table = _table(title, *shown)
        for name in names:
            table.add_row(Text(printable(name)), *(cell(groups[letter], name) for letter in shown))
        parts.append(table)
    return parts


def _differences(result: dict, groups: dict[str, dict], units: dict[str, str]) -> Table:
    letters = {group["label"]: letter for letter, group in groups.items()}
    unit = _common_unit(units)
    table = _table("", f"mean difference {unit}".strip(), "pairs", "worst client", "")
    for difference in result["differences"]:
        name = f"{letters[difference['group']]} − {letters[difference['reference']]}"
        style = ""
        if difference["excludes_zero"]:
            style = "green" if difference["mean"] > 0 else "red"
        table.add_row(
            name,
            _average(difference, sign=True, unit=unit),
            str(difference["n"]),
            Text(_worst_client(difference, units)),
            Text(_describe_certainty(difference), style=style),
        )
    return table


def _worst_client(difference: dict, units: dict[str, str]) -> str:
    known = {}
    for client, average in difference["clients"].items():
        if average["mean"] is not None:
            known[client] = average["mean"]
    if not known:
        return MISSING
    worst = min(known, key=lambda client: known[client])
    return f"{printable(worst)} {_format_change(known[worst], units.get(worst, '%'))}"


def _describe_certainty(difference: dict) -> str:
    if not difference["n"]:
        return "no seed in common"
    if difference["excludes_zero"] is None:
        return "one pair: too few to say"
    return "clear of 0" if difference["excludes_zero"] else "not clear of 0"


def _footnotes(result: dict, groups: dict[str, dict]) -> list[Text]:
    notes = [
        f"± is half of the {result['level']:.0%} interval over seeds (Student's t), not corrected "
        "for the number of comparisons."
    ]
    if result.get("against"):
        notes.append(f"Gains are over {result['against']} with the same seed.")
    single = [letter for letter, group in groups.items() if group["n"] == 1]
    if single:
        notes.append(f"{join_names(single)}: one seed only, so no interval.")
    if any(any(group["lost"].values()) for group in groups.values()):
        baseline = result.get("against") or "its local baseline"
        notes.append(f"{DEGRADED} worse than {baseline} in at least one run.")
    falling = result.get("lower_is_better")
    if falling:
        notes.append(
            f"Lower is better for {join_names(falling)}; differences are positive where better."
        )
    letters = {group["label"]: letter for letter, group in groups.items()}
    unlike = [
        letters[difference["group"]]
        for difference in result["differences"]
        if difference["same_alone"] is False
    ]
    if unlike and not result.get("against"):
        first = letters[result["differences"][0]["reference"]]
        notes.append(
            f"Local baselines of {join_names(unlike)} differ from those of {first}: mean gains and "
            "degraded clients cannot be compared; the values can."
        )
    if result["left_out"]:
        left_out = join_names(result["left_out"])
        notes.append(f"Left out, for want of a value in every run: {left_out}.")
    return [Text(printable(note), style="dim") for note in notes]


def _average(average: dict, sign: bool = False, degraded: bool = False, unit: str = "%") -> Text:
    """Return a mean with half of its interval, marked if a client was degraded."""
    mean = average["mean"]
    if mean is None:
        return Text(MISSING)
    half = ""
    if average["low"] is not None:
        half = f" ±{format_metric((average['high'] - average['low']) / 2, unit)}"
    value = _format_change(mean, unit) if sign else format_metric(mean, unit)
    if degraded:
        return Text.assemble((f"{DEGRADED} {value}", "bold red"), (half, "dim"))
    return Text.assemble(value, (half, "dim"))


def _format_change(value: float, unit: str = "%") -> str:
    sign = "−" if value < 0 else "+"
    return f"{sign}{format_metric(abs(value), unit)}"


def _letter(place: int) -> str:
    first = ascii_uppercase[place // 26 - 1] if place >= 26 else ""
    return first + ascii_uppercase[place % 26]


def _table(first: str, *names: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(Text(printable(first)), overflow="fold")
    for name in names:
        table.add_column(Text(printable(name)), justify="right")
    return table
