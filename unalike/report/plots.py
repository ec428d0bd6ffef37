"""The figures of one run, first what came of it: gains and learning curves."""

from math import ceil
from typing import Any

from unalike.report import history, mpl
from unalike.report.curves import plot_logged_metrics, plot_traffic, plot_visits
from unalike.report.folder import Run
from unalike.report.formatting import (
    format_gain,
    format_metric,
    join_names,
    shorten,
    to_number,
    with_unit,
)
from unalike.report.history import Curve
from unalike.report.label_distribution import plot_label_counts, plot_label_pairs
from unalike.report.method_figures import plot_method_figures
from unalike.report.mpl import (
    CLIENT_COLOURS,
    ReportFigure,
    client_colours,
    colour,
    draw,
    drawing_style,
    hide_unused,
    integer_rounds,
    new_figure,
)
from unalike.report.outcome import common_unit, falling_metrics, gains, unit_of

DASHES = (0, (4, 2.5))


def plot_run(run: Run) -> list[ReportFigure]:
    """Return every figure that this run has data for."""
    with drawing_style():
        figures = [
            plot_gains(run),
            plot_federation(run),
            plot_client_curves(run),
            *plot_method_figures(run),
            plot_logged_metrics(run),
            plot_label_counts(run),
            plot_label_pairs(run),
            plot_traffic(run),
            plot_visits(run),
        ]
    return [figure for figure in figures if figure is not None]


def plot_gains(run: Run) -> ReportFigure | None:
    """A row per client: local baseline, federated value and, if there is one, safeguarded."""
    measured = {
        client: entry
        for client, entry in run.clients.items()
        if to_number(entry.get("value")) is not None
    }
    if not measured:
        return None
    known_gains = gains({"clients": run.clients})
    order = lambda client: (known_gains.get(client, float("inf")), measured[client]["value"])
    shown = sorted(measured, key=order)[: mpl.shown_rows(len(measured))]
    has_baseline = any(to_number(measured[client].get("alone")) is not None for client in shown)

    figure, ((axis,),) = new_figure(0.75 + 0.3 * len(shown))
    tone_of = client_colours(history.clients(run))
    has_safeguard = False
    for row, client in enumerate(shown):
        has_safeguard |= _draw_gain(axis, row, measured[client], colour(tone_of(client)))
    names = []
    for client in shown:
        metric = measured[client].get("metric") or "value"
        names.append(f"{shorten(client)}, {shorten(metric)}")
    axis.set_yticks(range(len(shown)), names)
    axis.tick_params(axis="y", labelcolor=colour("ink"), length=0)
    axis.set_ylim(-0.6, len(shown) - 0.4)
    axis.margins(x=0.06)
    axis.grid(axis="y", visible=False)
    axis.spines["left"].set_visible(False)
    unit = common_unit(measured)
    axis.set_xlabel(with_unit("value of each client's own metric", unit))

    legend = [("ring", "soft", "local")] * has_baseline + [("dot", "soft", "federated")]
    legend += [("diamond", "ink", "safeguarded, where it differs")] * has_safeguard
    caption = "On the right the gain, in percent of the local value."
    if not has_baseline:
        caption = "On the right the value; there is no local baseline, so there is no gain."
    falling = falling_metrics({client: measured[client] for client in shown})
    if falling:
        caption += f" Lower is better for {join_names(falling)}."
    if len(shown) < len(measured):
        caption += f" The {len(shown)} smallest gains of {len(measured)} clients."
    ends = []
    for client in shown:
        entry = measured[client]
        local = format_metric(entry.get("alone"), unit_of(entry))
        ends.append(f"{client} {local} to {format_metric(entry['value'], unit_of(entry))}")
    compared = "local against federated" if has_baseline else "federated"
    description = (
        f"Dots on a line for each client, {compared}{_in_percent(unit)}: {join_names(ends, 8)}."
    )
    title = "Local and federated" if has_baseline else "Where each client ended"
    return ReportFigure(title, caption, draw(figure, "gains", description), legend)


