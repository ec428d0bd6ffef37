"""Figures of what a run recorded beside its metrics: logged metrics, traffic, visits."""

from math import ceil
from statistics import median
from typing import Any

from unalike.report import history, mpl
from unalike.report.folder import Run
from unalike.report.formatting import byte_unit, format_bytes, join_names, shorten
from unalike.report.history import Curve
from unalike.report.mpl import (
    CLIENT_COLOURS,
    ReportFigure,
    client_colours,
    colour,
    draw,
    hide_unused,
    integer_rounds,
    new_figure,
)

MAX_OPERATIONS = 12  # bars of traffic; the others are summed up


def plot_logged_metrics(run: Run) -> ReportFigure | None:
    """A panel per metric that the method logged, a line per client.

    With many clients their range and median are added; with very many only these are drawn.
    """
    logged = {}
    for name, curves in history.logged_metrics(run).items():
        if max(map(len, curves.values())) > 1:
            logged[name] = curves
    if not logged:
        return None
    crowded = any(len(curves) > len(CLIENT_COLOURS) for curves in logged.values())
    line: dict[str, Any] = {"linewidth": 0.8, "alpha": 0.6} if crowded else {}
    columns = min(2, len(logged))
    rows = ceil(len(logged) / columns)
    tone_of = client_colours(history.clients(run))
    figure, axes = new_figure(0.3 + 2.3 * rows, rows, columns)
    for (name, curves), axis in zip(logged.items(), axes.flat):
        if len(curves) <= mpl.MAX_ROWS:
            for client, curve in curves.items():
                tone = colour(tone_of(client))
                axis.plot(list(curve), list(curve.values()), color=tone, **line)
        if crowded:
            _draw_range(axis, list(curves.values()))
        axis.set_xlabel("round")
        axis.set_ylabel(shorten(name.replace("_", " ")))
        integer_rounds(axis)
    hide_unused(axes, len(logged))
    clients: dict[str, None] = {}
    for curves in logged.values():
        clients |= dict.fromkeys(curves)
    legend = [("line", tone_of(client), client) for client in clients]
    if crowded:
        legend = [
            ("line", "ink", "median of the clients"),
            ("square", "down", "from the lowest to the highest"),
        ]
    names = join_names([name.replace("_", " ") for name in logged])
    drawing = draw(figure, "notes", f"Line plots over the rounds, for each client: {names}.")
    return ReportFigure("Logged by the method", f"By round and client: {names}.", drawing, legend)


def _draw_range(axis: Any, curves: list[Curve]) -> None:
    """Draw lowest, median and highest value of all clients in each round."""
    values: dict[int, list[float]] = {}
    for curve in curves:
        for round_number, value in curve.items():
            values.setdefault(round_number, []).append(value)
    rounds = sorted(values)
    low = [min(values[number]) for number in rounds]
    high = [max(values[number]) for number in rounds]
    middle = [median(values[number]) for number in rounds]
    axis.fill_between(rounds, low, high, color=colour("up"), alpha=0.2, linewidth=0)
    axis.plot(rounds, middle, color=colour("ink"), linewidth=2)


def plot_traffic(run: Run) -> ReportFigure | None:
    """A bar per operation: bytes up to the server, and down to the clients."""
    traffic = history.traffic_by_operation(run)
    all_bytes = sum(sum(total.values()) for total in traffic.values())
    if not all_bytes:
        return None
    shown = dict(list(traffic.items())[:MAX_OPERATIONS])
    remaining = list(traffic.values())[MAX_OPERATIONS:]
    if remaining:
        up = sum(total["up"] for total in remaining)
        down = sum(total["down"] for total in remaining)
        shown[f"{len(remaining)} others"] = {"up": up, "down": down}
    scale, unit = byte_unit(max(total["up"] + total["down"] for total in shown.values()))

    figure, ((axis,),) = new_figure(0.75 + 0.32 * len(shown))
    for row, total in enumerate(shown.values()):
        end = (total["up"] + total["down"]) / scale
        axis.barh(row, end, height=0.58, color=colour("down"))
        axis.barh(row, total["up"] / scale, height=0.58, color=colour("up"))
        text = format_bytes(total["up"] + total["down"])
        axis.annotate(text, (end, row), (5, 0), textcoords="offset points", va="center")
    axis.set_yticks(range(len(shown)), [shorten(operation) for operation in shown])
    axis.tick_params(axis="y", labelcolor=colour("ink"), length=0)
    axis.set_ylim(len(shown) - 0.5, -0.5)
    axis.margins(x=0.12)
    axis.grid(axis="y", visible=False)
    axis.set_xlabel(f"sent in the whole run ({unit})")
    own = history.total_bytes(run)
    legend = [
        ("square", "up", f"up to the server, {format_bytes(own['up'])}"),
        ("square", "down", f"down to the clients, {format_bytes(own['down'])}"),
    ]
    sums = []
    for operation, total in shown.items():
        up_text = format_bytes(total["up"])
        sums.append(f"{operation} {up_text} up and {format_bytes(total['down'])} down")
    description = f"Stacked bars of what was sent for each operation: {join_names(sums, 8)}."
    caption = "By operation, which is what the server asks of a client, as in ledger.csv."
    measuring = all_bytes - own["up"] - own["down"]
    if run.results and measuring:
        caption += f" Measuring took {format_bytes(measuring)} of it, left out of the totals above."
    drawing = draw(figure, "traffic", description)
    return ReportFigure("What was sent", caption, drawing, legend)


def plot_visits(run: Run) -> ReportFigure | None:
    """A row per client with a bar for each visit, so that fast and slow clients can be seen."""
    visits = history.visits(run)
    if not visits:
        return None
    tone_of = client_colours(history.clients(run))
    shown = list(visits)
    rows = mpl.shown_rows(len(shown))
    if rows < len(shown):
        shown = sorted(shown, key=lambda client: len(visits[client]))[:rows]
    last = max(spans[-1][1] for spans in visits.values())
    first = min(spans[0][0] for spans in visits.values())
    gap = 0.0015 * (last - first)
    figure, ((axis,),) = new_figure(0.75 + 0.25 * len(shown))
    for row, client in enumerate(shown):
        bars = []
        for start, end in visits[client]:
            bars.append((start + gap, max(end - start - 2 * gap, gap)))
        for odd in (0, 1):  # neighbours differ, so that short ones can be distinguished
            style = {"color": colour(tone_of(client)), "alpha": 0.85 - 0.4 * odd, "linewidth": 0}
            axis.broken_barh(bars[odd::2], (row - 0.34, 0.68), **style)
    names = [f"{shorten(client)}, {len(visits[client])}" for client in shown]
    axis.set_yticks(range(len(shown)), names)
    axis.tick_params(axis="y", labelcolor=colour("ink"), length=0)
    axis.set_ylim(len(shown) - 0.4, -0.6)
    axis.set_xlim(right=last + gap)
    axis.grid(axis="y", visible=False)
    axis.set_xlabel("clock of the run (s)")
    caption = (
        "A bar for each visit, from the end of the one before it to its last reply; the number "
        "behind a name counts them."
    )
    if len(shown) < len(visits):
        caption += f" The {len(shown)} clients with the fewest, of {len(visits)}."
    counts = join_names([f"{client} {len(visits[client])}" for client in shown], 8)
    drawing = draw(figure, "visits", f"Timeline of visits to each client: {counts}.")
    return ReportFigure("Who was visited when", caption, drawing)
