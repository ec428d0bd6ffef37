"""The learning curves of a comparison, for papers: vector graphics, colours for everybody."""

import math
from pathlib import Path
from typing import Any

from unalike.base.errors import UserError
from unalike.report.compare import interval
from unalike.report.folder import Run, read
from unalike.report.history import Curve, metric_curves
from unalike.report.mpl import CLIENT_COLOURS, COLOURS, integer_rounds

SUFFIXES = (".pdf", ".svg", ".png")
LINES = ("-", "--", "-.", ":")  # colour alone is not seen by everybody
SIZE = (3.4, 2.4)  # inches: one column of a paper


def plot_comparison(result: dict, file: str | Path) -> None:
    """Draw the mean value over clients by round, one line per group, with its interval over seeds.

    Args:
        result: what `compare` returned.
        file: ends in .pdf, .svg or .png.
    Raises: UserError where the file cannot be written, or the runs have no curves.
    """
    import matplotlib
    from matplotlib.figure import Figure

    file = Path(file)
    if file.suffix not in SUFFIXES:
        raise UserError(f"--plot takes a file that ends in {', '.join(SUFFIXES)}, got {file}")
    if not file.absolute().parent.is_dir():
        raise UserError(
            f"there is no folder {file.parent} to write {file.name} to: create it first"
        )
    style: Any = {
        "font.size": 8,
        "pdf.fonttype": 42,  # TrueType: publishers refuse Type 3 fonts
        "svg.hashsalt": "unalike",
        "text.parse_math": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=SIZE, layout="constrained")
        axis = figure.subplots()
        for place, group in enumerate(result["groups"]):
            curves = group_curves(group, result["clients"])
            _draw(axis, curves, place, group["label"])
        if not axis.lines:
            raise UserError("these runs were not evaluated while they went on: there is no curve")
        integer_rounds(axis)
        axis.set_xlabel("round")
        units = set(result["units"].values())
        unit = units.pop() if len(units) == 1 else ""
        axis.set_ylabel(f"mean over clients{f' ({unit})' if unit else ''}")
        axis.legend(frameon=False, fontsize=7)
        metadata: Any = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}.get(file.suffix)
        figure.savefig(file, dpi=300, metadata=metadata)


def group_curves(group: dict, clients: list[str]) -> dict[int, dict[str, Any]]:
    """Return by round the average over seeds of the mean over clients, as `interval` gives it."""
    by_round: dict[int, list[float]] = {}
    for path in group["paths"]:
        for round_number, value in _mean_curve(read(path), clients).items():
            by_round.setdefault(round_number, []).append(value)
    complete = {r: values for r, values in by_round.items() if len(values) == group["n"]}
    return {round_number: interval(complete[round_number]) for round_number in sorted(complete)}


def _mean_curve(run: Run, clients: list[str]) -> Curve:
    """Return the mean over clients in the rounds in which all of them were evaluated."""
    curves = metric_curves(run, "together")
    own = [curves.get(client, {}) for client in clients]
    rounds = set.intersection(*(set(curve) for curve in own))
    return {r: math.fsum(curve[r] for curve in own) / len(own) for r in rounds}


def _draw(axis: Any, curves: dict[int, dict[str, Any]], place: int, label: str) -> None:
    if not curves:
        return
    tone = COLOURS[CLIENT_COLOURS[place % len(CLIENT_COLOURS)]][0]
    line = LINES[place % len(LINES)]
    rounds = list(curves)
    axis.plot(rounds, [c["mean"] for c in curves.values()], line, color=tone, label=label)
    if all(average["low"] is not None for average in curves.values()):
        low = [average["low"] for average in curves.values()]
        high = [average["high"] for average in curves.values()]
        axis.fill_between(rounds, low, high, color=tone, alpha=0.2, linewidth=0)
