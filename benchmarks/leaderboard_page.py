"""The leaderboard as one HTML page that sorts its tables, and as the tables of leaderboard.md."""

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

COLUMNS = {
    "score": "score",
    "spread": "±",
    "worst": "worst client",
    "degraded": "degraded",
    "megabytes": "MB",
    "megaflops": "MFLOP",
    "server_megaflops": "server MFLOP",
    "seconds": "s",
}
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0 2rem; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #ddd; }
th { cursor: pointer; } th:first-child, td:first-child, td:last-child { text-align: left; }
"""
SCRIPT = """
for (const head of document.querySelectorAll("th")) head.onclick = () => {
  const body = head.closest("table").tBodies[0], column = head.cellIndex;
  const value = row => row.cells[column].dataset.value ?? row.cells[column].textContent;
  const up = head.dataset.up = head.dataset.up === "1" ? "" : "1";
  const order = (a, b) => isNaN(value(a)) || isNaN(value(b))
    ? value(a).localeCompare(value(b)) : value(a) - value(b);
  body.append(...[...body.rows].sort((a, b) => up ? order(a, b) : order(b, a)));
};
"""


def write_page(result: Mapping[str, Any], path: Path) -> None:
    """Write the page.

    Args:
        result: what `unalike bench leaderboard` returns.
    """
    parts = [f"<h2>{name}</h2>{table(entry)}" for name, entry in result["settings"].items()]
    for family, ranks in result["ranks"].items():
        parts.append(f"<h2>Mean ranks: {html.escape(family)}</h2>{rank_table(ranks)}")
    path.write_text(
        f"<!doctype html><meta charset=utf-8><title>Leaderboard</title><style>{STYLE}</style>"
        "<h1>Leaderboard</h1><p>Made by <code>unalike bench leaderboard</code>; what the columns "
        "mean, and what the numbers cannot tell: <a href=leaderboard.md>leaderboard.md</a>. "
        "A click on a heading sorts.</p>"
        f"{''.join(parts)}<script>{SCRIPT}</script>\n"
    )


def table(entry: Mapping[str, Any]) -> str:
    """The rows of a setting."""
    rows = []
    for name, row in entry["rows"].items():
        values = [cell(row.get(key)) for key in COLUMNS]
        chosen = " ".join(setting.removeprefix("algorithm.") for setting in row["chosen"])
        note = "works alone" if row.get("works_alone") else f"{row['failed']} failed"
        about = chosen if not (row["failed"] or row.get("works_alone")) else f"{chosen} ({note})"
        last = f"<td>{html.escape(about)}</td>"
        rows.append(f"<tr><td>{name}</td>{''.join(values)}{last}</tr>")
    return wrap(["method", *COLUMNS.values(), "chosen"], rows)


def rank_table(ranks: Mapping[str, Any]) -> str:
    """Mean ranks of a family."""
    rows = [f"<tr><td>{name}</td>{cell(rank)}</tr>" for name, rank in ranks["mean_rank"].items()]
    text = f"{ranks['blocks']} blocks; critical difference {ranks['critical_difference']}"
    return f"<p>{text}</p>{wrap(['method', 'mean rank'], rows)}"


def wrap(headings: list[str], rows: list[str]) -> str:
    """A table of these rows."""
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in headings)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def cell(value: float | None) -> str:
    """A number with its sorting key; empty where there is none.

    >>> cell(1234.5)
    '<td data-value=1234.5>1,234</td>'
    """
    if value is None:
        return "<td data-value=-1></td>"
    digits = 0 if abs(value) >= 1000 else 2
    return f"<td data-value={value}>{value:,.{digits}f}</td>"


MARK = "<!-- The rest is written by `unalike bench leaderboard-tables`. -->\n"


def write_tables(result: Mapping[str, Any], path: Path) -> None:
    """Write the tables below the mark in a Markdown page; what stands above stays."""
    parts = [path.read_text().partition(MARK)[0] + MARK]
    for family, ranks in result["ranks"].items():
        places = ", ".join(f"`{name}` {rank}" for name, rank in ranks["mean_rank"].items())
        text = f"{ranks['blocks']} blocks, critical difference {ranks['critical_difference']}"
        parts.append(f"\n## Mean ranks: {family}\n{text}: {places}.\n")
    for name, entry in result["settings"].items():
        lines = [f"\n## {name}\n| method | {' | '.join(COLUMNS.values())} | chosen |"]
        lines.append("|---" * (len(COLUMNS) + 2) + "|")
        for method, row in entry["rows"].items():
            numbers = [plain(row.get(key)) for key in COLUMNS]
            chosen = " ".join(setting.partition(".")[2] for setting in row["chosen"])
            lines.append(f"| `{method}` | {' | '.join(numbers)} | {chosen} |")
        missing = result.get("missing", {}).get(name)
        if missing:
            lines.append(f"\nNo runs of: {', '.join(f'`{method}`' for method in missing)}.")
        parts.append("\n".join(lines) + "\n")
    path.write_text("".join(parts))


def plain(value: float | None) -> str:
    """A number for a Markdown table.

    >>> plain(1234.5), plain(0.123), plain(None)
    ('1,234', '0.12', '')
    """
    if value is None:
        return ""
    return f"{value:,.{0 if abs(value) >= 1000 else 2}f}"
