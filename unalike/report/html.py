"""Parts of our pages as HTML: text, tables, tiles, figures, and the style sheet of them all."""

from collections.abc import Collection
from html import escape
from typing import Any

from unalike.report.formatting import printable, to_number
from unalike.report.mpl import ReportFigure, css_variables

MAX_ROWS = 40  # rows of a table before it scrolls


def format_text(value: Any) -> str:
    """Return text that is safe on a page."""
    return escape(printable(value)).replace(" %", "\N{NO-BREAK SPACE}%")


def mood_of(gain: Any) -> str:
    """Return the class of a gain: good, bad, or none where it is 0 or missing."""
    known = to_number(gain)
    if not known:
        return ""
    return "good" if known > 0 else "bad"


def format_tiles(tiles: list[tuple[str, str, str, str]]) -> str:
    """Return numbers side by side: name, value, a note below it, and its class."""
    html = ""
    for name, value, note, kind in tiles:
        html += f"<div><dt>{format_text(name)}</dt>"
        html += (
            f'<dd class="{kind}">{format_text(value)}<small>{format_text(note)}</small></dd></div>'
        )
    return f'<dl class="facts">{html}</dl>'


def format_table(
    columns: list[str], numbers: set[str], rows: list[str], details: Collection[str] = ()
) -> str:
    """Return a table of rows that are HTML.

    Args:
        columns: their names.
        numbers: columns of numbers.
        rows: <tr> elements; cells of `details` have the class "detail".
        details: columns that a narrow screen leaves out.
    """
    head = ""
    for name in columns:
        kind = "number" if name in numbers else ""
        kind = "detail" if name in details else kind
        head += f'<th scope="col" class="{kind}">{format_text(name)}</th>'
    kind = "wide tall" if len(rows) > MAX_ROWS else "wide"
    return (
        f'<div class="{kind}"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def format_mark(kind: str, tone: str) -> str:
    """Return a mark of a legend in a colour of the page."""
    return f'<span class="mark {kind}" style="--tone: var(--{tone})"></span>'


def format_figure(figure: ReportFigure) -> str:
    """Return a figure with its title, legend and caption."""
    marks = ""
    for kind, tone, text in figure.legend:
        marks += f"<li>{format_mark(kind, tone)}{format_text(text)}</li>"
    legend = f'<ul class="legend">{marks}</ul>' if marks else ""
    drawing = f'<div class="wide">{figure.svg}</div>'
    if figure.drawing.narrow:
        drawing = (
            f'<div class="desktop">{figure.svg}</div>'
            f'<div class="phone">{figure.drawing.narrow}</div>'
        )
    return (
        f"<figure><h2>{format_text(figure.title)}</h2>{legend}{drawing}"
        f"<figcaption>{format_text(figure.caption)}</figcaption></figure>"
    )


def style_sheet() -> str:
    """Return the style of all pages, in light and dark."""
    light = f"--desk: #f4f6f8; {css_variables(dark=False)}"
    dark = f"--desk: #0f1318; {css_variables(dark=True)}"
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n{LAYOUT}"
    )


