"""Pictures of what a run recorded besides its values: notes, traffic, visits. Knows nothing of the page they stand on."""

from math import ceil
from statistics import median

from unalike.report import figure as picture
from unalike.report import formatting as words
from unalike.report import history
from unalike.report.figure import Picture, colours, short, whole_rounds
from unalike.report.folder import Run
from unalike.report.mpl import CLIENTS, colour, figure, inline


def notes(run: Run) -> Picture | None:
    """A panel per thing the method wrote down, a line per client. Many clients add their range and median; very many show only these."""
    told = {
        name: its
        for name, its in history.notes(run).items()
        if any(len(course) > 1 for course in its.values())
    }
    if not told:
        return None
    crowded = any(len(its) > len(CLIENTS) for its in told.values())
    look = {"linewidth": 0.8, "alpha": 0.6} if crowded else {}
    columns, tone_of = min(2, len(told)), colours(run)
    drawn, axes = figure(0.3 + 2.3 * ceil(len(told) / columns), ceil(len(told) / columns), columns)
    for (name, its), axis in zip(told.items(), axes.flat):
        for client, course in its.items() if len(its) <= picture.ROWS else ():
            axis.plot(list(course), list(course.values()), color=colour(tone_of(client)), **look)
        if crowded:
            rounds = sorted({at for course in its.values() for at in course})
            low, middle, high = (
                [of(course[at] for course in its.values() if at in course) for at in rounds]
                for of in (min, median, max)
            )
            axis.fill_between(rounds, low, high, color=colour("up"), alpha=0.2, linewidth=0)
            axis.plot(rounds, middle, color=colour("ink"), linewidth=2)
        axis.set_xlabel("round")
        axis.set_ylabel(short(name.replace("_", " ")))
        whole_rounds(axis)
    for axis in axes.flat[len(told):]:  # fmt: skip
        axis.set_visible(False)
    who = list(dict.fromkeys(client for its in told.values() for client in its))
    legend = [("line", tone_of(client), client) for client in who]
    if crowded:
        legend = [
            ("line", "ink", "median of the clients"),
            ("square", "down", "from the lowest to the highest"),
        ]
    names = words.listed([name.replace("_", " ") for name in told])
    alt = f"Line plots over the rounds, for each client: {names}."
    return Picture(
        "What the method wrote down",
        f"By round and client: {names}.",
        inline(drawn, "notes", alt),
        legend,
    )


def traffic(run: Run) -> Picture | None:
    """A bar per operation: bytes from the clients up to the server, and from the server down."""
    told = history.traffic(run)
    if not any(sum(its.values()) for its in told.values()):
        return None
    shown, rest = dict(list(told.items())[:12]), list(told.values())[12:]
    if rest:
        shown[f"{len(rest)} others"] = {
            way: sum(its[way] for its in rest) for way in ("up", "down")
        }
    scale, unit = words.unit_of(max(its["up"] + its["down"] for its in shown.values()))

    drawn, ((axis,),) = figure(0.75 + 0.32 * len(shown))
    for row, its in enumerate(shown.values()):
        axis.barh(row, its["up"] / scale, height=0.58, color=colour("up"))
        axis.barh(
            row, its["down"] / scale, left=its["up"] / scale, height=0.58, color=colour("down")
        )
        total = its["up"] + its["down"]
        axis.annotate(
            words.data(total), (total / scale, row), (5, 0), textcoords="offset points", va="center"
        )
    axis.set_yticks(range(len(shown)), [short(operation) for operation in shown])
    axis.tick_params(axis="y", labelcolor=colour("ink"), length=0)
    axis.set_ylim(len(shown) - 0.5, -0.5)
    axis.margins(x=0.12)
    axis.grid(axis="y", visible=False)
    axis.set_xlabel(f"sent in the whole run ({unit})")
    own = history.sent(run)
    legend = [("square", "up", f"up to the server, {words.data(own['up'])}")]
    legend += [("square", "down", f"down to the clients, {words.data(own['down'])}")]
    each = [
        f"{operation} {words.data(its['up'])} up and {words.data(its['down'])} down"
        for operation, its in shown.items()
    ]
    alt = f"Stacked bars of what was sent for each operation: {words.listed(each, 8)}."
    caption, more = (
        "By operation, as the ledger counts it.",
        sum(map(sum, map(dict.values, told.values()))) - own["up"] - own["down"],
    )
    if run.results and more:
        caption += f" Measuring took {words.data(more)} of it, left out of the totals above."
    return Picture("What was sent", caption, inline(drawn, "traffic", alt), legend)


def visits(run: Run) -> Picture | None:
    """A row per client: a bar for each visit, so that quick and slow ones are seen to go their own pace."""
    told, tone_of = history.visits(run), colours(run)
    if not told:
        return None
    shown = (
        list(told)[: picture.ROWS]
        if len(told) <= picture.ROWS
        else sorted(told, key=lambda client: len(told[client]))[: picture.ROWS]
    )
    last = max(end for spans in told.values() for _, end in spans)
    gap = 0.0015 * (last - min(spans[0][0] for spans in told.values()))
    drawn, ((axis,),) = figure(0.75 + 0.25 * len(shown))
    for row, client in enumerate(shown):
        bars = [(begin + gap, max(end - begin - 2 * gap, gap)) for begin, end in told[client]]
        for odd in (0, 1):  # neighbours differ, so that they can be told apart however short
            axis.broken_barh(
                bars[odd::2],
                (row - 0.34, 0.68),
                color=colour(tone_of(client)),
                alpha=0.85 - 0.4 * odd,
                linewidth=0,
            )
    axis.set_yticks(
        range(len(shown)), [f"{short(client)}, {len(told[client])}" for client in shown]
    )
    axis.tick_params(axis="y", labelcolor=colour("ink"), length=0)
    axis.set_ylim(len(shown) - 0.4, -0.6)
    axis.set_xlim(right=last + gap)
    axis.grid(axis="y", visible=False)
    axis.set_xlabel("clock of the run (s)")
    caption = "A bar for each visit, from the end of the one before it to its last reply; the number behind a name counts them."
    if len(shown) < len(told):
        caption += f" The {len(shown)} clients with the fewest, of {len(told)}."
    alt = f"Timeline of visits to each client: {words.listed([f'{client} {len(told[client])}' for client in shown], 8)}."
    return Picture("Who was visited when", caption, inline(drawn, "visits", alt))
