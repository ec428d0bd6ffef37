"""One run as one page, report.html, that needs no network. Knows run folders, not how runs go."""

import base64
import shlex
from html import escape
from pathlib import Path
from typing import Any

from unalike.base.integrity import write_whole
from unalike.report import history, outcome
from unalike.report.folder import Run, is_inside, read
from unalike.report.formatting import (
    MISSING,
    count_noun,
    describe_privacy,
    format_bytes,
    format_duration,
    format_epsilon,
    format_gain,
    format_metric,
    join_names,
    replace_unprintable,
    to_number,
)
from unalike.report.html import (
    MAX_ROWS,
    format_figure,
    format_mark,
    format_table,
    format_text,
    format_tiles,
    mood_of,
    style_sheet,
)
from unalike.report.mpl import client_colours
from unalike.report.plots import plot_run

# Nothing on the page may run or fetch anything, whatever a run wrote into its names.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

# Column: key in the results.
METRIC_COLUMNS = {"local": "alone", "federated": "value", "safeguarded": "safeguarded"}
NUMBER_COLUMNS = {*METRIC_COLUMNS, "gain", "missed", "epsilon"}
DETAIL_COLUMNS = {"model", "modalities", "task"}  # left out on a narrow screen
SPEEDS = ("speed", "link", "latency")  # of a client on the simulated clock


REPORT = "report.html"
BELOW_HEADING = "<!-- report -->"  # between the heading and the parts of a page


def write(path: str | Path) -> Path:
    """Write report.html into the run folder `path`, and return its path."""
    run = read(path)
    file = run.path / REPORT
    write_whole(file, render_page(run).encode("utf-8", errors="replace"))
    return file


def read_written(path: Path) -> str | None:
    """Return what report.html says below its heading, as HTML.

    It is put on a page as it is, so only for a report that this very run has just written.

    Args:
        path: folder of a run.
    Returns: None where it was not drawn since the run's results.
    """
    if not is_inside(path / REPORT, path):
        return None
    try:
        if (path / REPORT).stat().st_mtime_ns < (path / "results.json").stat().st_mtime_ns:
            return None
        text = (path / REPORT).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    return text.partition(BELOW_HEADING)[2].rpartition("</main>")[0] or None


def render_page(run: Run) -> str:
    """Return the page of a run as HTML."""
    title = format_text(describe_run(run))
    head = (
        '<meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{style_sheet()}</style>"
    )
    body = "\n".join([render_heading(run), BELOW_HEADING, *render_parts(run)])
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n'
        f"<body><main>\n{body}\n</main></body></html>\n"
    )


def describe_run(run: Run) -> str:
    """Return the title of a run."""
    return f"{run.algorithm} on {run.scenario}"


def render_heading(run: Run) -> str:
    """Return what run this is."""
    summary = run.config.get("summary")
    html = (
        f'<p class="kind">Unalike run, {format_text(run.path.resolve().name)}</p>\n'
        f"<h1>{format_text(describe_run(run))}</h1>"
    )
    if summary:
        html += f'\n<p class="summary">{format_text(summary)}</p>'
    return html


def render_parts(run: Run) -> list[str]:
    """Return what a page says of a run, below its heading."""
    parts = [
        _verdict(run),
        _tiles(run),
        _clients_table(run) if run.results else "",
        *map(format_figure, plot_run(run)),
        *_images(run),
        _failures(run),
        _metrics_table(run) if run.results else "",
        _how_to_repeat(run),
        _config(run),
    ]
    return [part for part in parts if part]


def _verdict(run: Run) -> str:
    if run.results is None:
        rounds = count_noun(history.count_rounds(run), "round")
        sentence = f"This run has not finished: {rounds} so far, and no results yet."
        if any(event["event"] == "finish" for event in run.events):
            sentence = "This run has finished. Its results are with the server; this is one site."
        return f'<p class="verdict open">{sentence}</p>'
    mood = "" if outcome.gains(run.results) else "open"
    if outcome.degraded_clients(run.results) or outcome.shares_nothing(run.results):
        mood = "lost"
    sharing = outcome.sharing_line(run.results)
    shared = f'<p class="shared"><b>Shared</b> &nbsp;{format_text(sharing)}</p>' if sharing else ""
    return f'<p class="verdict {mood}">{format_text(outcome.verdict(run.results))}</p>{shared}'


