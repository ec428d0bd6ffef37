"""What a picture is, and what all of them share: one colour for each client, short names, whole rounds. Draws nothing itself."""

from collections.abc import Callable
from dataclasses import dataclass, field

from unalike.report import formatting as words
from unalike.report import history
from unalike.report.folder import Run
from unalike.report.mpl import CLIENTS

ROWS, PANELS = 40, 24  # the most clients drawn as rows, as panels


@dataclass
class Picture:
    """An <svg> with its words. The legend lists (mark, colour name, text)."""

    title: str
    caption: str
    svg: str
    legend: list[tuple[str, str, str]] = field(default_factory=list)


def colours(run: Run) -> Callable[[str], str]:
    """The colour name of a client, the same in every picture; whoever is not a client (a server, say) is drawn in ink."""
    known = {
        client: CLIENTS[place % len(CLIENTS)] for place, client in enumerate(history.clients(run))
    }
    return lambda client: known.get(client, "ink")


def whole_rounds(axis) -> None:
    """Rounds are whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))


def short(name, most: int = 28) -> str:
    """A name that fits beside a plot."""
    name = words.printable(name)
    return name if len(name) <= most else name[: most - 1] + "…"
