"""One run as one page, report.html, that needs no network. Knows run folders, not how runs are made."""

import base64
import shlex
from html import escape
from pathlib import Path

from unalike.report import formatting as words
from unalike.report import history
from unalike.report.figure import Picture, colours
from unalike.report.folder import Run, read
from unalike.report.plots import draw
from unalike.report.style import css

# Nothing on the page may run or fetch anything, whatever a run wrote into its names
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

VALUES = {
    "alone": "alone",
    "together": "value",
    "safeguarded": "safeguarded",
}  # column: what the results call it
MOST = 40  # rows of a table before it scrolls


def write(path: str | Path) -> Path:
    """Make report.html in the run folder `path`, and return where it lies."""
    run = read(path)
    file = run.path / "report.html"
    file.write_bytes(page(run).encode("utf-8", errors="replace"))
    return file


def page(run: Run) -> str:
    """The page as text."""
    title = f"{run.algorithm} on {run.scenario}"
    parts = [
        f'<p class="kind">Unalike run, {_text(run.path.resolve().name)}</p>',
        f"<h1>{_text(title)}</h1>",
        f'<p class="summary">{_text(run.config["summary"])}</p>'
        if run.config.get("summary")
        else "",
        _verdict(run),
        _facts(run),
        _clients(run) if run.results else "",
        *map(_figure, draw(run)),
        *_pictures(run),
        _failures(run),
        _details(run) if run.results else "",
        _repeat(run),
        _config(run),
    ]
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    head += '<meta name="viewport" content="width=device-width, initial-scale=1">'
    body = "\n".join(part for part in parts if part)
    head += f"<title>{_text(title)}</title><style>{css()}</style>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><main>\n{body}\n</main></body></html>\n'


def _text(value) -> str:
    return escape(words.printable(value)).replace(" %", "\N{NO-BREAK SPACE}%")


def _verdict(run: Run) -> str:
    if run.results is None:
        done = history.rounds(run)
        return f'<p class="verdict open">This run has not finished: {words.count(done, "round")} so far, and no results yet.</p>'
    mood = "lost" if words.losers(run.results) else "" if words.gains(run.results) else "open"
    return f'<p class="verdict {mood}">{_text(words.verdict(run.results))}</p>'


def _facts(run: Run) -> str:
    results = run.results or {}
    facts: list[tuple[str, str, str, str]] = []  # name, value, a word more, class
    for name, value in (words.federation(results) if run.results else {}).items():
        facts += [("Federation", words.percent(value), name, "")]
    if words.number(results.get("delta")) is not None:
        facts += [("Delta", words.signed(results["delta"]), "mean gain", _mood(results["delta"]))]
    if run.results and words.gains(results):
        lost, gained = words.losers(results), words.gains(results)
        worst = next(iter(gained))
        facts += [
            (
                "Losers",
                f"{len(lost)} of {len(gained)}",
                words.listed(lost, 3),
                "bad" if lost else "",
            )
        ]
        facts += [("Worst client", words.signed(gained[worst]), worst, _mood(gained[worst]))]
    safeguard = results.get("safeguard")
    if isinstance(safeguard, dict):
        left = words.number(safeguard.get("losers"))
        note = (
            "Delta" if left is None else f"Delta, {words.count(int(left), 'loser')}"
        ) + words.judged(results)
        facts += [
            (
                "Safeguarded",
                words.signed(safeguard.get("delta")),
                note,
                _mood(safeguard.get("delta")),
            )
        ]
    spent = results.get("privacy")
    if isinstance(spent, dict):
        facts += [("Epsilon", words.epsilon(spent), words.privacy(spent), "")]
    facts += [
        ("Server", value, name, "") for name, value in words.figures(results.get("server")).items()
    ]
    sent = history.sent(run)
    facts += [
        (
            "Sent",
            words.data(sent["up"] + sent["down"]),
            f"{words.data(sent['up'])} up, {words.data(sent['down'])} down",
            "",
        )
    ]
    if results:
        clock = words.number(results.get("clock"))
        facts += [
            (
                "Time",
                words.duration(results.get("seconds")),
                f"simulated {words.duration(clock)}" if clock else "",
                "",
            )
        ]
    tile = '<div><dt>{}</dt><dd class="{}">{}<small>{}</small></dd></div>'
    tiles = [
        tile.format(_text(name), kind, _text(value), _text(note))
        for name, value, note, kind in facts
    ]
    return f'<dl class="facts">{"".join(tiles)}</dl>'


