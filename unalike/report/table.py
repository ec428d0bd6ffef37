"""The results of one run as a table in the terminal. Knows nothing of files or plots."""

from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from unalike.report import outcome
from unalike.report.formatting import (
    MISSING,
    describe_privacy,
    format_bytes,
    format_duration,
    format_epsilon,
    format_gain,
    format_metric,
    join_names,
    printable,
    to_number,
)

MAX_ROWS = 40  # of more clients the worst are shown


def show(results: dict, console: Console | None = None) -> None:
    """Print the results of a run, as `unalike.run` returns them.

    Args:
        results: the results of one run.
        console: where to print; the terminal by default.
    """
    (console or Console()).print(summary(results))


def summary(results: dict) -> Group:
    """Return the table of clients and the lines below it, for rich to print."""
    lines: list[Any] = [clients_table(results)]
    for name, value in facts(results):
        lines.append(Text.assemble((f"{name:<11}", "bold"), value))
    failures = outcome.describe_failures(results.get("failures") or [])
    if failures:
        lines.append(Text("failures", style="bold"))
        lines += [Text(f"  {printable(sentence)}", style="red") for sentence in failures]
    return Group(*lines)


def clients_table(results: dict) -> Table:
    """Return the table of clients; of very many those with the smallest gains."""
    clients = results["clients"]
    entries = list(clients.values())
    has_baseline = any(to_number(entry.get("alone")) is not None for entry in entries)
    has_safeguard = any("safeguarded" in entry for entry in entries)
    has_modalities = any(outcome.modality_names(entry) for entry in entries)
    has_privacy = any("privacy" in entry for entry in entries)
    shown = list(clients)
    if len(shown) > MAX_ROWS:  # the worst gains first, clients without a gain after them
        gains = outcome.gains(results)
        shown = [*gains, *(client for client in clients if client not in gains)][:MAX_ROWS]

    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, padding=0, title_justify="left", title_style="bold"
    )
    title = f"{results.get('algorithm')} on {results.get('scenario')}, seed {results.get('seed')}"
    table.title = Text(printable(title))
    if len(shown) < len(clients):
        table.caption = Text(
            f"the {len(shown)} smallest gains of {len(clients)} clients; "
            "results.json holds the others"
        )
    for name in ("client", "model", *["modalities"] * has_modalities, "task", "metric"):
        table.add_column(name, overflow="fold")
    numbers = ["local"] * has_baseline + ["federated"] + ["gain"] * has_baseline
    numbers += ["safeguarded"] * has_safeguard + ["epsilon"] * has_privacy
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    for client in shown:
        entry = clients[client]
        names = [entry.get("model")]
        if has_modalities:
            names.append(outcome.modality_names(entry))
        names += [entry.get("task"), entry.get("metric")]
        cells = [Text(printable(client), style="bold")]
        cells += [Text(printable(name or MISSING)) for name in names]
        unit = outcome.unit_of(entry)
        if has_baseline:
            cells.append(Text(format_metric(entry.get("alone"), unit)))
        cells.append(Text(format_metric(entry.get("value"), unit)))
        if has_baseline:
            cells.append(_gain(entry.get("gain")))
        if has_safeguard:
            cells.append(_safeguarded(entry))
        if has_privacy:
            cells.append(Text(format_epsilon(entry.get("privacy"))))
        table.add_row(*cells)
    return table


def _gain(gain: Any) -> Text:
    known = to_number(gain)
    style = "dim"
    if known:
        style = "green" if known > 0 else "bold red"
    return Text(format_gain(known), style=style)


def _safeguarded(entry: dict) -> Text:
    """Return the value of the model kept, and which one it is unless it is the federated one."""
    model = outcome.kept_model(entry)
    note = "" if model in (None, "federated") else f" {printable(model)}"
    value = format_metric(entry.get("safeguarded"), outcome.unit_of(entry))
    return Text.assemble(value, (note, "dim"))


def _privacy_lines(results: dict) -> list[tuple[str, Text]]:
    """Return a line for the noise of clients, of the server, and in training."""
    kinds = {"privacy": "privacy", "central_privacy": "central", "sample_privacy": "samples"}
    lines = []
    for key, name in kinds.items():
        spent = results.get(key)
        if isinstance(spent, dict):
            text = f"epsilon {format_epsilon(spent)} {describe_privacy(spent)}"
            lines.append((name, Text(printable(text))))
    return lines


def facts(results: dict) -> list[tuple[str, Text]]:
    """Return the lines below the table: (name, text)."""
    gains = outcome.gains(results)
    degraded = outcome.degraded_clients(results)
    lines: list[tuple[str, Text]] = []
    sharing = outcome.sharing_line(results)
    if sharing:
        style = "bold red" if outcome.shares_nothing(results) else ""
        lines.append(("shared", Text(printable(sharing), style=style)))
    whole = outcome.federation_metrics(results)
    if whole:
        lines.append(("federation", Text(outcome.join_metrics(whole))))
    if to_number(results.get("delta")) is not None:
        note = ("  over each client's local baseline", "dim")
        lines.append(("mean gain", Text.assemble(_gain(results["delta"]), note)))
    if gains:
        names = f": {printable(join_names(degraded))}" if degraded else ""
        style = "bold red" if degraded else ""
        lines.append(("degraded", Text(f"{len(degraded)} of {len(gains)}{names}", style=style)))
    else:
        lines.append(("gains", Text(f"not known: {outcome.why_no_gains(results)}")))
    worst = outcome.worst_client(results)
    if worst:
        lines.append(("worst", Text(printable(worst))))
    safeguard = results.get("safeguard")
    if isinstance(safeguard, dict):
        count = safeguard.get("losers")
        remaining = "" if to_number(count) is None else f", degraded {count}"
        gain = _gain(safeguard.get("delta"))
        judged = outcome.describe_judged(results)
        lines.append(("safeguard", Text.assemble("mean gain ", gain, remaining, judged)))
    lines += _privacy_lines(results)
    server = outcome.flatten_metrics(results.get("server"))
    if server:
        text = ", ".join(f"{name} {value}" for name, value in server.items())
        lines.append(("server", Text(printable(text))))
    sent = results.get("bytes") or {}
    if sent:
        text = f"{format_bytes(sent.get('up'))} up, {format_bytes(sent.get('down'))} down"
        lines.append(("bytes", Text(text)))
    missed, reasons = outcome.count_missed_rounds(results.get("failures") or [])
    if missed:
        counts = join_names([f"{client} {rounds}" for client, rounds in missed.items()])
        text = printable(f"rounds: {counts} ({reasons})")
        lines.append(("missed", Text(text, style="dim")))
    lines.append(("time", Text(format_duration(results.get("seconds")))))
    if results.get("folder"):
        lines.append(("report", Text(printable(f"{results['folder']}/report.html"))))
    return lines
