"""Colours by name, and matplotlib figures as SVG for one page in light and dark. Knows nothing of runs."""

import warnings
import xml.etree.ElementTree as tree
from contextlib import contextmanager
from io import StringIO

# name: (light, dark). The clients' eight are Okabe and Ito's, less the yellow and black that one of the two pages would swallow.
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
CLIENTS = [name for name in COLOURS if name[0] == "c"]

# matplotlib wants a fixed colour, the page wants var(--ink): each name draws in a colour of its own that is replaced at the end
_DRAWN = {name: f"#a5f0{place:02x}" for place, name in enumerate(COLOURS)}
_SVG, _LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"


def colour(name: str) -> str:
    """What to give matplotlib for a colour of this page."""
    return _DRAWN[name]


def variables(dark: bool) -> str:
    """The colours as CSS variables."""
    return " ".join(f"--{name}: {shades[dark]};" for name, shades in COLOURS.items())


@contextmanager
def settings():
    """Draw inside this: text stays text, names with a $ are not formulas, letters our font lacks are no worry."""
    import matplotlib

    ink, soft, rule = colour("ink"), colour("soft"), colour("rule")
    look = {
        "svg.fonttype": "none", "svg.hashsalt": "unalike", "text.parse_math": False, "font.size": 8.5,
        "text.color": ink,
        "axes.edgecolor": rule, "axes.labelcolor": soft, "axes.titlesize": 8.5, "axes.titlelocation": "left", "axes.titleweight": "bold",
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True, "grid.color": rule,
        "grid.linewidth": 0.6, "xtick.color": rule, "ytick.color": rule, "xtick.labelcolor": soft, "ytick.labelcolor": soft,
        "xtick.labelsize": 8, "ytick.labelsize": 8, "lines.linewidth": 1.6, "axes.unicode_minus": False,
    }  # fmt: skip
    with matplotlib.rc_context(look), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def figure(height: float, rows: int = 1, columns: int = 1, **shared):
    """A figure as wide as the page and `height` inches high, and its axes as a list of rows."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(8.6, height), layout="constrained", facecolor="none")
    axes = drawn.subplots(rows, columns, squeeze=False, **shared)
    for axis in axes.flat:
        axis.set_facecolor("none")
    return drawn, axes


def inline(drawn, name: str, alt: str) -> str:
    """The figure as an <svg> element for this page: colours as variables, names its own, described by `alt`."""
    text = StringIO()
    drawn.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    root = tree.fromstring(text.getvalue())
    used = {node.get(_LINK, "#")[1:] for node in root.iter()}
    for node in root.iter():
        for child in [
            child for child in node if child.tag.endswith("metadata") or child.tag == f"{_SVG}style"
        ]:
            node.remove(child)
        node.tag = node.tag.removeprefix(_SVG)
        _rewrite(node, name, used)
    root.attrib = {"viewBox": root.get("viewBox", ""), "role": "img", "aria-label": alt}
    return tree.tostring(root, encoding="unicode")


def _rewrite(node, name: str, used: set[str]) -> None:
    link, identity, style = (
        node.attrib.pop(_LINK, None),
        node.attrib.pop("id", None),
        node.get("style"),
    )
    if link:
        node.set("href", f"#{name}-{link[1:]}")
    if identity and (identity in used or node.tag == "clipPath"):
        node.set("id", f"{name}-{identity}")
    if node.get("clip-path"):
        node.set("clip-path", node.get("clip-path").replace("url(#", f"url(#{name}-"))
    if style:
        for known, drawn in _DRAWN.items():
            style = style.replace(drawn, f"var(--{known})")
        node.set("style", style)
