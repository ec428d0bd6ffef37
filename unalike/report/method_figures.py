"""Figures of arrays that a method logged: points by class at a few rounds, and matrices."""

from typing import Any

from unalike.report import history
from unalike.report.folder import Run
from unalike.report.formatting import printable, shorten
from unalike.report.mpl import (
    CLIENT_COLOURS,
    PAGE_WIDTH,
    ReportFigure,
    colour,
    draw,
    hide_unused,
    new_figure,
)

POINT_PANELS = 4
SHADES = 10  # of a matrix
MAX_TICKS = 32  # names beside a matrix
MAX_NUMBERS = 12  # columns of a matrix with a number in each square


def plot_method_figures(run: Run) -> list[ReportFigure]:
    """Return a figure of everything that the method logged: points first, then matrices."""
    figures = []
    arrays_by_name = run.method_arrays()
    for kind, plot in (("points", plot_points), ("matrix", plot_matrix)):
        for name, rounds in arrays_by_name.items():
            own = {number: arrays for number, arrays in rounds.items() if kind in arrays}
            if own:
                figures.append(plot(run, name, own))
    return figures


def plot_points(run: Run, name: str, rounds: dict[int, dict]) -> ReportFigure:
    """A panel for each of a few rounds: the points in a plane, coloured by class.

    Args:
        rounds: by round, `points` (n, width) and their `classes` (n,).
    """
    numbers = sorted(rounds)
    labels = history.label_names(run)
    step = (len(numbers) - 1) / (POINT_PANELS - 1)
    places = sorted({round(panel * step) for panel in range(POINT_PANELS)})
    shown = {numbers[place]: rounds[numbers[place]] for place in places}
    present: set[int] = set()
    for arrays in shown.values():
        present |= {int(label) for label in arrays["classes"]}
    classes = sorted(present)
    figure, axes = new_figure(PAGE_WIDTH / POINT_PANELS + 0.1, 1, POINT_PANELS)
    layout = None
    for axis, (number, arrays) in zip(axes.flat, shown.items()):
        layout = tsne_layout(arrays["points"], layout)
        for place, label in enumerate(classes):
            own = layout[arrays["classes"] == label]
            _draw_dots(axis, own, colour(_tone(place)), square=place >= len(CLIENT_COLOURS))
        axis.set_title(f"round {number}")
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
        axis.spines[:].set_visible(False)
        axis.margins(0.06)
    hide_unused(axes, len(shown))
    legend = []
    for place, label in enumerate(classes):
        mark = "square" if place >= len(CLIENT_COLOURS) else "dot"
        text = shorten(labels[label]) if 0 <= label < len(labels) else "unknown"
        legend.append((mark, _tone(place), text))
    count = max(len(arrays["points"]) for arrays in shown.values())
    caption = (
        f"{count} samples of all clients by class, laid out in the plane by t-SNE; each panel "
        "starts from the one before it."
    )
    description = f"Scatter plots of {count} points in {len(classes)} colours, one a class."
    drawing = draw(figure, name.replace(" ", "-"), description)
    return ReportFigure(_title(name), caption, drawing, legend)


def tsne_layout(points: Any, start: Any = None) -> Any:
    """Return points (n, width) laid out in the plane (n, 2) by t-SNE.

    Args:
        start: an earlier layout (n, 2) to start from; by default the first two principal
            components.
    """
    import numpy

    x = numpy.nan_to_num(numpy.asarray(points, dtype=numpy.float64))
    if start is None or len(start) != len(x):
        left_vectors, sizes, _ = numpy.linalg.svd(x - x.mean(0), full_matrices=False)
        start = numpy.zeros((len(x), 2))
        start[:, : len(sizes[:2])] = left_vectors[:, :2] * sizes[:2]
    if len(x) < 10 or numpy.ptp(x, axis=0).max() == 0:
        return start
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    initial = (1e-4 * start / max(start[:, 0].std(), 1e-12)).astype(numpy.float32)
    perplexity = min(30, (len(x) - 1) / 3)
    tsne = TSNE(2, perplexity=perplexity, init=initial, max_iter=300, random_state=0)
    # With so few points threads only wait for each other, ten times as long on busy cores.
    with threadpool_limits(1):
        return tsne.fit_transform(x)