def _tiles(run: Run) -> str:
    """Return the numbers at the top: name, value, a note below it, and its class."""
    results = run.results or {}
    tiles: list[tuple[str, str, str, str]] = []
    if run.results:
        for name, metric in outcome.federation_metrics(results).items():
            tiles.append(("Federation", format_metric(metric), name, ""))
    mean_gain = results.get("delta")
    if to_number(mean_gain) is not None:
        note = "over the local baseline"
        tiles.append(("Mean gain", format_gain(mean_gain), note, mood_of(mean_gain)))
    gains = outcome.gains(results) if run.results else {}
    if gains:
        degraded = outcome.degraded_clients(results)
        count = f"{len(degraded)} of {len(gains)}"
        note = join_names(degraded, 3) if degraded else "below the local baseline"
        tiles.append(("Degraded", count, note, "bad" if degraded else ""))
        worst = next(iter(gains))
        tiles.append(("Worst client", format_gain(gains[worst]), worst, mood_of(gains[worst])))
    safeguard = results.get("safeguard")
    if isinstance(safeguard, dict):
        gain = safeguard.get("delta")
        remaining = to_number(safeguard.get("losers"))
        note = "mean gain"
        if remaining is not None:
            note += f", {count_noun(int(remaining), 'degraded client')}"
        note += outcome.describe_judged(results)
        tiles.append(("Safeguarded", format_gain(gain), note, mood_of(gain)))
    spent = results.get("privacy")
    if isinstance(spent, dict):
        tiles.append(("Epsilon", format_epsilon(spent), describe_privacy(spent), ""))
    for name, text in outcome.flatten_metrics(results.get("server")).items():
        tiles.append(("Server", text, name, ""))
    sent = history.total_bytes(run)
    note = f"{format_bytes(sent['up'])} up, {format_bytes(sent['down'])} down"
    tiles.append(("Sent", format_bytes(sent["up"] + sent["down"]), note, ""))
    if results:
        clock = to_number(results.get("clock"))
        shown = clock and _has_clock(run)
        note = f"{format_duration(clock)} on the simulated clock" if shown else ""
        tiles.append(("Time", format_duration(results.get("seconds")), note, ""))
    return format_tiles(tiles)


def _has_clock(run: Run) -> bool:
    """Return whether simulated time matters: a deadline, ticks, unlike speeds, or single visits."""
    federation = run.config.get("federation") or {}
    clients = run.config.get("clients") or []
    speeds = {tuple(to_number(client.get(name)) for name in SPEEDS) for client in clients}
    timed = any(federation.get(name) for name in ("deadline", "tick"))
    return bool(timed or len(speeds) > 1 or history.visits(run))


def _clients_table(run: Run) -> str:
    clients = run.clients
    entries = list(clients.values())
    has_baseline = any(to_number(entry.get("alone")) is not None for entry in entries)
    missed, reasons = outcome.count_missed_rounds(history.failures(run))
    columns = ["client", "model"]
    columns += ["modalities"] * any(outcome.modality_names(entry) for entry in entries)
    columns += ["task", "metric"]
    columns += ["local"] * has_baseline + ["federated"] + ["gain"] * has_baseline
    columns += ["safeguarded", "kept"] * any("safeguarded" in entry for entry in entries)
    columns += ["epsilon"] * any("privacy" in entry for entry in entries)
    columns += ["missed"] * bool(missed)
    tone_of = client_colours(history.clients(run))
    rows = []
    for client in _order_clients(run):
        entry = clients[client]
        texts = _client_texts(entry) | {"missed": str(missed.get(client, 0))}
        cells = [f"<td>{format_mark('dot', tone_of(client))}{format_text(client)}</td>"]
        for name in columns[1:]:
            kind = "number" if name in NUMBER_COLUMNS else ""
            kind = "detail" if name in DETAIL_COLUMNS else kind
            if name == "gain":
                kind += f" {mood_of(entry.get('gain'))}"
            cells.append(f'<td class="{kind}">{format_text(texts[name])}</td>')
        rows.append(f"<tr>{''.join(cells)}</tr>")
    note = _explain_values(clients, has_baseline)
    if missed:
        note += f" Missed counts the rounds a client was away ({format_text(reasons)})."
    if len(clients) > MAX_ROWS:
        note += " The smallest gains come first."
    table = format_table(columns, NUMBER_COLUMNS, rows, DETAIL_COLUMNS)
    return f"<section><h2>Every client</h2>{table}<p class='small'>{note}</p></section>"


def _client_texts(entry: dict) -> dict[str, str]:
    """Return the text of each column for one client."""
    texts = {name: str(entry.get(name) or MISSING) for name in ("model", "task", "metric")}
    for column, key in METRIC_COLUMNS.items():
        texts[column] = format_metric(entry.get(key), outcome.unit_of(entry))
    arrow = {"good": "▲ ", "bad": "▼ ", "": ""}[mood_of(entry.get("gain"))]
    texts["gain"] = arrow + format_gain(entry.get("gain"))
    texts["kept"] = outcome.kept_model(entry) or MISSING
    texts["modalities"] = outcome.modality_names(entry) or MISSING
    texts["epsilon"] = format_epsilon(entry.get("privacy"))
    return texts


def _explain_values(clients: dict[str, dict], has_baseline: bool) -> str:
    """Return a note on the units of values and gains, and on metrics that should fall."""
    falling = outcome.falling_metrics(clients)
    percentages = [entry for entry in clients.values() if outcome.unit_of(entry) == "%"]
    notes = []
    if len(percentages) == len(clients):
        notes.append("Values are percent.")
    elif percentages:
        names = sorted({str(entry.get("metric")) for entry in percentages})
        notes.append(f"Values of {format_text(join_names(names))} are percent.")
    if falling:
        notes.append(f"Lower is better for {format_text(join_names(falling))}.")
    if has_baseline:
        better = ", positive where the client is better" if falling else ""
        notes.append(
            "Local is the same client trained alone, with the same model, data and epochs. A gain "
            f"is in percent of its local value{better}."
        )
    return " ".join(notes)


