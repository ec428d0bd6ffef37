"""A comparison as Markdown, LaTeX or CSV, from what `compare` returns."""

import csv
import re
from collections.abc import Callable
from io import StringIO
from typing import Any

from unalike.base.errors import UserError, unknown_name
from unalike.report.formatting import MISSING, format_bytes, format_metric, printable

Rows = list[list[str]]
LABEL_METRIC = "f1"  # of the metrics of each label, the one that tables show
LABEL_TITLES = {
    "f1": "F1", "auc": "AUC", "average_precision": "AP", "precision": "precision",
    "recall": "recall",
}  # fmt: skip
NO_AVERAGE = {"mean": None, "low": None, "high": None, "n": 0}
LATEX_SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "±": r"$\pm$", "−": r"$-$", MISSING: "--",
    "[": "{[}", "*": "{*}",  # at the start of a row they would belong to the row before
}  # fmt: skip
MARKDOWN_SPECIAL = "\\`*[]<|"  # begin what is shown as something else: links, pictures, HTML
FORMULAS = ("=", "+", "-", "@")  # a spreadsheet computes a cell that begins so


def format_comparison(result: dict, format: str, label_metric: str = LABEL_METRIC) -> str:
    """Return a comparison as text that ends in a newline.

    Markdown and LaTeX have a table of groups with their averages, one of clients by group with the
    best mean in bold and, of multi-label tasks, one of labels by group. CSV has one line for each
    number.

    Args:
        result: what `compare` returned.
        format: one of FORMATS.
        label_metric: the metric in the table of labels, one of LABEL_TITLES; CSV has all.
    """
    if format not in FORMATS:
        raise UserError(unknown_name("format", format, FORMATS))
    return FORMATS[format](result, check_label_metric(label_metric))


def check_label_metric(name: str) -> str:
    """Return `name`. Raises: UserError if it is no metric of labels."""
    if name not in LABEL_TITLES:
        raise UserError(unknown_name("metric of labels", name, LABEL_TITLES))
    return name


def summary_rows(result: dict) -> Rows:
    """Return a header and one row per group: gain, value, degraded clients, traffic, difference."""
    unit = _common_unit(result)
    first = result["groups"][0]["label"]
    differences = {entry["group"]: entry for entry in result["differences"]}
    names = [
        "method", "seeds", "mean gain %", "lowest decile %", "spread %",
        f"mean value {unit}".strip(), "degraded clients", "up", "down",
        f"difference to {first}",
    ]  # fmt: skip
    rows = [names]
    for group in result["groups"]:
        degraded = group["losers"]["mean"]
        difference = differences.get(group["label"])
        rows.append(
            [
                group["label"],
                str(group["n"]),
                format_average(group["delta"]),
                format_average(group["decile"]),
                format_average(group["spread"]),
                format_average(group["value"], unit),
                MISSING if degraded is None else f"{degraded:.3g}",
                format_bytes(group["bytes"]["up"]["mean"]),
                format_bytes(group["bytes"]["down"]["mean"]),
                format_average(difference, unit) if difference else MISSING,
            ]
        )
    return rows


def client_rows(result: dict, emphasise: Callable[[str], str]) -> Rows:
    """Return a header and one row per client: its value in each group, the best one emphasised."""
    rows = [["client", *(group["label"] for group in result["groups"])]]
    for client in result["clients"]:
        averages = [group["clients"][client] for group in result["groups"]]
        best = min if client in result["lower_is_better"] else max
        unit = result["units"].get(client, "%")
        rows.append([client, *_emphasise_best(averages, best, unit, emphasise)])
    return rows


def label_rows(result: dict, emphasise: Callable[[str], str], metric: str) -> Rows:
    """Return a header and one row per label: a metric of it in each group, the best emphasised.

    The metric is a mean over the clients that have the label. Empty where no label was measured.
    """
    if not result["labels"]:
        return []
    title = f"label ({LABEL_TITLES[metric]} %)"
    rows = [[title, *(group["label"] for group in result["groups"])]]
    for label in result["labels"]:
        averages = [group["labels"][label].get(metric, NO_AVERAGE) for group in result["groups"]]
        rows.append([label, *_emphasise_best(averages, max, "%", emphasise)])
    return rows


def _emphasise_best(
    averages: list[dict], best: Callable, unit: str, emphasise: Callable[[str], str]
) -> list[str]:
    """Return averages as text, those with the best mean emphasised."""
    known = [average["mean"] for average in averages if average["mean"] is not None]
    first = best(known, default=None)
    cells = []
    for average in averages:
        text = format_average(average, unit)
        is_best = average["mean"] is not None and average["mean"] == first
        cells.append(emphasise(text) if is_best else text)
    return cells


def format_average(average: dict, unit: str = "%") -> str:
    """Return a mean with half of its interval.

    >>> format_average({"mean": 61.25, "low": 60.0, "high": 62.5})
    '61.2 ± 1.2'
    """
    if average["mean"] is None:
        return MISSING
    sign = "−" if average["mean"] < 0 else ""
    text = sign + format_metric(abs(average["mean"]), unit)
    if average["low"] is None:
        return text
    return f"{text} ± {format_metric((average['high'] - average['low']) / 2, unit)}"


def to_markdown(result: dict, label_metric: str = LABEL_METRIC) -> str:
    """Return the tables and a note, as GitHub shows them."""
    parts = [_markdown_table(rows) for rows in _tables(result, label_metric)]
    return "\n".join([*parts, escape_markdown(printable(_note(result))) + "\n"])


