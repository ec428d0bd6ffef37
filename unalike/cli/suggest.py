"""Prints which methods suit a scenario."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from unalike.runs.prospects import ERROR, Prospect
from unalike.runs.suggest import Advice, Candidate

console = Console(highlight=False)
METRICS = {"delta": "mean gain over training alone, in percent"}


def print_advice(advice: Advice, count: int) -> None:
    """Print the first methods, where that is from, and what does not fit."""
    first = advice.first
    if first is None:
        print_no_table(advice)
        return
    console.print(f"{advice.scenario}: [bold]{describe(first)}[/bold]")
    metric = METRICS.get(advice.metric, advice.metric)
    if advice.exact:
        console.print(f"measured on this scenario ({metric}): {advice.source}")
    else:
        console.print(f"first in a like situation ({metric}): {advice.source}")
    if advice.unchecked is not None:
        console.print(f"not checked what fits: {advice.unchecked.partition(':')[0]}")
    if first.name == "local":
        console.print("Training alone came first there: expect no gain from federating.")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("", "method", "score", "MB", ""):
        table.add_column(heading, justify="right" if heading in ("", "score", "MB") else "left")
    for place, candidate in enumerate(advice.candidates[:count], 1):
        spread = "" if candidate.spread is None else f" ±{candidate.spread:.1f}"
        megabytes = "" if candidate.megabytes is None else f"{candidate.megabytes:.2f}"
        note = "within noise of the first" if candidate.close else ""
        score = f"{candidate.score:.1f}{spread}"
        table.add_row(str(place), describe(candidate), score, megabytes, note)
    console.print(table)
    for name, method in advice.others.items():
        console.print(f"first in {name}: {method}")
    measured = {candidate.name for candidate in (*advice.candidates, *advice.misfits)}
    if len(measured - {"local"}) == 1:
        console.print("No other method was measured there.")
    for candidate in advice.misfits:
        print_misfit(candidate)


def print_misfit(candidate: Candidate) -> None:
    """Say why a method of the table does not fit, and what it scored there."""
    console.print(f"does not fit: {candidate.name} ({candidate.score:.1f}): {candidate.problem}")


def print_no_table(advice: Advice) -> None:
    """Say that nothing was measured in such a situation."""
    if advice.misfits:
        console.print(f"{advice.scenario}: no method of our table ({advice.source}) fits it.")
        for candidate in advice.misfits:
            print_misfit(candidate)
        return
    console.print(f"{advice.scenario}: none of our tables is about such a situation.")
    if advice.unchecked is not None:
        console.print(f"its clients could not be built: {advice.unchecked}")


def describe(candidate: Candidate) -> str:
    """A method with its fields.

    >>> describe(Candidate({"name": "fedprox", "mu": 0.1}, 1.0, None, None))
    'fedprox (mu: 0.1)'
    """
    fields = [f"{key}: {value}" for key, value in candidate.algorithm.items() if key != "name"]
    return f"{candidate.name} ({', '.join(fields)})" if fields else candidate.name


def print_prospects(prospects: Sequence[Prospect]) -> None:
    """Print what is known of each client before any training."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("client")
    table.add_column("labels in common with")
    for heading in ("fit", "nearness", "gain"):
        table.add_column(heading, justify="right")
    for prospect in prospects:
        numbers = ["" if x is None else f"{x:.2f}" for x in (prospect.fit, prospect.nearness)]
        gain = "" if prospect.gain is None else f"{prospect.gain:+.0f} ±{ERROR:.0f} %"
        partners = ", ".join(prospect.partners) or "nobody"
        table.add_row(prospect.client, partners, *numbers, gain)
    console.print(table)
    console.print(
        "fit: how alike its encoder and the others' see the public rows (1: alike, 0: unrelated). "
        "nearness: of the public rows to its own (1: cannot be told apart). gain: what clients "
        "with pretrained encoders and a public set as near gained with fedmuscleplus in our tables."
    )
