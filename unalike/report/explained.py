"""One image, where each of its labels was seen, and which conditions counted: a picture. Knows arrays only."""

from collections.abc import Mapping
from pathlib import Path

from unalike.report.mpl import COLOURS, figure


def draw(image, maps: Mapping, conditions: Mapping, to: Path) -> None:
    """image (height, width, channels) in [0, 1]; maps by name (rows, columns), stretched over it, the brighter the more."""
    columns = 1 + len(maps) + bool(conditions)
    drawn, axes = figure(8.6 / columns + 0.3, 1, columns)
    drawn.set_facecolor("white")
    first, *others = axes.flat
    tall, wide, channels = image.shape
    shown = image[..., 0] if channels == 1 else image
    for axis, name in ((first, ""), *zip(others, maps)):
        axis.imshow(shown, cmap="gray", vmin=0, vmax=1, extent=(0, wide, tall, 0))
        if name:
            axis.imshow(
                maps[name],
                cmap="inferno",
                alpha=0.6,
                extent=(0, wide, tall, 0),
                interpolation="bilinear",
            )
        axis.set_title(name, fontsize=8)
        axis.set_axis_off()
    if conditions:
        bars = others[-1]
        bars.barh(list(conditions), list(conditions.values()), color=COLOURS["up"][0])
        bars.invert_yaxis()
        bars.tick_params(labelsize=7)
        bars.spines[["top", "right"]].set_visible(False)
    drawn.savefig(to, dpi=110)
