"""What Jupyter shows of a run: its results as a table, and its figures."""

from html import escape
from pathlib import Path
from typing import Any

from unalike.report.folder import read
from unalike.report.mpl import COLOURS, ReportFigure
from unalike.report.page import DETAIL_COLUMNS
from unalike.report.plots import plot_run
from unalike.report.table import clients_table, facts

# Colours of a gain, by the style that the table in the terminal has.
TONES = {"green": "color:#00735a", "bold red": "color:#b3311f;font-weight:bold"}
# Signs of a legend, by the mark that the figure draws.
MARKS = {"line": "—", "dash": "- -", "dot": "●", "ring": "○", "diamond": "◇"}
LIGHT = ";".join(f"--{name}:{light}" for name, (light, _) in COLOURS.items())


def results_html(results: dict) -> str:
    """Return the table of clients and the main figures as HTML, as `show` prints them."""
    table = clients_table(results)
    header = [_cell("th", column.header, column) for column in table.columns]
    rows = ["".join(header)]
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        columns = zip(cells, table.columns, strict=True)
        rows.append("".join(_cell("td", cell, column) for cell, column in columns))
    caption = f"<caption style='text-align:left'><b>{escape(str(table.title))}</b></caption>"
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    lines = [f"<b>{escape(name)}</b> {escape(str(text))}" for name, text in facts(results)]
    return f"<div><table>{caption}{body}</table><p>{'<br>'.join(lines)}</p></div>"


def _cell(tag: str, content: Any, column: Any) -> str:
    align = "right" if column.justify == "right" else "left"
    tone = TONES.get(str(getattr(content, "style", "")), "")
    kind = " class='detail'" if str(column.header) in DETAIL_COLUMNS else ""
    style = f"text-align:{align};padding:2px 10px;{tone}"
    return f"<{tag}{kind} style='{style}'>{escape(str(content))}</{tag}>"


class Figures(list[ReportFigure]):
    """Figures of a run; Jupyter shows them one below the other."""

    def _repr_html_(self) -> str:
        return "".join(figure_html(figure) for figure in self)


def figures(path: str | Path, *titles: str) -> Figures:
    """Return the figures of the run in the folder `path`, or those with these titles."""
    drawn = plot_run(read(path))
    return Figures(figure for figure in drawn if not titles or figure.title in titles)


def figure_html(figure: ReportFigure) -> str:
    """A figure on white, with its title, legend and caption."""
    legend = " &nbsp; ".join(
        f"<span style='color:var(--{colour})'>{MARKS.get(mark, '■')}</span> {escape(text)}"
        for mark, colour, text in figure.legend
    )
    return (
        f"<figure style='{LIGHT};background:#fff;color:var(--ink);width:100%;max-width:46em;"
        "margin:1em 0;text-align:left'>"
        f"<b>{escape(figure.title)}</b><div>{legend}</div>{figure.svg}"
        f"<figcaption style='color:var(--soft)'>{escape(figure.caption)}</figcaption></figure>"
    )