def _draw_gain(axis: Any, row: int, entry: dict, tone: str) -> bool:
    """Draw one client's values and gain; return whether its safeguarded value differs."""
    local = to_number(entry.get("alone"))
    value = to_number(entry.get("value"))
    gain = to_number(entry.get("gain"))
    safeguarded = to_number(entry.get("safeguarded"))
    differs = safeguarded is not None and safeguarded != value
    if local is not None:
        line = {"linewidth": 2.6, "alpha": 0.45, "solid_capstyle": "round"}
        axis.plot([local, value], [row, row], color=tone, **line)
        ring = {"markerfacecolor": colour("paper"), "markeredgecolor": tone}
        axis.plot(local, row, "o", markersize=6.5, markeredgewidth=1.5, **ring)
    if differs:
        diamond = {"markerfacecolor": "none", "markeredgecolor": colour("ink")}
        axis.plot(safeguarded, row, "D", markersize=9.5, markeredgewidth=1, **diamond)
    axis.plot(value, row, "o", markersize=7.5, color=tone)
    mood = "soft"
    if gain:
        mood = "good" if gain > 0 else "bad"
    axis.text(
        1.015,
        row,
        format_metric(value, unit_of(entry)) if gain is None else format_gain(gain),
        transform=axis.get_yaxis_transform(),
        va="center",
        ha="left",
        color=colour(mood),
    )
    return differs


def plot_federation(run: Run) -> ReportFigure | None:
    """Metrics of the whole federation over the rounds, if they were measured more than once."""
    curves = {
        name: curve for name, curve in history.federation_curves(run).items() if len(curve) > 1
    }
    if not curves:
        return None
    figure, ((axis,),) = new_figure(2.6)
    unit = history.common_unit(run)
    legend = []
    ends = []
    for (name, curve), tone in zip(curves.items(), CLIENT_COLOURS):
        dashed = " " in name  # of a second protocol, e.g. "joint acc"
        _draw_curve(axis, curve, colour(tone), dashed)
        legend.append(("dash" if dashed else "line", tone, name))
    for name, curve in curves.items():
        ends.append(f"{name} {format_metric(_last(curve), unit)}")
    axis.set_xlabel("round")
    axis.set_ylabel(with_unit("value", unit))
    integer_rounds(axis)
    caption = f"Of all clients together; they end at {join_names(ends)}."
    description = (
        "Lines over the rounds for the whole federation"
        f"{_in_percent(unit)}, ending at {join_names(ends)}."
    )
    drawing = draw(figure, "whole", description)
    return ReportFigure("The whole federation", caption, drawing, legend)


def plot_client_curves(run: Run) -> ReportFigure | None:
    """A panel per client: its metric over the rounds; panels of one metric share their scale.

    Where a method evaluates at several stages of a round, a line shows the first stage and rings
    the last.
    """
    ends = history.metric_curves(run, "together")
    local = history.metric_curves(run, "alone")
    federated = ends
    after: dict[str, Curve] = {}
    stages = history.evaluation_stages(run)
    if len(stages) > 1:  # a line is of one stage of each round
        federated = ends | history.metric_curves(run, "together", stages[0])
        after = history.metric_curves(run, "together", stages[-1])
    if not any(len(curve) > 1 for curve in [*federated.values(), *local.values()]):
        return None
    known = [client for client in history.clients(run) if client in federated or client in local]
    shown = _choose_clients(run, known)
    limits = _shared_limits(run, shown, federated, local, after)

    columns = min(3, len(shown))
    rows = ceil(len(shown) / columns)
    figure, axes = new_figure(0.35 + 1.7 * rows, rows, columns, sharex=True)
    tone_of = client_colours(history.clients(run))
    for client, axis in zip(shown, axes.flat):
        tone = colour(tone_of(client))
        _draw_curve(axis, federated.get(client, {}), tone)
        baseline = _local_value(run, client, local)
        if len(local.get(client, {})) > 1:
            _draw_curve(axis, local[client], tone, dashed=True)
        elif baseline is not None:
            axis.axhline(baseline, color=tone, linestyle=DASHES, linewidth=1.3)
        rings = after.get(client, {})
        ring = {"markersize": 4, "markeredgecolor": tone, "markerfacecolor": "none"}
        axis.plot(list(rings), list(rings.values()), "o", **ring)
        metric = history.metric_name(run, client)
        axis.set_title(f"{shorten(client)}, {shorten(metric)}")
        axis.set_ylim(*limits[metric])
        integer_rounds(axis)
    hide_unused(axes, len(shown))
    for axis in list(axes.flat)[max(0, len(shown) - columns) : len(shown)]:
        axis.tick_params(labelbottom=True)
    figure.supxlabel("round", fontsize=8.5, color=colour("soft"))
    unit = history.common_unit(run)
    figure.supylabel(with_unit("value", unit), fontsize=8.5, color=colour("soft"))

    legend = [("line", "soft", f"federated, {stages[0]}" if after else "federated")]
    if any(_local_value(run, client, local) is not None for client in shown):
        legend.append(("dash", "soft", "local"))
    if after:
        legend.append(("ring", "soft", f"federated, {stages[-1]}"))
    caption = _caption_of_curves(stages if after else [], len(shown), len(known))
    last = []
    for client in shown:
        if client in ends:
            value = format_metric(_last(ends[client]), history.unit(run, client))
            last.append(f"{client} {value}")
    description = (
        f"A small line plot for each client: its value{_in_percent(unit)}, over the rounds. "
        f"Federated they end at: {join_names(last, 8)}."
    )
    return ReportFigure("Over the rounds", caption, draw(figure, "courses", description), legend)


