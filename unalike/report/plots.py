"""The pictures of one run, first what came of it: gains and courses. Knows nothing of the page they stand on."""

from math import ceil

from unalike.report import figure as picture
from unalike.report import formatting as words
from unalike.report import history
from unalike.report.curves import notes, traffic, visits
from unalike.report.figure import Picture, colours, short, whole_rounds
from unalike.report.folder import Run
from unalike.report.label_distribution import holdings, pairs
from unalike.report.method_figures import material
from unalike.report.mpl import CLIENTS, colour, figure, inline, settings


def draw(run: Run) -> list[Picture]:
    """Every picture this run has something to show for."""
    with settings():
        first, last = (gains, whole, courses), (notes, holdings, pairs, traffic, visits)
        drawn = [made(run) for made in first] + material(run) + [made(run) for made in last]
    return [made for made in drawn if made]


def gains(run: Run) -> Picture | None:
    """A row per client: alone, together and, where there is one, safeguarded."""
    told = {
        client: its
        for client, its in run.clients.items()
        if words.number(its.get("value")) is not None
    }
    if not told:
        return None
    gained, tone_of = words.gains({"clients": run.clients}), colours(run)
    shown = sorted(
        told, key=lambda client: (gained.get(client, float("inf")), told[client]["value"])
    )[: picture.ROWS]
    has_alone = any(words.number(told[client].get("alone")) is not None for client in shown)
    guarded = {client: words.number(told[client].get("safeguarded")) for client in shown}
    guarded = {
        client: kept
        for client, kept in guarded.items()
        if kept not in (None, told[client]["value"])
    }

    drawn, ((axis,),) = figure(0.75 + 0.3 * len(shown))
    for row, client in enumerate(shown):
        its, tone = told[client], colour(tone_of(client))
        alone, value, gain = (words.number(its.get(key)) for key in ("alone", "value", "gain"))
        if alone is not None:
            axis.plot(
                [alone, value],
                [row, row],
                color=tone,
                linewidth=2.6,
                alpha=0.45,
                solid_capstyle="round",
            )
            axis.plot(
                alone,
                row,
                "o",
                markersize=6.5,
                markerfacecolor=colour("paper"),
                markeredgecolor=tone,
                markeredgewidth=1.5,
            )
        if client in guarded:
            axis.plot(
                guarded[client],
                row,
                "D",
                markersize=9.5,
                markerfacecolor="none",
                markeredgecolor=colour("ink"),
                markeredgewidth=1,
            )
        axis.plot(value, row, "o", markersize=7.5, color=tone)
        mood = "soft" if not gain else "bad" if gain < 0 else "good"
        shown_value = words.metric_value(value, words.unit_of_client(its))
        aside = shown_value if gain is None else words.signed(gain)
        axis.text(
            1.015,
            row,
            aside,
            transform=axis.get_yaxis_transform(),
            va="center",
            ha="left",
            color=colour(mood),
        )
    axis.set_yticks(
        range(len(shown)),
        [f"{short(client)}, {short(told[client].get('metric') or 'value')}" for client in shown],
    )
    axis.tick_params(axis="y", labelcolor=colour("ink"), length=0)
    axis.set_ylim(-0.6, len(shown) - 0.4)
    axis.margins(x=0.06)
    axis.grid(axis="y", visible=False)
    axis.spines["left"].set_visible(False)
    unit = words.common_unit(told)
    axis.set_xlabel(words.in_unit("value of each client's own metric", unit))
    legend = [("ring", "soft", "alone")] * has_alone + [("dot", "soft", "together")]
    legend += [("diamond", "ink", "safeguarded, where it differs")] * bool(guarded)
    caption = "On the right the gain, in percent of the value alone."
    if not has_alone:
        caption = "On the right the value; nothing was trained alone, so there is no gain."
    if len(shown) < len(told):
        caption += f" The {len(shown)} smallest gains of {len(told)} clients."
    if any(not words.higher_is_better(told[client]) for client in shown):
        names = sorted(
            {
                str(told[client].get("metric"))
                for client in shown
                if not words.higher_is_better(told[client])
            }
        )
        caption += f" Lower is better for {words.listed(names)}."
    ends = []
    for client in shown:
        own = words.unit_of_client(told[client])
        before = words.metric_value(told[client].get("alone"), own)
        ends.append(f"{client} {before} to {words.metric_value(told[client]['value'], own)}")
    pairing = "alone against together" if has_alone else "together"
    alt = f"Dots on a line for each client, {pairing}{_in_percent(unit)}: {words.listed(ends, 8)}."
    title = "Alone and together" if has_alone else "Where each client ended"
    return Picture(title, caption, inline(drawn, "gains", alt), legend)


def whole(run: Run) -> Picture | None:
    """The figures of the whole federation over the rounds, where there is more than the one that stands on top."""
    told = {name: course for name, course in history.figures(run).items() if len(course) > 1}
    if not told:
        return None
    drawn, ((axis,),) = figure(2.6)
    for (name, course), tone in zip(told.items(), CLIENTS):
        _curve(axis, course, colour(tone), dashed=" " in name)
    axis.set_xlabel("round")
    unit = history.common_unit(run)
    axis.set_ylabel(words.in_unit("value", unit))
    whole_rounds(axis)
    legend = [("dash" if " " in name else "line", tone, name) for name, tone in zip(told, CLIENTS)]
    ends = [
        f"{name} {words.metric_value(list(course.values())[-1], unit)}"
        for name, course in told.items()
    ]
    caption = f"Of all clients together; they end at {words.listed(ends)}."
    alt = f"Lines over the rounds for the whole federation, ending at {words.listed(ends)}{' percent' * (unit == '%')}."
    return Picture("The whole federation", caption, inline(drawn, "whole", alt), legend)