LAYOUT = """
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--desk); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 3rem 1.25rem 4rem; }
h1 { font-size: 2.1rem; line-height: 1.15; letter-spacing: -0.02em; margin: 0.2rem 0 0.4rem;
  overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; letter-spacing: -0.01em; margin: 0; }
.kind { color: var(--soft); font-size: 0.85rem; margin: 0; overflow-wrap: anywhere; }
.summary { color: var(--soft); margin: 0 0 1.4rem; max-width: 46rem; overflow-wrap: anywhere;
  text-wrap: pretty; }
.verdict { font-size: 1.3rem; line-height: 1.45; margin: 1.2rem 0 1.6rem; padding-left: 1rem;
  border-left: 4px solid var(--good); max-width: 50rem; overflow-wrap: anywhere; }
.verdict.lost { border-color: var(--bad); }
.verdict.open { border-color: var(--soft); }
.verdict + .small { margin: -0.6rem 0 1.6rem; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr));
  background: var(--paper); border: 1px solid var(--rule); border-radius: 10px;
  overflow: hidden; margin: 0 0 1.5rem; }
.facts div { box-shadow: 1px 1px 0 var(--rule); padding: 0.8rem 1rem; }
.facts dt { color: var(--soft); font-size: 0.8rem; }
.facts dd { margin: 0; font-size: 1.25rem; font-weight: 600;
  font-variant-numeric: tabular-nums; letter-spacing: -0.01em; white-space: nowrap; }
.facts dd small { display: block; font-size: 0.8rem; font-weight: 400; color: var(--soft);
  letter-spacing: 0; white-space: normal; overflow-wrap: anywhere; }
section, figure, details { background: var(--paper); border: 1px solid var(--rule);
  border-radius: 10px; padding: 1.25rem 1.4rem; margin: 0 0 1.5rem; }
figure h2 + .legend { margin-top: 0.35rem; }
.shared { color: var(--soft); font-size: 0.88rem; margin: -0.6rem 0 1rem; }
.wide { overflow-x: auto; background:
  linear-gradient(to right, var(--paper) 1rem, transparent) 0 0 / 2rem 100% no-repeat local,
  linear-gradient(to left, var(--paper) 1rem, transparent) 100% 0 / 2rem 100% no-repeat local,
  linear-gradient(to right, var(--rule), transparent) 0 0 / 0.7rem 100% no-repeat scroll,
  linear-gradient(to left, var(--rule), transparent) 100% 0 / 0.7rem 100% no-repeat scroll; }
.phone { display: none; }
figure svg { display: block; width: 100%; height: auto; margin-top: 0.9rem; }
.wide svg { min-width: 38rem; }
figure svg text { font-family: inherit !important; font-variant-numeric: tabular-nums; }
figure img { display: block; max-width: 100%; margin: 0.9rem auto 0; background: #fff;
  border-radius: 6px; }
figcaption, .small { color: var(--soft); font-size: 0.88rem; margin: 0.7rem 0 0;
  overflow-wrap: anywhere; }
.legend { display: flex; flex-wrap: wrap; gap: 0.2rem 1.1rem; list-style: none; margin: 0;
  padding: 0; font-size: 0.88rem; color: var(--soft); }
.legend li { overflow-wrap: anywhere; }
.mark { display: inline-block; vertical-align: middle; margin: 0 0.45em 0.15em 0; width: 0.7em;
  height: 0.7em; color: var(--tone); background: currentColor; border-radius: 50%; flex: none; }
.mark.ring { background: none; border: 2px solid; }
.mark.square { border-radius: 2px; }
.mark.diamond { background: none; border: 1.5px solid; border-radius: 0;
  transform: rotate(45deg) scale(0.85); }
.mark.line, .mark.dash { width: 1.5em; height: 0; background: none; border-top: 2.5px solid;
  border-radius: 0; }
.mark.dash { border-top-style: dashed; }
table { border-collapse: collapse; width: 100%; margin-top: 0.9rem; font-size: 0.95rem;
  font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 500; font-size: 0.82rem; color: var(--soft);
  padding: 0.3rem 0.9rem 0.45rem 0; border-bottom: 1px solid var(--rule);
  vertical-align: bottom; }
td { padding: 0.5rem 0.9rem 0.5rem 0; border-bottom: 1px solid var(--rule);
  overflow-wrap: break-word; max-width: 18rem; }
tbody tr:last-child td { border-bottom: 0; }
th.number, td.number { text-align: right; white-space: nowrap; }
th:last-child, td:last-child { padding-right: 0; }
td:first-child { font-weight: 600; min-width: 6rem; }
td:has(> .dot) { position: relative; padding-left: 1.2em; }
td > .dot { position: absolute; left: 0; top: 0.95em; margin: 0; }
.tall { max-height: 42rem; overflow-y: auto; }
.tall thead th { position: sticky; top: 0; background: var(--paper); }
.good { color: var(--good); }
.bad { color: var(--bad); }
.soft { color: var(--soft); }
td.good, td.bad { font-weight: 600; }
summary { cursor: pointer; font-weight: 600; }
details[open] > summary { margin-bottom: 0.8rem; }
pre { margin: 0.6rem 0 0; padding: 0.9rem 1rem; background: var(--desk); border-radius: 7px;
  overflow-x: auto; font: 0.85rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
  }
ul.failures { margin: 0.7rem 0 0; padding-left: 1.1rem; overflow-wrap: anywhere; }
@media (max-width: 40rem) { main { padding: 1.2rem 0.6rem 2rem; } .detail { display: none; }
  section, figure, details { padding: 1rem 0.8rem; } .wide svg { min-width: 32rem; }
  .desktop { display: none; } .phone { display: block; } h1 { font-size: 1.6rem; }
  .verdict { font-size: 1.15rem; } .facts { grid-template-columns: 1fr 1fr; }
  table { font-size: 0.88rem; } td, th { padding-right: 0.4rem; }
  td:first-child { min-width: 4rem; } }
@media print { body { background: none; } main { padding: 0; } .tall { max-height: none;
  } section, figure, details { break-inside: avoid; } }
"""