def _draw_dots(axis: Any, positions: Any, tone: str, square: bool) -> None:
    """Draw all dots of a class as one path of strokes without length, to keep the page small."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    path = Path([(0, 0)], [Path.MOVETO])
    if len(positions):
        corners = []
        for position in positions:
            corners += [position, position]
        path = Path(corners, [Path.MOVETO, Path.LINETO] * len(positions))
    path.should_simplify = False
    style = {"linewidth": 2.6, "alpha": 0.8, "capstyle": "projecting" if square else "round"}
    axis.add_patch(PathPatch(path, fill=False, edgecolor=tone, **style))
    axis.update_datalim(positions)
    axis.autoscale_view()


def plot_matrix(run: Run, name: str, rounds: dict[int, dict]) -> ReportFigure:
    """A square for each entry of the last matrix, the darker the larger; small ones have numbers.

    Args:
        rounds: by round, `matrix` (rows, columns) and the names of `rows` and `columns`.
    """
    import numpy

    number, arrays = max(rounds.items())
    values = numpy.nan_to_num(numpy.asarray(arrays["matrix"], dtype=numpy.float64))
    low = values.min()
    high = values.max()
    shades = ((values - low) / max(high - low, 1e-12) * (SHADES - 1)).round().astype(int)
    height, width = values.shape
    figure, ((axis,),) = new_figure(min(4.6, 0.8 + 0.3 * height))
    for shade in range(SHADES):
        _draw_squares(axis, numpy.argwhere(shades == shade), (shade + 0.6) / SHADES)
    axis.set_xlim(-0.5, width - 0.5)
    axis.set_ylim(height - 0.5, -0.5)
    axis.set_aspect("equal")
    axis.grid(visible=False)
    axis.spines[:].set_visible(False)
    _name_ticks(axis.xaxis, arrays.get("columns", range(width)))
    _name_ticks(axis.yaxis, arrays.get("rows", range(height)))
    long_names = any(len(str(column)) > 2 for column in arrays.get("columns", ()))
    axis.xaxis.set_tick_params(rotation=90 if long_names else 0)
    caption = f"In round {number}"
    if width <= MAX_NUMBERS and height <= MAX_TICKS:
        _write_numbers(axis, values, shades)
    else:
        caption += f", from {low:.3g}, the palest, to {high:.3g}, the darkest"
    if "rows" in arrays and list(arrays["rows"]) == list(arrays.get("columns", ())):
        caption += "; a row is what one gets from each column"
    caption += "."
    description = f"A matrix of {height} by {width} shades, from {low:.3g} to {high:.3g}."
    drawing = draw(figure, name.replace(" ", "-"), description, phone=width <= MAX_TICKS)
    return ReportFigure(_title(name), caption, drawing)


def _name_ticks(axis: Any, names: Any) -> None:
    texts = [shorten(name, 16) for name in names]
    step = -(-len(texts) // MAX_TICKS)
    axis.set_ticks(range(0, len(texts), step), texts[::step])
    axis.set_tick_params(length=0, labelcolor=colour("ink"))


def _draw_squares(axis: Any, cells: Any, strength: float) -> None:
    """Draw the cells (n, 2) of one shade as one path."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    corners = [(-0.47, -0.47), (0.47, -0.47), (0.47, 0.47), (-0.47, 0.47), (-0.47, -0.47)]
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    if not len(cells):
        return
    vertices = []
    for row, column in cells:
        vertices += [(column + x, row + y) for x, y in corners]
    path = Path(vertices, codes * len(cells))
    axis.add_patch(PathPatch(path, facecolor=colour("up"), edgecolor="none", alpha=strength))


def _write_numbers(axis: Any, values: Any, shades: Any) -> None:
    """Write each value into its square."""
    import numpy

    for (row, column), value in numpy.ndenumerate(values):
        tone = colour("paper" if shades[row, column] >= 0.6 * SHADES else "ink")
        style = {"fontsize": 7, "color": tone, "ha": "center", "va": "center"}
        text = f"{value:.1f}" if values.max() >= 10 else f"{value:.3g}"
        axis.text(column, row, text, **style)


def _tone(place: int) -> str:
    return CLIENT_COLOURS[place % len(CLIENT_COLOURS)]


def _title(name: str) -> str:
    return printable(name[:1].upper() + name[1:])
