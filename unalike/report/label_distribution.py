"""Pictures of who holds which labels, and which labels go together, for one client against everyone. Knows nothing of the page."""

from math import ceil

from unalike.report import formatting as words
from unalike.report.figure import ROWS, Picture, short
from unalike.report.folder import Run
from unalike.report.mpl import colour, figure, inline

LABELS, PANELS = 60, 6  # the most labels drawn, those that are held most; the most panels of pairs


def holdings(run: Run) -> Picture | None:
    """A dot for each client and label it holds, as large as it holds many."""
    labels, counts, which = _told(run)
    if len(labels) < 2 or not counts:
        return None
    shown = {client: [its[k] for k in which] for client, its in list(counts.items())[:ROWS]}
    most = max((max(its, default=0) for its in counts.values()), default=0) or 1
    drawn, ((axis,),) = figure(1.1 + 0.24 * len(shown))
    for row, its in enumerate(shown.values()):
        held = [(place, count) for place, count in enumerate(its) if count]
        axis.scatter(
            [place for place, _ in held],
            [row] * len(held),
            s=[4 + 130 * count / most for _, count in held],
            color=colour("up"),
        )
    axis.set_xticks(
        range(len(which)), [short(labels[k], 14) for k in which], rotation=60, ha="right"
    )
    axis.set_yticks(range(len(shown)), [short(client) for client in shown])
    axis.set_xlim(-0.7, len(which) - 0.3)
    axis.set_ylim(len(shown) - 0.4, -0.6)
    missing = [sum(not count for count in its) for its in counts.values()]
    caption = f"The largest dot is {words.count(most, 'sample')}; a client lacks {min(missing)} to {max(missing)} of {len(labels)} labels."
    caption += _most(labels, which)
    alt = f"A table of dots, clients by labels. Labels that clients lack: {words.listed([f'{c} {n}' for c, n in zip(counts, missing)], 8)}."
    return Picture("Who holds which labels", caption, inline(drawn, "holdings", alt))


def pairs(run: Run) -> Picture | None:
    """Which labels are found on the same sample: of everyone together, and of the first clients."""
    labels, _, which = _told(run)
    told = {"everyone": _event(run).get("together"), **(_event(run).get("pairs") or {})}
    told = {who: matrix for who, matrix in told.items() if matrix}
    if len(told) < 2:
        return None
    shown = dict(list(told.items())[:PANELS])
    drawn, axes = figure(2.9 * ceil(len(shown) / 3), ceil(len(shown) / 3), 3)
    for (who, matrix), axis in zip(shown.items(), axes.flat):
        found = [
            (a, b, count)
            for a, i in enumerate(which)
            for b, j in enumerate(which)
            if a != b and (count := matrix[i][j])
        ]
        most = max((count for _, _, count in found), default=1)
        down, across, counts = zip(*found) if found else ((), (), ())
        axis.scatter(
            across, down, s=[2 + 30 * count / most for count in counts], color=colour("up")
        )
        axis.set_title(short(who))
        axis.set_xlim(-0.7, len(which) - 0.3)
        axis.set_ylim(len(which) - 0.3, -0.7)
        axis.set_aspect("equal")
        axis.set_xticks(range(len(which)), [""] * len(which))
        axis.set_yticks(
            range(len(which)),
            [short(labels[k], 12) for k in which],
            fontsize=min(5.5, 130 / len(which)),
        )
    for axis in axes.flat[len(shown):]:  # fmt: skip
        axis.set_visible(False)
    caption = (
        "Labels on the same sample, in the same order down and across; dots are scaled within each panel."
        + _most(labels, which)
    )
    alt = f"Tables of dots, label by label, for {words.listed(list(shown), PANELS)}."
    return Picture("Which labels go together", caption, inline(drawn, "pairs", alt))


def _event(run: Run) -> dict:
    return next((event for event in run.events if event["event"] == "labels"), {})


def _told(run: Run) -> tuple[list[str], dict[str, list[int]], list[int]]:
    """The labels, how many of each every client holds, and which are drawn, in their order."""
    labels, counts = list(_event(run).get("labels") or []), dict(_event(run).get("counts") or {})
    held = [sum(its[k] for its in counts.values()) for k in range(len(labels))]
    return labels, counts, sorted(sorted(range(len(labels)), key=lambda k: -held[k])[:LABELS])


def _most(labels: list[str], which: list[int]) -> str:
    return (
        f" Of {len(labels)} labels the {len(which)} that are held most are drawn."
        if len(which) < len(labels)
        else ""
    )