def to_latex(result: dict, label_metric: str = LABEL_METRIC) -> str:
    """Return the tables for the package booktabs."""
    parts = [_latex_table(rows) for rows in _tables(result, label_metric)]
    return "\n".join([f"% {printable(_note(result))}", *parts])


def _tables(result: dict, label_metric: str) -> list[Rows]:
    """Return the rows of each table: groups, clients, and labels where there are any."""
    tables = [summary_rows(result), client_rows(result, _mark)]
    tables.append(label_rows(result, _mark, label_metric))
    return [rows for rows in tables if rows]


def to_csv(result: dict, label_metric: str = LABEL_METRIC) -> str:
    """Return one line per number: group, quantity, client, label, unit, mean, low, high, n.

    It has all metrics of labels, whatever `label_metric`.
    """
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["group", "quantity", "client", "label", "unit", "mean", "low", "high", "n"])

    def write(
        group: str, quantity: str, average: dict, unit: str, client: str = "", label: str = ""
    ) -> None:
        numbers = [average[key] for key in ("mean", "low", "high", "n")]
        writer.writerow(map(escape_cell, [group, quantity, client, label, unit, *numbers]))

    unit = _common_unit(result)
    for group in result["groups"]:
        name = group["label"]
        write(name, "gain", group["delta"], "%")
        write(name, "lowest decile of gains", group["decile"], "%")
        write(name, "spread of gains", group["spread"], "%")
        write(name, "value", group["value"], unit)
        write(name, "degraded", group["losers"], "clients")
        for direction, average in group["bytes"].items():
            write(name, f"bytes {direction}", average, "bytes")
        write(name, "seconds", group["seconds"], "s")
        for client, average in group["clients"].items():
            write(name, "value", average, result["units"].get(client, "%"), client)
        for label, metrics in group["labels"].items():
            for metric, average in metrics.items():
                write(name, metric, average, "" if metric == "positives" else "%", label=label)
    for difference in result["differences"]:
        name = difference["group"]
        quantity = f"difference to {difference['reference']}"
        write(name, quantity, difference, unit)
        for client, average in difference["clients"].items():
            write(name, quantity, average, result["units"].get(client, "%"), client)
    return text.getvalue()


def format_rows(rows: Rows, note: str, format: str) -> str:
    """Return one table and a note in one of FORMATS; CSV has no note."""
    if format == "csv":
        text = StringIO()
        cells = [list(map(escape_cell, row)) for row in rows]
        csv.writer(text, lineterminator="\n").writerows(cells)
        return text.getvalue()
    if format == "latex":
        return f"% {printable(note)}\n{_latex_table(rows)}"
    return f"{_markdown_table(rows)}\n{escape_markdown(printable(note))}\n"


FORMATS: dict[str, Callable[[dict, str], str]] = {
    "markdown": to_markdown,
    "latex": to_latex,
    "csv": to_csv,
}

BOLD = "\x00"  # before a cell that is emphasised; no text of a run has it


def _mark(text: str) -> str:
    return BOLD + text


def _markdown_table(rows: Rows) -> str:
    lines = []
    for row in rows:
        cells = []
        for cell in row:
            text = escape_markdown(printable(cell.removeprefix(BOLD)))
            cells.append(f"**{text}**" if cell.startswith(BOLD) else text)
        lines.append(f"| {' | '.join(cells)} |")
    lines.insert(1, "|---|" + "---:|" * (len(rows[0]) - 1))
    return "\n".join(lines) + "\n"


def _latex_table(rows: Rows) -> str:
    lines = [rf"\begin{{tabular}}{{l{'r' * (len(rows[0]) - 1)}}}", r"\toprule"]
    for place, row in enumerate(rows):
        cells = []
        for cell in row:
            text = escape_latex(printable(cell.removeprefix(BOLD)))
            cells.append(rf"\textbf{{{text}}}" if cell.startswith(BOLD) else text)
        lines.append(" & ".join(cells) + r" \\")
        if place == 0:
            lines.append(r"\midrule")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def escape_markdown(text: str) -> str:
    r"""Return text that Markdown shows as it is.

    >>> escape_markdown("![a|b](c)")
    '!\\[a\\|b\\](c)'
    """
    return "".join(f"\\{letter}" if letter in MARKDOWN_SPECIAL else letter for letter in text)


def escape_cell(value: Any) -> Any:
    """Return a value of a CSV so that a spreadsheet takes text for text.

    >>> escape_cell("=1+1"), escape_cell("-1.0"), escape_cell(-1.0)
    ("'=1+1", '-1.0', -1.0)
    """
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text.startswith(FORMULAS) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def escape_latex(text: str) -> str:
    r"""Return text that LaTeX prints as it is.

    >>> escape_latex("a_b 50%")
    'a\\_b 50\\%'
    """
    pattern = "[" + re.escape("".join(LATEX_SPECIAL)) + "]"
    return re.sub(pattern, lambda match: LATEX_SPECIAL[match.group()], text)


def _common_unit(result: dict) -> str:
    units = set(result["units"].values()) or {"%"}
    return units.pop() if len(units) == 1 else ""


def _note(result: dict) -> str:
    baseline = result.get("against") or "each run's own local baseline"
    return (
        f"{result['scenario']}: ± is half of the {result['level']:.0%} interval over seeds "
        f"(Student's t); differences are paired by seed; gains are over {baseline}."
    )