def _caption_of_curves(stages: list[str], shown: int, known: int) -> str:
    caption = "Clients with the same metric share one scale."
    if stages:
        caption += f" A round is measured twice: {stages[0]} (line) and {stages[-1]} (rings)."
    if shown < known:
        caption += f" The {shown} clients with the smallest gain, of {known}."
    return caption


def _choose_clients(run: Run, known: list[str]) -> list[str]:
    """All clients, or those with the smallest gain if there are more than panels."""
    panels = mpl.shown_panels(len(known))
    if panels == len(known):
        return known
    known_gains = gains({"clients": run.clients})
    by_gain = sorted(known, key=lambda client: known_gains.get(client, float("inf")))
    return by_gain[:panels]


def _draw_curve(axis: Any, curve: Curve, tone: str, dashed: bool = False) -> None:
    style: dict[str, Any] = {"marker": "o", "markersize": 2.6 if len(curve) <= 30 else 0}
    if dashed:
        style = {"linestyle": DASHES, "linewidth": 1.3}
    axis.plot(list(curve), list(curve.values()), color=tone, **style)


def _last(curve: Curve) -> float:
    return list(curve.values())[-1]


def _local_value(run: Run, client: str, local: dict[str, Curve]) -> float | None:
    """Return a client's local baseline: from the results, or its last evaluation."""
    value = to_number(run.clients.get(client, {}).get("alone"))
    if value is not None:
        return value
    return _last(local[client]) if local.get(client) else None


def _shared_limits(
    run: Run,
    shown: list[str],
    federated: dict[str, Curve],
    local: dict[str, Curve],
    after: dict[str, Curve],
) -> dict[str, tuple[float, float]]:
    """Return {metric: (lowest, highest)} over all clients shown, with a margin."""
    values: dict[str, list[float]] = {}
    percentages = set()
    for client in shown:
        metric = history.metric_name(run, client)
        own = values.setdefault(metric, [])
        for curves in (federated, local, after):
            own += curves.get(client, {}).values()
        baseline = _local_value(run, client, local)
        if baseline is not None:
            own.append(baseline)
        if history.unit(run, client) == "%":
            percentages.add(metric)
    limits = {}
    for metric, own in values.items():
        low = min(own)
        high = max(own)
        least = 0.5 if metric in percentages else 0.02 * max(abs(low), abs(high)) or 0.5
        margin = max(0.08 * (high - low), least)
        limits[metric] = (low - margin, high + margin)
    return limits


def _in_percent(unit: str) -> str:
    return ", in percent" if unit == "%" else ""
