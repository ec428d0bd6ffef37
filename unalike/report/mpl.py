"""matplotlib figures as SVG for one page in light and dark: colours by name, sizes, limits."""

import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

MAX_ROWS = 40  # clients drawn as rows; of more only ROWS_OF_MANY
MAX_PANELS = 24  # clients drawn as panels; of more only PANELS_OF_MANY
ROWS_OF_MANY = 20
PANELS_OF_MANY = 9
PAGE_WIDTH = 8.6  # inches
PHONE_WIDTH = 3.7  # inches: letters of a phone's drawing are as large as those of the page

# Name: (light, dark). The clients' eight colours are those of Okabe and Ito, without the yellow
# and black that one of the two pages would swallow.
COLOURS = {
    "ink": ("#1b2430", "#e6eaf0"),
    "soft": ("#5b6675", "#9aa5b4"),
    "rule": ("#dfe4ea", "#2d3540"),
    "paper": ("#ffffff", "#171c23"),
    "good": ("#00735a", "#3ccfa4"),
    "bad": ("#b3311f", "#ff8672"),
    "up": ("#34618f", "#7fb0de"),
    "down": ("#b9c9da", "#3f5a75"),
    "c0": ("#0072b2", "#4fb0e8"),
    "c1": ("#d55e00", "#ff8f45"),
    "c2": ("#009e73", "#2fcda0"),
    "c3": ("#c0639a", "#e89cc8"),
    "c4": ("#d39200", "#f3bd4b"),
    "c5": ("#4aa7dc", "#a3dcfb"),
    "c6": ("#5b4bb0", "#a79cf2"),
    "c7": ("#857f1d", "#cdc659"),
}
CLIENT_COLOURS = [name for name in COLOURS if name[0] == "c"]

# matplotlib needs a fixed colour, the page var(--ink): each name is drawn in a colour of its own,
# which is replaced at the end.
_PLACEHOLDERS = {name: f"#a5f0{place:02x}" for place, name in enumerate(COLOURS)}
_SVG = "{http://www.w3.org/2000/svg}"
_HREF = "{http://www.w3.org/1999/xlink}href"


@dataclass
class Drawing:
    """A plot as <svg> elements.

    Attributes:
        wide: as wide as the page.
        narrow: for a phone; empty where there is too much in it, so that the wide one scrolls.
    """

    wide: str
    narrow: str = ""


@dataclass
class ReportFigure:
    """A figure of the report.

    Attributes:
        title, caption: its text.
        drawing: the plot.
        legend: (mark, colour name, text) for each entry.
    """

    title: str
    caption: str
    drawing: Drawing
    legend: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def svg(self) -> str:
        """The plot as an <svg> element, as wide as the page."""
        return self.drawing.wide


def colour(name: str) -> str:
    """Return what to pass to matplotlib for a colour of the page."""
    return _PLACEHOLDERS[name]


def css_variables(dark: bool) -> str:
    """Return the colours as CSS variables."""
    return " ".join(f"--{name}: {shades[dark]};" for name, shades in COLOURS.items())


def client_colours(clients: Sequence[str]) -> Callable[[str], str]:
    """Return a function from client to colour name, the same in every figure.

    Whatever is not a client, e.g. a server, is drawn in ink.
    """
    known = {}
    for place, client in enumerate(clients):
        known[client] = CLIENT_COLOURS[place % len(CLIENT_COLOURS)]
    return lambda client: known.get(client, "ink")


