"""The results of one run as a table in the terminal. Knows nothing of files or pictures."""

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from unalike.report import formatting as words

MOST = 40  # rows; beyond that the worst are shown


def show(results: dict, console: Console | None = None) -> None:
    """Print the table of the clients and the lines below it."""
    (console or Console()).print(summary(results))


def summary(results: dict) -> Group:
    """The table per client, then Delta, losers, the worst client, bytes, missed rounds, seconds and failures."""
    told = words.failures(results.get("failures") or [])
    lines = [_line(name, value) for name, value in _facts(results)]
    failed = [Text(f"  {words.printable(sentence)}", style="red") for sentence in told]
    return Group(
        _clients(results), *lines, *([Text("failures", style="bold"), *failed] if told else [])
    )


def _clients(results: dict) -> Table:
    clients, gained = results["clients"], words.gains(results)
    has_alone = any(words.number(its.get("alone")) is not None for its in clients.values())
    has_safeguard = any("safeguarded" in its for its in clients.values())
    has_modalities = any(words.modalities(its) for its in clients.values())
    has_privacy = any("privacy" in its for its in clients.values())
    shown = list(clients)
    if len(shown) > MOST:  # the worst gains first, those without a gain after them
        shown = [*gained, *(client for client in clients if client not in gained)][:MOST]

    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, padding=0, title_justify="left", title_style="bold"
    )
    table.title = Text(
        words.printable(
            f"{results.get('algorithm')} on {results.get('scenario')}, seed {results.get('seed')}"
        )
    )
    if len(shown) < len(clients):
        table.caption = Text(
            f"the {len(shown)} smallest gains of {len(clients)} clients; results.json holds the rest"
        )
    for name in ("client", "model", *["modalities"] * has_modalities, "task", "metric"):
        table.add_column(name, overflow="fold")
    for name in (
        ["alone"] * has_alone
        + ["together"]
        + ["gain"] * has_alone
        + ["safeguarded"] * has_safeguard
        + ["epsilon"] * has_privacy
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for client in shown:
        its = clients[client]
        cells = [Text(words.printable(client), style="bold")]
        named = [
            its.get("model"),
            *[words.modalities(its)] * has_modalities,
            its.get("task"),
            its.get("metric"),
        ]
        cells += [Text(words.printable(name or words.NOTHING)) for name in named]
        unit = words.unit_of_client(its)
        cells += [Text(words.metric_value(its.get("alone"), unit))] * has_alone
        cells += [Text(words.metric_value(its.get("value"), unit))]
        cells += [_gain(its.get("gain"))] * has_alone + [_safeguarded(its)] * has_safeguard
        cells += [Text(words.epsilon(its.get("privacy")))] * has_privacy
        table.add_row(*cells)
    return table


def _gain(gain) -> Text:
    gain = words.number(gain)
    style = "dim" if not gain else "green" if gain > 0 else "bold red"
    return Text(words.signed(gain), style=style)


def _safeguarded(its: dict) -> Text:
    """The value kept, and which model it is of unless it is the one learnt together."""
    said = words.kept(its)
    kept = "" if said in (None, "together") else f" {words.printable(said)}"
    value = words.metric_value(its.get("safeguarded"), words.unit_of_client(its))
    return Text.assemble(value, (kept, "dim"))


def _facts(results: dict) -> list[tuple[str, Text]]:
    gained, lost = words.gains(results), words.losers(results)
    facts: list[tuple[str, Text]] = []
    if whole := words.federation(results):
        facts += [("federation", Text(words.grouped(whole)))]
    if words.number(results.get("delta")) is not None:
        facts += [
            (
                "Delta",
                Text.assemble(
                    _gain(results["delta"]),
                    ("  mean gain, each client against itself alone", "dim"),
                ),
            )
        ]
    if gained:
        named = f": {words.printable(words.listed(lost))}" if lost else ""
        facts += [
            (
                "losers",
                Text(f"{len(lost)} of {len(gained)}{named}", style="bold red" if lost else ""),
            )
        ]
    else:
        facts += [("gains", Text(f"not known: {words.unmeasured(results)}"))]
    if words.worst(results):
        facts += [("worst", Text(words.printable(words.worst(results))))]
    safeguard = results.get("safeguard")
    if isinstance(safeguard, dict):
        left = (
            ""
            if words.number(safeguard.get("losers")) is None
            else f", losers {safeguard['losers']}"
        )
        facts += [
            (
                "safeguard",
                Text.assemble("Delta ", _gain(safeguard.get("delta")), left, words.judged(results)),
            )
        ]
    spent = results.get("privacy")
    if isinstance(spent, dict):
        facts += [
            (
                "privacy",
                Text(words.printable(f"epsilon {words.epsilon(spent)} {words.privacy(spent)}")),
            )
        ]
    server = words.figures(results.get("server"))
    if server:
        facts += [
            (
                "server",
                Text(
                    words.printable(", ".join(f"{name} {value}" for name, value in server.items()))
                ),
            )
        ]
    sent = results.get("bytes") or {}
    if sent:
        facts += [
            ("bytes", Text(f"{words.data(sent.get('up'))} up, {words.data(sent.get('down'))} down"))
        ]
    missed, why = words.misses(results.get("failures") or [])
    if missed:
        counts = words.listed([f"{client} {rounds}" for client, rounds in missed.items()])
        facts += [("missed", Text(words.printable(f"rounds: {counts} ({why})"), style="dim"))]
    facts += [("time", Text(words.duration(results.get("seconds"))))]
    if results.get("folder"):
        facts += [("report", Text(words.printable(f"{results['folder']}/report.html")))]
    return facts


def _line(name: str, value: Text) -> Text:
    return Text.assemble((f"{name:<11}", "bold"), value)
