"""What a client would send and be sent, as a page to read before joining. Prints what runs/audit.py found; finds nothing itself."""

from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text


def show(found: dict[str, Any]) -> None:
    """Clients of whom the same can be said are told of together."""
    console = Console(highlight=False)
    alike: dict[str, list[str]] = {}
    for client, told in found["clients"].items():
        alike.setdefault(repr([told["messages"], told["bytes"]]), []).append(client)
    for clients in alike.values():
        told = found["clients"][clients[0]]
        each = "" if len(clients) == 1 else ", each"
        console.print(
            Text(
                f"{', '.join(clients)}{each}: {found['algorithm']}, {found['rounds']} rounds",
                "bold",
            )
        )
        info = [
            f"{key}{'' if each else f' {value}'}"
            for key, value in told["card"].items()
            if value is not None
        ]
        console.print(Text(f"  At the door: {', '.join(info)}"))
        console.print(Padding(table(told["messages"]), (1, 2)))
        spent, measuring = told["bytes"], told["bytes"]["measuring"]
        console.print(
            f"  In all {spent['up']:,} bytes up and {spent['down']:,} down; to measure what came of it another "
            f"{measuring['up']:,} up and {measuring['down']:,} down."
        )
        console.print(f"  By round: {by_round(spent['by_round'])}\n")


def table(messages: list[dict[str, Any]]) -> Table:
    made = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("operation", "way", "times", "bytes each", "in all", "what"):
        made.add_column(
            name,
            justify="right" if name in ("times", "bytes each", "in all") else "left",
            no_wrap=name != "what",
        )
    for each in messages:
        times = sum(each["rounds"].values())
        what = [
            f"{part['name'] or 'value'}  {part['kind']}{part['shape'] or ''}"
            for part in each["holds"]
        ] or ["nothing"]
        why = " (alone)" if each.get("alone") else " (measuring)" if each["measuring"] else ""
        made.add_row(
            each["operation"] + why,
            each["way"],
            str(times),
            f"{each['bytes']:,}",
            f"{each['bytes'] * times:,}",
            Text("\n".join(what)),
        )
    return made


def by_round(rounds: dict[str, dict[str, int]]) -> str:
    """Bytes up and down of each round; rounds that follow each other with the same are told once.

    >>> by_round({"1": {"up": 5, "down": 1}, "2": {"up": 2, "down": 1}, "3": {"up": 2, "down": 1}})
    '1: 5 up, 1 down; 2 to 3: 2 up, 1 down'
    """
    spans: list[tuple[str, str, dict[str, int]]] = []
    for number, spent in rounds.items():
        if spans and spans[-1][2] == spent:
            spans[-1] = (spans[-1][0], number, spent)
        else:
            spans.append((number, number, spent))
    return "; ".join(
        f"{first if first == last else f'{first} to {last}'}: {spent['up']:,} up, {spent['down']:,} down"
        for first, last, spent in spans
    )