def courses(run: Run) -> Picture | None:
    """A panel per client: its value over the rounds, and beside it after alignment where the method has such a step.

    Panels of one metric share their scale.
    """
    ends, alone = history.courses(run, "together"), history.courses(run, "alone")
    trained, aligned = (
        history.courses(run, "together", when) for when in ("after local", "after alignment")
    )
    together = ends | trained if aligned else ends  # one line is of one moment of each round
    known = [client for client in history.clients(run) if client in together or client in alone]
    if not any(len(course) > 1 for course in [*together.values(), *alone.values()]):
        return None
    gained = words.gains({"clients": run.clients})
    shown = known
    if len(known) > picture.PANELS:
        shown = sorted(known, key=lambda client: gained.get(client, float("inf")))[: picture.PANELS]
    reach = _reach(run, shown, [together, alone, aligned])

    columns, tone_of = min(3, len(shown)), colours(run)
    drawn, axes = figure(
        0.35 + 1.7 * ceil(len(shown) / columns), ceil(len(shown) / columns), columns, sharex=True
    )
    for client, axis in zip(shown, axes.flat):
        tone = colour(tone_of(client))
        _curve(axis, together.get(client, {}), tone)
        if len(alone.get(client, {})) > 1:
            _curve(axis, alone[client], tone, dashed=True)
        elif (level := _alone(run, client, alone)) is not None:
            axis.axhline(level, color=tone, linestyle=(0, (4, 2.5)), linewidth=1.3)
        after = aligned.get(client, {})
        axis.plot(
            list(after),
            list(after.values()),
            "o",
            markersize=4,
            markeredgecolor=tone,
            markerfacecolor="none",
        )
        axis.set_title(f"{short(client)}, {short(history.metric(run, client))}")
        axis.set_ylim(*reach[history.metric(run, client)])
        whole_rounds(axis)
    for axis in axes.flat[len(shown):]:  # fmt: skip
        axis.set_visible(False)
    for axis in axes.flat[max(0, len(shown) - columns):len(shown)]:  # fmt: skip
        axis.tick_params(labelbottom=True)
    drawn.supxlabel("round", fontsize=8.5, color=colour("soft"))
    unit = history.common_unit(run)
    drawn.supylabel(words.in_unit("value", unit), fontsize=8.5, color=colour("soft"))
    has_alone = any(_alone(run, client, alone) is not None for client in shown)
    legend = [("line", "soft", "together, after local training" if aligned else "together")] + [
        ("dash", "soft", "alone")
    ] * has_alone
    legend += [("ring", "soft", "together, after alignment")] * bool(aligned)
    caption = "Clients with the same metric share one scale."
    if len(shown) < len(known):
        caption += f" The {len(shown)} clients with the smallest gain, of {len(known)}."
    last = [
        f"{client} {words.metric_value(list(ends[client].values())[-1], history.unit(run, client))}"
        for client in shown
        if client in ends
    ]
    alt = f"A small line plot for each client: its value{_in_percent(unit)} over the rounds. Together they end at: {words.listed(last, 8)}."
    return Picture("Over the rounds", caption, inline(drawn, "courses", alt), legend)


def _curve(axis, course: dict[int, float], tone: str, dashed: bool = False) -> None:
    style = (
        {"linestyle": (0, (4, 2.5)), "linewidth": 1.3}
        if dashed
        else {"marker": "o", "markersize": 2.6 if len(course) <= 30 else 0}
    )
    axis.plot(list(course), list(course.values()), color=tone, **style)


def _alone(run: Run, client: str, alone: dict) -> float | None:
    """Where a client ended alone: as the results say, or the last evaluation."""
    told = words.number(run.clients.get(client, {}).get("alone"))
    return told if told is not None else next(reversed(alone.get(client, {}).values()), None)


def _reach(run: Run, shown: list[str], sets: list[dict]) -> dict[str, tuple[float, float]]:
    """{metric: (lowest, highest)} over all clients shown, with some air."""
    seen: dict[str, list[float]] = {}
    for client in shown:
        values = [value for courses in sets for value in courses.get(client, {}).values()]
        level = _alone(run, client, sets[1])
        seen.setdefault(history.metric(run, client), []).extend(
            values + ([level] if level is not None else [])
        )
    percent = {history.metric(run, c) for c in shown if history.unit(run, c) == "%"}
    limits = {}
    for metric, values in seen.items():
        low, high = min(values), max(values)
        least = 0.5 if metric in percent else 0.02 * max(abs(low), abs(high)) or 0.5
        margin = max(0.08 * (high - low), least)
        limits[metric] = (low - margin, high + margin)
    return limits


def _in_percent(unit: str) -> str:
    return ", in percent" if unit == "%" else ""
