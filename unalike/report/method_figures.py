"""Pictures of what a method left to be drawn: points by class at a few moments, matrices. Knows nothing of methods."""

from unalike.report import formatting as words
from unalike.report import history
from unalike.report.figure import Picture, short
from unalike.report.folder import Run
from unalike.report.mpl import CLIENTS, colour, figure, inline

MOMENTS, LEVELS, NAMES = (
    4,
    10,
    32,
)  # panels of points; shades of a matrix; the most names beside one


def material(run: Run) -> list[Picture]:
    """Every picture there is material for: points first, then matrices."""
    drawn, told = [], run.material()
    for kind, draw in (("points", points), ("matrix", matrix)):
        found = {
            name: {at: its for at, its in moments.items() if kind in its}
            for name, moments in told.items()
        }
        drawn += [draw(run, name, moments) for name, moments in found.items() if moments]
    return drawn


def points(run: Run, name: str, moments: dict[int, dict]) -> Picture:
    """A panel for each of a few moments: the points in a plane, coloured by class."""
    rounds, labels = sorted(moments), history.labels(run)
    places = {round(i * (len(rounds) - 1) / (MOMENTS - 1)) for i in range(MOMENTS)}
    shown = {rounds[place]: moments[rounds[place]] for place in sorted(places)}
    classes = sorted({int(one) for its in shown.values() for one in its["classes"]})
    drawn, axes = figure(8.6 / MOMENTS + 0.1, 1, MOMENTS)
    start = None
    for axis, (at, its) in zip(axes.flat, shown.items()):
        start = plane(its["points"], start)
        for place, one in enumerate(classes):
            _dots(
                axis,
                start[its["classes"] == one],
                colour(_tone(place)),
                square=place >= len(CLIENTS),
            )
        axis.set_title(f"round {at}")
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
        axis.spines[:].set_visible(False)
        axis.margins(0.06)
    for axis in axes.flat[len(shown):]:  # fmt: skip
        axis.set_visible(False)
    called = {one: short(labels[one]) if 0 <= one < len(labels) else "unknown" for one in classes}
    legend = [
        ("square" if place >= len(CLIENTS) else "dot", _tone(place), called[one])
        for place, one in enumerate(classes)
    ]
    count = max(len(its["points"]) for its in shown.values())
    caption = f"{count} samples of all clients by class, laid out in the plane by t-SNE; each panel starts from the one before it."
    alt = f"Scatter plots of {count} points in {len(classes)} colours, one a class."
    return Picture(_title(name), caption, inline(drawn, name.replace(" ", "-"), alt), legend)


def plane(x, start=None):
    """Points (n, width) laid out in the plane (n, 2) by t-SNE, from where they were before or from their two main directions."""
    import numpy

    x = numpy.nan_to_num(numpy.asarray(x, dtype=numpy.float64))
    if start is None or len(start) != len(x):
        centred = x - x.mean(0)
        program, size, _ = numpy.linalg.svd(centred, full_matrices=False)
        start = numpy.zeros((len(x), 2))
        start[:, : len(size[:2])] = program[:, :2] * size[:2]
    if len(x) < 10 or numpy.ptp(x, axis=0).max() == 0:
        return start
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    begin = (1e-4 * start / max(start[:, 0].std(), 1e-12)).astype(numpy.float32)
    with threadpool_limits(
        1
    ):  # so few points: threads wait for each other, ten times as long where cores are busy
        return TSNE(
            2, perplexity=min(30, (len(x) - 1) / 3), init=begin, max_iter=300, random_state=0
        ).fit_transform(x)


def _dots(axis, at, tone: str, square: bool) -> None:
    """All dots of a class as one path of strokes without length and with round or square ends: small in the page."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    path = (
        Path([spot for spot in at for _ in "01"], [Path.MOVETO, Path.LINETO] * len(at))
        if len(at)
        else Path([(0, 0)], [Path.MOVETO])
    )
    path.should_simplify = False
    axis.add_patch(
        PathPatch(
            path,
            fill=False,
            edgecolor=tone,
            linewidth=2.6,
            alpha=0.8,
            capstyle="projecting" if square else "round",
        )
    )
    axis.update_datalim(at)
    axis.autoscale_view()


def matrix(run: Run, name: str, moments: dict[int, dict]) -> Picture:
    """A square for each entry as it was last, the darker the larger."""
    import numpy

    at, its = max(moments.items())
    values = numpy.nan_to_num(numpy.asarray(its["matrix"], dtype=numpy.float64))
    low, high = values.min(), values.max()
    level = ((values - low) / max(high - low, 1e-12) * (LEVELS - 1)).round().astype(int)
    tall, wide = values.shape
    drawn, ((axis,),) = figure(min(4.6, 0.8 + 0.3 * tall))
    for shade in range(LEVELS):
        _squares(axis, numpy.argwhere(level == shade), (shade + 0.6) / LEVELS)
    axis.set_xlim(-0.5, wide - 0.5)
    axis.set_ylim(tall - 0.5, -0.5)
    axis.set_aspect("equal")
    axis.grid(visible=False)
    axis.spines[:].set_visible(False)
    for program, key, count in ((axis.xaxis, "columns", wide), (axis.yaxis, "rows", tall)):
        names = [short(one, 16) for one in its.get(key, range(count))]
        every = -(-count // NAMES)
        program.set_ticks(range(0, count, every), names[::every])
        program.set_tick_params(length=0, labelcolor=colour("ink"))
    axis.xaxis.set_tick_params(
        rotation=90 if any(len(str(one)) > 2 for one in its.get("columns", ())) else 0
    )
    caption = f"In round {at}, from {low:.3g}, the palest, to {high:.3g}, the darkest; a row is what one gets from each column."
    alt = f"A matrix of {tall} by {wide} shades, from {low:.3g} to {high:.3g}."
    return Picture(_title(name), caption, inline(drawn, name.replace(" ", "-"), alt))


def _squares(axis, cells, strength: float) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    corners = [(-0.47, -0.47), (0.47, -0.47), (0.47, 0.47), (-0.47, 0.47), (-0.47, -0.47)]
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    if len(cells):
        path = Path(
            [(column + x, row + y) for row, column in cells for x, y in corners], codes * len(cells)
        )
        axis.add_patch(PathPatch(path, facecolor=colour("up"), edgecolor="none", alpha=strength))


def _tone(place: int) -> str:
    return CLIENTS[place % len(CLIENTS)]


def _title(name: str) -> str:
    return words.printable(name[:1].upper() + name[1:])