@contextmanager
def drawing_style() -> Iterator[None]:
    """Set matplotlib's style for the report; draw inside this.

    Text stays text, names with a $ are not formulas, and letters that the font lacks give no
    warning.
    """
    import matplotlib

    ink = colour("ink")
    soft = colour("soft")
    rule = colour("rule")
    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "unalike",
        "text.parse_math": False,
        "text.color": ink,
        "font.size": 8.5,
        "axes.edgecolor": rule,
        "axes.labelcolor": soft,
        "axes.titlesize": 8.5,
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.unicode_minus": False,
        "grid.color": rule,
        "grid.linewidth": 0.6,
        "xtick.color": rule,
        "ytick.color": rule,
        "xtick.labelcolor": soft,
        "ytick.labelcolor": soft,
        "xtick.labelsize": 8,
        "ytick.labelsize": 8,
        "lines.linewidth": 1.6,
    }
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def new_figure(height: float, rows: int = 1, columns: int = 1, **shared: Any) -> tuple[Any, Any]:
    """Return a matplotlib figure as wide as the page, and its axes (rows, columns).

    Args:
        height: inches.
        shared: for matplotlib's `subplots`, e.g. sharex.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(PAGE_WIDTH, height), layout="constrained", facecolor="none")
    axes = figure.subplots(rows, columns, squeeze=False, **shared)
    for axis in axes.flat:
        axis.set_facecolor("none")
    return figure, axes


def hide_unused(axes: Any, used: int) -> None:
    """Hide all but the first `used` axes."""
    for axis in axes.flat[used:]:
        axis.set_visible(False)


def shown_rows(clients: int) -> int:
    """How many of so many clients are drawn as rows."""
    return clients if clients <= MAX_ROWS else min(ROWS_OF_MANY, MAX_ROWS)


def shown_panels(clients: int) -> int:
    """How many of so many clients are drawn as panels."""
    return clients if clients <= MAX_PANELS else min(PANELS_OF_MANY, MAX_PANELS)


def integer_rounds(axis: Any) -> None:
    """Put ticks of the x axis at integers: rounds."""
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))


def draw(figure: Any, name: str, description: str, phone: bool = True) -> Drawing:
    """Return a figure as <svg> elements: colours as CSS variables, ids that start with `name`.

    Args:
        name: unique on the page.
        description: for readers who cannot see it (aria-label).
        phone: also draw it for a phone. This changes the figure.
    """
    wide = _to_svg(figure, name, description)
    if not phone:
        return Drawing(wide)
    _fit_phone(figure)
    return Drawing(wide, _to_svg(figure, f"{name}-phone", description))


def _fit_phone(figure: Any) -> None:
    """Make a figure as wide as a phone: at most two panels side by side, one where they are few."""
    from matplotlib.gridspec import GridSpec

    panels = [axis for axis in figure.axes if axis.get_visible()]
    height = figure.get_figheight()
    rows, columns, _, _ = panels[0].get_subplotspec().get_geometry()
    if columns > 1:
        few = 2 if columns > 2 else 1
        grid = GridSpec(-(-len(panels) // few), few, figure=figure)
        for place, panel in enumerate(panels):
            panel.set_subplotspec(grid[divmod(place, few)])
            panel.tick_params(labelbottom=True)
        height *= grid.nrows / rows
    figure.set_size_inches(PHONE_WIDTH, height)


def _to_svg(figure: Any, name: str, description: str) -> str:
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    text = StringIO()
    # `savefig` would draw the figure twice: once for its layout, once for the file.
    figure.set_layout_engine("constrained")
    figure.get_layout_engine().execute(figure)
    figure.set_layout_engine("none")
    FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None})
    root = ElementTree.fromstring(text.getvalue())
    referenced = {node.get(_HREF, "#")[1:] for node in root.iter()}
    for node in root.iter():
        for child in list(node):
            if child.tag.endswith("metadata") or child.tag == f"{_SVG}style":
                node.remove(child)
        node.tag = node.tag.removeprefix(_SVG)
        _rewrite_attributes(node, name, referenced)
    root.attrib = {"viewBox": root.get("viewBox", ""), "role": "img", "aria-label": description}
    return ElementTree.tostring(root, encoding="unicode")


def _rewrite_attributes(node: Any, name: str, referenced: set[str]) -> None:
    link = node.attrib.pop(_HREF, None)
    identity = node.attrib.pop("id", None)
    style = node.get("style")
    if link:
        node.set("href", f"#{name}-{link[1:]}")
    if identity and (identity in referenced or node.tag == "clipPath"):
        node.set("id", f"{name}-{identity}")
    if node.get("clip-path"):
        node.set("clip-path", node.get("clip-path").replace("url(#", f"url(#{name}-"))
    if style:
        for known, placeholder in _PLACEHOLDERS.items():
            style = style.replace(placeholder, f"var(--{known})")
        node.set("style", style)


def save_explanation(
    image: Any, maps: Mapping[str, Any], conditions: Mapping[str, float], path: Path
) -> None:
    """Save one image beside where each of its labels was seen, and which conditions counted.

    Args:
        image: (height, width, channels) in [0, 1].
        maps: by title, (rows, columns); stretched over the image, the brighter the more.
        conditions: weight by name; drawn as bars.
        path: the file to write.
    """
    columns = 1 + len(maps) + bool(conditions)
    figure, axes = new_figure(PAGE_WIDTH / columns + 0.3, 1, columns)
    figure.set_facecolor("white")
    first, *remaining = axes.flat
    height, width, channels = image.shape
    extent = (0, width, height, 0)
    shown = image[..., 0] if channels == 1 else image
    for axis, title in ((first, ""), *zip(remaining, maps)):
        axis.imshow(shown, cmap="gray", vmin=0, vmax=1, extent=extent)
        if title:
            axis.imshow(
                maps[title], cmap="inferno", alpha=0.6, extent=extent, interpolation="bilinear"
            )
        axis.set_title(title, fontsize=8)
        axis.set_axis_off()
    if conditions:
        bars = remaining[-1]
        bars.barh(list(conditions), list(conditions.values()), color=COLOURS["up"][0])
        bars.invert_yaxis()
        bars.tick_params(labelsize=7)
        bars.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
