"""Figures of which client has samples of which label, and which labels occur together."""

from math import ceil
from typing import Any

from unalike.report import mpl
from unalike.report.folder import Run
from unalike.report.formatting import count_noun, join_names, shorten
from unalike.report.mpl import ReportFigure, colour, draw, hide_unused, new_figure

MAX_LABELS = 60  # those with the most samples are drawn
MAX_PAIR_PANELS = 6
PHONE_LABELS = 20  # of more the drawing for a phone would be black


def plot_label_counts(run: Run) -> ReportFigure | None:
    """A dot for each client and label, the larger the more samples it has of the label."""
    labels, counts, shown_labels = label_counts(run)
    if len(labels) < 2 or not counts:
        return None
    clients = list(counts)[: mpl.shown_rows(len(counts))]
    largest = max(max(own, default=0) for own in counts.values()) or 1
    figure, ((axis,),) = new_figure(1.1 + 0.24 * len(clients))
    for row, client in enumerate(clients):
        own = [counts[client][label] for label in shown_labels]
        columns = [column for column, count in enumerate(own) if count]
        sizes = [4 + 130 * own[column] / largest for column in columns]
        axis.scatter(columns, [row] * len(columns), s=sizes, color=colour("up"))
    names = [shorten(labels[label], 14) for label in shown_labels]
    axis.set_xticks(range(len(names)), names, rotation=60, ha="right")
    axis.set_yticks(range(len(clients)), [shorten(client) for client in clients])
    axis.set_xlim(-0.7, len(names) - 0.3)
    axis.set_ylim(len(clients) - 0.4, -0.6)
    missing = {client: own.count(0) for client, own in counts.items()}
    caption = (
        f"The largest dot is {count_noun(largest, 'sample')}; a client lacks "
        f"{min(missing.values())} to {max(missing.values())} of {len(labels)} labels."
        f"{_note_omitted(labels, shown_labels)}"
    )
    lacking = join_names([f"{client} {count}" for client, count in missing.items()], 8)
    description = f"A table of dots, clients by labels. Labels that clients lack: {lacking}."
    drawing = draw(figure, "holdings", description, phone=len(names) <= PHONE_LABELS)
    return ReportFigure("Label distribution", caption, drawing)


def plot_label_pairs(run: Run) -> ReportFigure | None:
    """Which labels occur in the same sample: of all clients, and of the first few."""
    labels, _, shown_labels = label_counts(run)
    event = _labels_event(run)
    matrices = {"all clients": event.get("together"), **(event.get("pairs") or {})}
    matrices = {name: matrix for name, matrix in matrices.items() if matrix}
    if len(matrices) < 2:
        return None
    shown = dict(list(matrices.items())[:MAX_PAIR_PANELS])
    rows = ceil(len(shown) / 3)
    figure, axes = new_figure(2.9 * rows, rows, 3)
    names = [shorten(labels[label], 12) for label in shown_labels]
    for (name, matrix), axis in zip(shown.items(), axes.flat):
        _draw_pairs(axis, matrix, shown_labels)
        axis.set_title(shorten(name))
        axis.set_xlim(-0.7, len(names) - 0.3)
        axis.set_ylim(len(names) - 0.3, -0.7)
        axis.set_aspect("equal")
        axis.set_xticks(range(len(names)), [""] * len(names))
        axis.set_yticks(range(len(names)), names, fontsize=min(5.5, 130 / len(names)))
    hide_unused(axes, len(shown))
    caption = (
        "Labels of the same sample, in the same order down and across; dots are scaled within "
        f"each panel.{_note_omitted(labels, shown_labels)}"
    )
    panels = join_names(list(shown), MAX_PAIR_PANELS)
    drawing = draw(figure, "pairs", f"Tables of dots, label by label, for {panels}.", phone=False)
    return ReportFigure("Labels that occur together", caption, drawing)


def _draw_pairs(axis: Any, matrix: list[list[int]], shown_labels: list[int]) -> None:
    """Draw a dot for each pair of unlike labels in a matrix of counts (labels, labels)."""
    down = []
    across = []
    counts = []
    for row, label in enumerate(shown_labels):
        for column, other in enumerate(shown_labels):
            if row != column and matrix[label][other]:
                down.append(row)
                across.append(column)
                counts.append(matrix[label][other])
    largest = max(counts, default=1)
    sizes = [2 + 30 * count / largest for count in counts]
    axis.scatter(across, down, s=sizes, color=colour("up"))


def label_counts(run: Run) -> tuple[list[str], dict[str, list[int]], list[int]]:
    """Return the labels, how many samples of each a client has, and the labels to draw.

    Returns: names; {client: counts (labels,)}; indices of the labels to draw, in their order.
    """
    event = _labels_event(run)
    labels = list(event.get("labels") or [])
    counts = dict(event.get("counts") or {})
    totals = [0] * len(labels)
    for own in counts.values():
        totals = [total + count for total, count in zip(totals, own)]
    by_total = sorted(range(len(labels)), key=lambda label: -totals[label])
    return labels, counts, sorted(by_total[:MAX_LABELS])


def _labels_event(run: Run) -> dict:
    return next((event for event in run.events if event["event"] == "labels"), {})


def _note_omitted(labels: list[str], shown: list[int]) -> str:
    if len(shown) == len(labels):
        return ""
    return f" Of {len(labels)} labels the {len(shown)} with the most samples are drawn."
