"""Prints an audit: what each client would send and receive, to read before joining a federation."""

from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

RIGHT_ALIGNED = ("times", "bytes each", "in all")


def group_clients(audit: dict[str, Any]) -> list[list[str]]:
    """Clients of an audit; those that send and receive the same are in one group."""
    groups: dict[str, list[str]] = {}
    for client, details in audit["clients"].items():
        groups.setdefault(repr([details["messages"], details["bytes"]]), []).append(client)
    return list(groups.values())


def show(audit: dict[str, Any]) -> None:
    """Print the result of `unalike.runs.audit`; clients with the same messages share a table."""
    console = Console(highlight=False)
    for clients in group_clients(audit):
        details = audit["clients"][clients[0]]
        is_group = len(clients) > 1
        names = ", ".join(clients) + (", each" if is_group else "")
        title = f"{names}: {audit['algorithm']}, {audit['rounds']} rounds"
        console.print(Text(title, "bold"))
        info = {key: value for key, value in details["card"].items() if value is not None}
        texts = [key if is_group else f"{key} {value}" for key, value in info.items()]
        console.print(Text(f"  Announced at registration: {', '.join(texts)}"))
        console.print(Padding(_messages_table(details["messages"]), (1, 2)))
        size = details["bytes"]
        measuring = size["measuring"]
        console.print(
            f"  In all {size['up']:,} bytes up and {size['down']:,} down; "
            f"evaluation adds {measuring['up']:,} up and {measuring['down']:,} down."
        )
        console.print(f"  By round: {describe_rounds(size['by_round'])}\n")
    if "digest" in audit:
        console.print(f"Engine {audit['engine']}. To accept exactly this run, in client.yaml:")
        console.print(f"accept: [{{digest: {audit['digest'][:16]}}}]", markup=False)


def _messages_table(messages: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("operation", "way", *RIGHT_ALIGNED, "what"):
        justify: Any = "right" if name in RIGHT_ALIGNED else "left"
        table.add_column(name, justify=justify, no_wrap=name != "what")
    for message in messages:
        times = sum(message["rounds"].values())
        contents = [
            f"{part['name'] or 'value'}  {part['kind']}{part['shape'] or ''}"
            for part in message["holds"]
        ]
        purpose = ""
        if message.get("alone"):
            purpose = " (alone)"
        elif message["measuring"]:
            purpose = " (measuring)"
        table.add_row(
            message["operation"] + purpose,
            message["way"],
            str(times),
            f"{message['bytes']:,}",
            f"{message['bytes'] * times:,}",
            Text("\n".join(contents or ["nothing"])),
        )
    return table


def describe_rounds(rounds: dict[str, dict[str, int]]) -> str:
    """Bytes up and down of each round; consecutive rounds with the same bytes are joined.

    >>> rounds = {"1": {"up": 5, "down": 1}, "2": {"up": 2, "down": 1}, "3": {"up": 2, "down": 1}}
    >>> describe_rounds(rounds)
    '1: 5 up, 1 down; 2 to 3: 2 up, 1 down'
    """
    spans: list[tuple[str, str, dict[str, int]]] = []
    for number, size in rounds.items():
        if spans and spans[-1][2] == size:
            spans[-1] = (spans[-1][0], number, size)
        else:
            spans.append((number, number, size))
    texts = []
    for first, last, size in spans:
        name = first if first == last else f"{first} to {last}"
        texts.append(f"{name}: {size['up']:,} up, {size['down']:,} down")
    return "; ".join(texts)