def _mood(gain) -> str:
    gain = words.number(gain)
    return "" if not gain else "good" if gain > 0 else "bad"


def _clients(run: Run) -> str:
    clients = run.clients
    has_alone = any(words.number(its.get("alone")) is not None for its in clients.values())
    has_safeguard = any("safeguarded" in its for its in clients.values())
    has_modalities = any(words.modalities(its) for its in clients.values())
    names = ["client", "model", *["modalities"] * has_modalities, "task", "metric"]
    names += ["alone"] * has_alone + ["together"] + ["gain"] * has_alone
    names += ["safeguarded", "kept"] * has_safeguard + ["epsilon"] * any(
        "privacy" in its for its in clients.values()
    )
    missed, why = words.misses(history.failures(run))
    names += ["missed"] * bool(missed)
    figures = {*VALUES, "gain", "missed", "epsilon"}
    rows, tone_of = [], colours(run)
    for client in _ordered(run):
        its = clients[client]
        shown = {name: its.get(name) or words.NOTHING for name in ("model", "task", "metric")} | {
            "kept": words.kept(its) or words.NOTHING
        }
        unit = words.unit_of_client(its)
        shown |= {name: words.metric_value(its.get(key), unit) for name, key in VALUES.items()}
        shown["modalities"] = words.modalities(its) or words.NOTHING
        shown["epsilon"] = words.epsilon(its.get("privacy"))
        shown["missed"] = str(missed.get(client, 0))
        shown["gain"] = _arrow(its.get("gain")) + words.signed(its.get("gain"))
        cells = [f"<td>{_mark('dot', tone_of(client))}{_text(client)}</td>"]
        for name in names[1:]:
            kind = (
                f"number {_mood(its.get('gain'))}"
                if name == "gain"
                else "number"
                if name in figures
                else ""
            )
            cells += [f'<td class="{kind}">{_text(shown[name])}</td>']
        rows += [f"<tr>{''.join(cells)}</tr>"]
    note = _explain_values(clients, has_alone)
    if missed:
        note += f" Missed counts the rounds a client was away ({_text(why)})."
    if len(clients) > MOST:
        note += " The smallest gains come first."
    return f"<section><h2>Every client</h2>{_table(names, figures, rows)}<p class='small'>{note}</p></section>"


def _explain_values(clients: dict[str, dict], has_alone: bool) -> str:
    """Return a note on the units of values and gains, and on metrics that should fall."""
    falling = [its for its in clients.values() if not words.higher_is_better(its)]
    notes = []
    if words.common_unit(clients) == "%":
        notes.append("Values are percent.")
    elif any(words.unit_of_client(its) == "%" for its in clients.values()):
        percent = sorted(
            {str(its.get("metric")) for its in clients.values() if words.unit_of_client(its) == "%"}
        )
        notes.append(f"Values of {_text(words.listed(percent))} are percent.")
    if falling:
        names = sorted({str(its.get("metric")) for its in falling})
        notes.append(f"Lower is better for {_text(words.listed(names))}.")
    if has_alone:
        better = " and positive where it is better" if falling else ""
        notes.append(f"A gain is in percent of the client's own value alone{better}.")
    return " ".join(notes)


def _ordered(run: Run) -> list[str]:
    """The clients as the run lists them; when there are too many to see at once, the smallest gains first."""
    gained = words.gains({"clients": run.clients}) if len(run.clients) > MOST else {}
    return [*gained, *(client for client in run.clients if client not in gained)]


def _table(names: list[str], figures: set[str], rows: list[str]) -> str:
    head = "".join(
        f'<th scope="col" class="{"number" if name in figures else ""}">{_text(name)}</th>'
        for name in names
    )
    kind = "wide tall" if len(rows) > MOST else "wide"
    return f'<div class="{kind}"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _arrow(gain) -> str:
    return {"good": "▲ ", "bad": "▼ ", "": ""}[_mood(gain)]


def _mark(kind: str, tone: str) -> str:
    return f'<span class="mark {kind}" style="--tone: var(--{tone})"></span>'


