"""Shows the result of a sweep: all settings, the best one, and its result on other seeds."""

from pathlib import Path
from typing import Any

from rich.console import Console

from unalike.report import show_comparison
from unalike.report.comparison_formats import format_average


def show(result: dict[str, Any], keep: Path) -> None:
    """Print a sweep.

    Args:
        result: what `Sweep.run` returned.
        keep: the sweep's folder.
    """
    console = Console(highlight=False, markup=False, soft_wrap=True)
    show_comparison(result["choice"])
    for settings, reason in result["failed"].items():
        console.print(f"failed     {settings}: {reason}", style="red")
    report = result["report"]
    seeds = ", ".join(map(str, report["seeds"]))
    value = format_average(report["value"], "")
    gain = format_average(report["delta"])
    console.print(
        f"best       {' '.join(result['best'])}  (chosen by {result['by']})", style="bold"
    )
    if report["seeds"]:
        console.print(f"its result mean value {value}, mean gain {gain} %, on seeds {seeds}")
    console.print(f"kept       {keep / 'best.yaml'}, {keep / 'sweep.json'}, {keep / 'sweep.svg'}")