def _order_clients(run: Run) -> list[str]:
    """Return the clients in their order; if there are many, the smallest gains first."""
    gains = outcome.gains({"clients": run.clients}) if len(run.clients) > MAX_ROWS else {}
    return [*gains, *(client for client in run.clients if client not in gains)]


def _images(run: Run) -> list[str]:
    """Return SVG files that the method wrote, as images: nothing inside an image can run."""
    figures = []
    for file in sorted((run.path / "pictures").glob("*.svg")):
        if not is_inside(file, run.path):
            continue
        name = file.stem.replace("_", " ").replace("-", " ")
        source = base64.b64encode(file.read_bytes()).decode()
        image = f'<img alt="{format_text(name)}" src="data:image/svg+xml;base64,{source}">'
        title = format_text(name[:1].upper() + name[1:])
        figures.append(f"<figure><h2>{title}</h2>{image}</figure>")
    return figures


def _failures(run: Run) -> str:
    sentences = outcome.describe_failures(history.failures(run))
    if not sentences:
        return ""
    items = "".join(f"<li>{format_text(sentence)}</li>" for sentence in sentences)
    return f'<section><h2>What failed</h2><ul class="failures">{items}</ul></section>'


def _metrics_table(run: Run) -> str:
    """Return a folded table of every metric of every client, with sizes of data and model."""
    clients = run.clients
    entries = list(clients.values())
    columns_before = []
    for name in ("samples", "parameters", "test", "after_local"):
        if any(name in entry for entry in entries):
            columns_before.append(name)
    metrics: dict[str, None] = {}
    for entry in entries:
        metrics |= dict.fromkeys(entry.get("metrics") or {})
    has_hash = any(entry.get("hash") for entry in entries)
    tone_of = client_colours(history.clients(run))
    rows = []
    for client in _order_clients(run):
        entry = clients[client]
        cells = [f"<td>{format_mark('dot', tone_of(client))}{format_text(client)}</td>"]
        cells += [_cell(name, entry.get(name)) for name in columns_before]
        cells += [_cell(name, (entry.get("metrics") or {}).get(name)) for name in metrics]
        if has_hash:
            cells.append(_cell("hash", str(entry.get("hash") or MISSING)[:10]))
        rows.append(f"<tr>{''.join(cells)}</tr>")
    whole = (run.results or {}).get("metrics") or {}
    if any(to_number(whole.get(name)) is not None for name in metrics):
        cells = ["<td>over all clients</td>", *["<td></td>"] * len(columns_before)]
        cells += [_cell(name, whole.get(name)) for name in metrics]
        cells += ["<td></td>"] * has_hash
        rows.append(f'<tr class="soft">{"".join(cells)}</tr>')
    names = [name.replace("_", " ") for name in (*columns_before, *metrics)]
    columns = ["client", *names, *["hash"] * has_hash]
    table = format_table(columns, set(columns) - {"client", "test", "hash"}, rows)
    return f"<details><summary>Every metric of every client</summary>{table}</details>"


def _cell(name: str, value: Any) -> str:
    number = to_number(value)
    if number is None:
        kind = "" if name in ("test", "hash") else "number"
        return f'<td class="{kind}">{format_text(MISSING if value is None else value)}</td>'
    text = f"{number:.2f}"
    if name in ("samples", "parameters"):
        text = f"{number:,.0f}"
    elif 0 < abs(number) < 1:  # two decimals suit percentages, not small errors
        text = f"{number:.3g}"
    return f'<td class="number">{text}</td>'


def _how_to_repeat(run: Run) -> str:
    command = shlex.join(["unalike", "run", str(run.path / "config.yaml")])
    how = f"<pre>{format_text(command)}</pre>"
    if run.config.get("python"):
        how = (
            "<p>It was started from Python, with clients only that program can make: call "
            "<code>unalike.run</code> there.</p>"
        )
    commit = (run.results or {}).get("commit")
    notes = []
    if run.seed is not None:
        notes.append(f"Seed {run.seed}")
    if commit:
        notes.append(f"commit {commit}")
    notes.append("every other setting is in the config below")
    if run.unreadable:
        lines = count_noun(run.unreadable, "line")
        notes.append(
            f"{lines} of the record could not be read: the run was cut short while writing"
        )
    note = format_text("; ".join(notes))
    return f"<section><h2>To repeat this run</h2>{how}<p class='small'>{note}.</p></section>"


def _config(run: Run) -> str:
    text = (run.path / "config.yaml").read_text(encoding="utf-8", errors="replace")
    text = "\n".join(replace_unprintable(line.expandtabs()) for line in text.splitlines())
    return f"<details><summary>The config, as it ran</summary><pre>{escape(text)}</pre></details>"