def _figure(picture: Picture) -> str:
    marks = "".join(
        f"<li>{_mark(kind, tone)}{_text(text)}</li>" for kind, tone, text in picture.legend
    )
    legend = f'<ul class="legend">{marks}</ul>' if marks else ""
    caption = f"<figcaption>{_text(picture.caption)}</figcaption>"
    return f'<figure><h2>{_text(picture.title)}</h2>{legend}<div class="wide">{picture.svg}</div>{caption}</figure>'


def _pictures(run: Run) -> list[str]:
    """What the method drew itself, as images: nothing inside an image can run."""
    found = []
    for file in sorted((run.path / "pictures").glob("*.svg")):
        name = file.stem.replace("_", " ").replace("-", " ")
        source = base64.b64encode(file.read_bytes()).decode()
        image = f'<img alt="{_text(name)}" src="data:image/svg+xml;base64,{source}">'
        found += [f"<figure><h2>{_text(name[:1].upper() + name[1:])}</h2>{image}</figure>"]
    return found


def _failures(run: Run) -> str:
    told = words.failures(history.failures(run))
    if not told:
        return ""
    return f'<section><h2>What failed</h2><ul class="failures">{"".join(f"<li>{_text(sentence)}</li>" for sentence in told)}</ul></section>'


def _details(run: Run) -> str:
    """Every metric of every client, with what it learnt from."""
    clients, whole = run.clients, (run.results or {}).get("metrics") or {}
    plain = [
        name
        for name in ("samples", "parameters", "test", "after_local")
        if any(name in its for its in clients.values())
    ]
    metrics = list(
        dict.fromkeys(name for its in clients.values() for name in its.get("metrics") or {})
    )
    hashed = any(its.get("hash") for its in clients.values())
    rows, tone_of = [], colours(run)
    for client in _ordered(run):
        its = clients[client]
        cells = [_cell(name, its.get(name)) for name in plain] + [
            _cell(name, (its.get("metrics") or {}).get(name)) for name in metrics
        ]
        cells += [_cell("hash", str(its.get("hash") or words.NOTHING)[:10])] * hashed
        rows += [
            f"<tr><td>{_mark('dot', tone_of(client))}{_text(client)}</td>{''.join(cells)}</tr>"
        ]
    if any(words.number(whole.get(name)) is not None for name in metrics):
        cells = (
            ["<td></td>"] * len(plain)
            + [_cell(name, whole.get(name)) for name in metrics]
            + ["<td></td>"] * hashed
        )
        rows += [f'<tr class="soft"><td>over all clients</td>{"".join(cells)}</tr>']
    names = ["client", *(name.replace("_", " ") for name in [*plain, *metrics]), *["hash"] * hashed]
    table = _table(names, set(names) - {"client", "test", "hash"}, rows)
    return f"<details><summary>Every metric of every client</summary>{table}</details>"


def _cell(name: str, value) -> str:
    told = words.number(value)
    if told is None:
        return f'<td class="{"" if name in ("test", "hash") else "number"}">{_text(words.NOTHING if value is None else value)}</td>'
    if name in ("samples", "parameters"):
        return f'<td class="number">{told:,.0f}</td>'
    # Two decimals suit percentages; small numbers keep three digits.
    shown = f"{told:.2f}" if abs(told) >= 1 or not told else f"{told:.3g}"
    return f'<td class="number">{shown}</td>'


def _repeat(run: Run) -> str:
    told = f"<pre>{_text(shlex.join(['unalike', 'run', str(run.path / 'config.yaml')]))}</pre>"
    if run.config.get("python"):
        told = "<p>It was started from Python, with clients only that program can make: call <code>unalike.run</code> there.</p>"
    commit = (run.results or {}).get("commit")
    notes = [
        f"Seed {run.seed}" if run.seed is not None else "",
        f"commit {commit}" if commit else "",
    ]
    notes += ["every other setting is in the config below"]
    if run.unreadable:
        notes += [
            f"{words.count(run.unreadable, 'line')} of the record could not be read: the run was cut short while writing"
        ]
    note = "; ".join(note for note in notes if note)
    return (
        f"<section><h2>To repeat this run</h2>{told}<p class='small'>{_text(note)}.</p></section>"
    )


def _config(run: Run) -> str:
    text = (run.path / "config.yaml").read_text(encoding="utf-8", errors="replace")
    text = "\n".join(words.visible(line.expandtabs()) for line in text.splitlines())
    return f"<details><summary>The config, as it ran</summary><pre>{escape(text)}</pre></details>"
