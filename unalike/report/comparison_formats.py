"""A comparison as Markdown, LaTeX or CSV, from what `compare` returns."""

import csv
import re
from collections.abc import Callable
from io import StringIO

from unalike.base.errors import UserError, unknown_name
from unalike.report.formatting import MISSING, format_bytes, format_metric, printable

Rows = list[list[str]]
LATEX_SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "±": r"$\pm$", "−": r"$-$", MISSING: "--",
}  # fmt: skip


def format_comparison(result: dict, format: str) -> str:
    """Return a comparison as text that ends in a newline.

    Markdown and LaTeX have two tables: groups with their averages, and clients by group with the
    best mean in bold. CSV has one line for each number.

    Args:
        result: what `compare` returned.
        format: one of FORMATS.
    """
    if format not in FORMATS:
        raise UserError(unknown_name("format", format, FORMATS))
    return FORMATS[format](result)


def summary_rows(result: dict) -> Rows:
    """Return a header and one row per group: gain, value, degraded clients, traffic, difference."""
    unit = _common_unit(result)
    first = result["groups"][0]["label"]
    differences = {entry["group"]: entry for entry in result["differences"]}
    names = [
        "method", "seeds", "mean gain %", "lowest decile %", "spread %",
        f"mean value {unit}".strip(), "degraded", "up", "down",
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
        unit = result["units"].get(client, "%")
        averages = [group["clients"][client] for group in result["groups"]]
        means = [average["mean"] for average in averages]
        best = min(means) if client in result["lower_is_better"] else max(means)
        cells = []
        for average in averages:
            text = format_average(average, unit)
            cells.append(emphasise(text) if average["mean"] == best else text)
        rows.append([client, *cells])
    return rows


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


def to_markdown(result: dict) -> str:
    """Return the two tables and a note, as GitHub shows them."""
    parts = [_markdown_table(summary_rows(result))]
    parts.append(_markdown_table(client_rows(result, _mark)))
    return "\n".join([*parts, printable(_note(result)) + "\n"])


def to_latex(result: dict) -> str:
    """Return the two tables for the package booktabs."""
    parts = [
        f"% {printable(_note(result))}",
        _latex_table(summary_rows(result)),
        _latex_table(client_rows(result, _mark)),
    ]
    return "\n".join(parts)


def to_csv(result: dict) -> str:
    """Return one line per number: group, quantity, client, unit, mean, low, high, n."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["group", "quantity", "client", "unit", "mean", "low", "high", "n"])

    def write(group: str, quantity: str, average: dict, unit: str, client: str = "") -> None:
        numbers = [average[key] for key in ("mean", "low", "high", "n")]
        writer.writerow([group, quantity, client, unit, *numbers])

    unit = _common_unit(result)
    for group in result["groups"]:
        label = group["label"]
        write(label, "gain", group["delta"], "%")
        write(label, "lowest decile of gains", group["decile"], "%")
        write(label, "spread of gains", group["spread"], "%")
        write(label, "value", group["value"], unit)
        write(label, "degraded", group["losers"], "clients")
        for direction, average in group["bytes"].items():
            write(label, f"bytes {direction}", average, "bytes")
        write(label, "seconds", group["seconds"], "s")
        for client, average in group["clients"].items():
            write(label, "value", average, result["units"].get(client, "%"), client)
    for difference in result["differences"]:
        label = difference["group"]
        quantity = f"difference to {difference['reference']}"
        write(label, quantity, difference, unit)
        for client, average in difference["clients"].items():
            write(label, quantity, average, result["units"].get(client, "%"), client)
    return text.getvalue()


def format_rows(rows: Rows, note: str, format: str) -> str:
    """Return one table and a note in one of FORMATS; CSV has no note."""
    if format == "csv":
        text = StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        return text.getvalue()
    if format == "latex":
        return f"% {printable(note)}\n{_latex_table(rows)}"
    return f"{_markdown_table(rows)}\n{printable(note)}\n"


FORMATS: dict[str, Callable[[dict], str]] = {
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
            text = printable(cell.removeprefix(BOLD)).replace("|", "\\|")
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
