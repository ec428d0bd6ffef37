"""The result of a sweep as a picture: the score of each setting, with its interval over seeds."""

from pathlib import Path
from typing import Any

from unalike.report.formatting import shorten
from unalike.report.mpl import COLOURS

MOST = 40  # settings that are drawn: the best ones


def plot_scores(scores: dict[str, dict[str, Any]], best: str, by: str, file: Path) -> None:
    """Draw a dot for each setting, the best at the top; lines are 95 % intervals over seeds.

    Args:
        scores: {"mean", "low", "high", "n"} by setting.
        best: the setting that was chosen.
        by: what was chosen by.
        file: ends in .svg, .pdf or .png.
    """
    import matplotlib
    from matplotlib.figure import Figure

    shown = sorted(scores, key=lambda setting: scores[setting]["mean"], reverse=True)[:MOST]
    style: Any = {"font.size": 8, "svg.hashsalt": "unalike", "text.parse_math": False}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(6.4, 0.9 + 0.24 * len(shown)), layout="constrained")
        axis = figure.subplots()
        for row, setting in enumerate(shown):
            score = scores[setting]
            tone = COLOURS["c1" if setting == best else "c0"][0]
            if score["low"] is not None:
                axis.plot([score["low"], score["high"]], [row, row], color=tone, linewidth=1.2)
            axis.plot(score["mean"], row, "o", color=tone, markersize=5)
        names = [shorten(setting, 60) for setting in shown]
        axis.set_yticks(range(len(shown)), names)
        axis.invert_yaxis()
        axis.grid(axis="x", linewidth=0.5)
        axis.set_axisbelow(True)
        axis.spines[["top", "right", "left"]].set_visible(False)
        over = "over the first setting" if by == "value" else "over each run's own local baseline"
        axis.set_xlabel(f"mean gain of clients {over} (%)")
        metadata: Any = {"Date": None} if file.suffix == ".svg" else None
        figure.savefig(file, dpi=200, metadata=metadata)
