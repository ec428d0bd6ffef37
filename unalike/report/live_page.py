"""The page of a run that goes on: progress, each client's curve, bytes, who failed and why.

A page is a list of sections; the browser replaces those that changed (live.js).
"""

import math
import time
from html import escape
from itertools import pairwise
from typing import Any

from unalike.base.version import __version__
from unalike.report import history, outcome
from unalike.report.folder import Run, read
from unalike.report.formatting import (
    MISSING,
    format_bytes,
    format_gain,
    format_metric,
    join_names,
    to_number,
)
from unalike.report.history import Curve
from unalike.report.html import (
    format_mark,
    format_table,
    format_text,
    format_tiles,
    mood_of,
    style_sheet,
)
from unalike.report.live_run import LiveRun, Progress, gains_so_far, local_curves
from unalike.report.metrics import absent_clients
from unalike.report.mpl import MAX_PANELS, client_colours
from unalike.report.page import describe_run, render_heading, render_parts

MAX_CLIENTS = 300  # rows of clients; of more those with the smallest gain
MAX_NOTICES = 12
MAX_DRAWN = 1e100  # larger values are out of sight: a scale for them would not be finite
WIDTH, HEIGHT = 300, 132  # of a panel's drawing, in its own units
LEFT, RIGHT, TOP, BOTTOM = 34, 292, 8, 112  # where its curves are
STATES = {
    "waiting": "waiting for its first event",
    "running": "running",
    "stopped": "stopped",
    "failed": "failed",
    "finished": "finished",
}
SENTENCES = {  # of events that are shown with their time
    "notice": "{text}",
    "waiting": "{text}",
    "damaged": "{reason}",
    "restart": "{reason}; the run goes on from its last checkpoint",
    "lost": "round {round} was lost: {reason}",
    "refused": "{client} was rejected: {reason}",
    "joined": "{client} joined in round {round}",
    "again": "{client} is asked again in round {round}",
    "resume": "resumed after round {round}",
    "failed": "the run ended: {error}",
}

Section = tuple[str, str]  # its name, and its HTML


def render_live_page(title: str, state: str, sections: list[Section]) -> str:
    """Return the whole page as HTML; it goes on by itself where scripts may run."""
    title = format_text(title)
    head = (
        '<meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{title}</title><style>{style_sheet()}{LAYOUT}</style>"
        '<noscript><meta http-equiv="refresh" content="5"></noscript>'
        '<script src="live.js" defer></script>'
    )
    body = ""
    for name, html in sections:
        body += f'<div data-section="{name}">{html}</div>\n'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n'
        f'<body><main data-state="{state}">\n{body}</main>'
        f'<p class="footer small">Unalike {__version__}. This page is read-only.</p>'
        "</body></html>\n"
    )


def render_title(live: LiveRun) -> str:
    """Return the title for the browser's tab."""
    progress = live.progress()
    state = live.state
    if state == "running":
        state = f"{format_position(progress.position)}/{progress.rounds}"
    return f"{state} · {describe_run(live.run)}"


def render_sections(live: LiveRun) -> list[Section]:
    """Return the sections of the page, in order."""
    run = live.run
    sections = [("heading", render_heading(run)), ("progress", _progress(live))]
    if run.results is not None and live.report is not None:
        return [*sections, ("report", live.report)]
    if run.results is not None:
        for place, part in enumerate(render_parts(read(live.path))):
            sections.append((f"report-{place}", part))
        return sections
    sections += [
        ("tiles", _tiles(live)),
        ("clients", _clients(live)),
        ("failures", _failures(run)),
        ("traffic", _traffic(run)),
        ("notices", _notices(live)),
    ]
    return [(name, html) for name, html in sections if html]


def _progress(live: LiveRun) -> str:
    """Return the state of the run, a bar, and how long it will take."""
    progress = live.progress()
    state = live.state
    share = min(1.0, progress.position / progress.rounds) if progress.rounds else 0.0
    if state == "finished":
        share = 1.0
    unit = "visits a client" if is_fraction(progress.position) else "rounds"
    words = [f"{format_position(progress.position)} of {progress.rounds} {unit}"]
    if state == "running" and progress.stage != live.run.algorithm:
        words.append(format_text(progress.stage))
    if not progress.rounds:
        words = []
    if progress.elapsed:
        kind = "up" if state == "running" else ""
        clock = _ticking(progress.elapsed, kind)
        words.append(f"in {clock}" if state == "finished" else f"{clock} so far")
    if progress.left is not None:
        words.append(f"about {_ticking(progress.left, 'down')} left")
    percent = f"{100 * share:.1f}"
    return (
        f'<div class="status"><span class="state {state}" role="status">{STATES[state]}</span>'
        f'<span class="soft numbers">{" · ".join(words)}</span></div>'
        f'<div class="bar {state}" role="progressbar" aria-label="rounds" aria-valuemin="0" '
        f'aria-valuemax="100" aria-valuenow="{percent}"><i style="width: {percent}%"></i></div>'
        f"{_advice(live)}"
    )


def is_fraction(position: float) -> bool:
    """Return whether a position is between two rounds, as of asynchronous methods."""
    return not float(position).is_integer()


def format_position(position: float) -> str:
    """Return rounds that are over.

    >>> format_position(3.0), format_position(2.25)
    ('3', '2.2')
    """
    return f"{position:.1f}" if is_fraction(position) else f"{position:.0f}"


def _ticking(seconds: float, kind: str) -> str:
    """Return a time that goes on in the browser: "up", "down", or not at all."""
    attributes = f' data-tick="{kind}" data-seconds="{seconds:.1f}"' if kind else ""
    return f"<span{attributes}>{format_clock(seconds)}</span>"


def format_clock(seconds: float) -> str:
    """Return a time in whole seconds; live.js does the same.

    >>> format_clock(42.4), format_clock(100.0), format_clock(7300.0)
    ('42 s', '1 min 40 s', '2 h 01 min')
    """
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    minutes, remainder = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {remainder:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _advice(live: LiveRun) -> str:
    """Return what to do about a run that does not go on."""
    if live.problem:
        return f'<p class="verdict lost">{format_text(live.problem)}</p>'
    if live.state == "finished" and live.awaits_report:
        return '<p class="verdict open">This run has finished. Its report is being drawn.</p>'
    if live.state == "finished" and live.run.results is None:
        return (
            '<p class="verdict open">This run has finished. Its results are with the server; '
            "this is one site.</p>"
        )
    if live.state not in ("failed", "stopped"):
        return ""
    how = f"unalike resume {live.path}"
    if live.run.config.get("python"):
        how = "unalike.run(..., resume=True)"
    reason = ""
    if live.state == "failed":
        reason = f"{live.run.events[-1].get('error')}. "
    return (
        f'<p class="verdict lost">{format_text(reason)}No process is at work on this run. '
        f"It goes on from its last checkpoint with <code>{format_text(how)}</code></p>"
    )


def _tiles(live: LiveRun) -> str:
    run = live.run
    gains = gains_so_far(run)
    tiles: list[tuple[str, str, str, str]] = []
    if gains:
        mean = math.fsum(gains.values()) / len(gains)
        note = "over training alone for as many rounds"
        tiles.append(("Mean gain so far", format_gain(mean), note, mood_of(mean)))
        worse = sorted((c for c in gains if gains[c] < 0), key=lambda c: gains[c])
        count = f"{len(worse)} of {len(gains)}"
        tiles.append(("Behind local", count, join_names(worse, 3), "bad" if worse else ""))
    else:
        for name, curve in history.federation_curves(run).items():
            last = curve[max(curve)]
            tiles.append(("Federation", format_metric(last, history.common_unit(run)), name, ""))
    clients = history.clients(run)
    if clients:
        absent = absent_clients(run)
        failed = sorted(client for client in absent if absent[client])
        away = sorted(client for client in absent if not absent[client])
        notes = [join_names(failed, 3)] * bool(failed)
        notes += [f"away: {join_names(away, 3)}"] * bool(away)
        count = f"{len(failed)} of {len(clients)}"
        tiles.append(("Failed", count, "; ".join(notes), "bad" if failed else ""))
    sent = _sent_by_round(run)
    if sent:
        _, up, down = sent[-1]
        note = f"{format_bytes(up)} up, {format_bytes(down)} down"
        tiles.append(("Sent", format_bytes(up + down), note, ""))
    return format_tiles(tiles) if tiles else ""


def _clients(live: LiveRun) -> str:
    """Return a panel for each client; for many clients a row with a small curve."""
    run = live.run
    clients = history.clients(run)
    if not clients:
        return ""
    curves = _Curves(run, live.progress())
    note = ""
    if curves.local:
        note = "By round. Solid: federated. Dashed: local, which is training alone. "
    if len(clients) <= MAX_PANELS:
        panels = "".join(curves.panel(client) for client in clients)
        note += "Clients with the same metric share one scale."
        return (
            f'<section><h2>Every client</h2><div class="panels">{panels}</div>'
            f'<p class="small">{note}</p></section>'
        )
    shown = sorted(clients, key=lambda client: curves.gains.get(client, math.inf))[:MAX_CLIENTS]
    rows = [curves.row(client) for client in shown]
    columns = ["client", "model", "metric", "over the rounds", "local", "now", "gain"]
    table = format_table(columns, {"local", "now", "gain"}, rows)
    note += "The smallest gains come first."
    if len(shown) < len(clients):
        note += f" {len(shown)} of {len(clients)} clients."
    return f'<section><h2>Every client</h2>{table}<p class="small">{note}</p></section>'


class _Curves:
    """Draws the curves of one run's clients."""

    def __init__(self, run: Run, progress: Progress):
        self.run = run
        self.federated = history.metric_curves(run, "together")
        self.local = local_curves(run)
        self.gains = gains_so_far(run)
        self.absent = absent_clients(run)
        self.missed, _ = outcome.count_missed_rounds(history.failures(run))
        self.tone_of = client_colours(history.clients(run))
        infos = history.client_infos(run)
        self.infos = {client: infos.get(client) or {} for client in history.clients(run)}
        self.metrics = {client: history.metric_name(run, client) for client in self.infos}
        self.limits = self._limits()
        rounds = [max(curve) for curve in (*self.federated.values(), *self.local.values()) if curve]
        self.rounds = max([1, progress.rounds, *rounds])

    def _limits(self) -> dict[str, tuple[float, float]]:
        values: dict[str, list[float]] = {}
        for client, metric in self.metrics.items():
            for curves in (self.federated, self.local):
                values.setdefault(metric, []).extend(curves.get(client, {}).values())
        limits = {}
        for metric, measured in values.items():
            own = [value for value in measured if abs(value) <= MAX_DRAWN]
            low, high = (min(own), max(own)) if own else (0.0, 1.0)
            margin = 0.08 * (high - low) or 0.05 * abs(high) or 0.5
            limits[metric] = (low - margin, high + margin)
        return limits

    def panel(self, client: str) -> str:
        """Return a client's name, value, gain and curves."""
        info = self.infos[client]
        about = [str(info.get(name) or "") for name in ("model", "metric")]
        text = format_text(" · ".join(part for part in about if part))
        gain = self.gains.get(client)
        change = ""
        if gain is not None:
            change = f'<span class="{mood_of(gain)}">{format_text(format_gain(gain))}</span>'
        return (
            f'<div class="panel"><div class="row"><b>{format_mark("dot", self.tone_of(client))}'
            f"{format_text(client)}</b>"
            f'<span class="now">{self._now(client)} {change}</span></div>'
            f'<div class="row small"><span>{text}</span>{self._badge(client)}</div>'
            f"{self._drawing(client)}</div>"
        )

    def row(self, client: str) -> str:
        """Return a row of a table with a client's value, gain and curves."""
        info = self.infos[client]
        gain = self.gains.get(client)
        cells = [
            f"<td>{format_mark('dot', self.tone_of(client))}{format_text(client)}"
            f"{self._badge(client)}</td>",
            f"<td>{format_text(info.get('model') or MISSING)}</td>",
            f"<td>{format_text(self.metrics[client])}</td>",
            f"<td>{self._drawing(client, small=True)}</td>",
            f'<td class="number">{self._value(client, self.local.get(client, {}))}</td>',
            f'<td class="number">{self._now(client)}</td>',
            f'<td class="number {mood_of(gain)}">{format_text(format_gain(gain))}</td>',
        ]
        return f"<tr>{''.join(cells)}</tr>"

    def _badge(self, client: str) -> str:
        if client in self.absent:
            kind, word = ("badge bad", "failed") if self.absent[client] else ("badge", "away")
            return f'<span class="{kind}">{word}</span>'
        missed = self.missed.get(client)
        return f'<span class="badge">missed {missed}</span>' if missed else ""

    def _now(self, client: str) -> str:
        return self._value(client, self.federated.get(client, {}))

    def _value(self, client: str, curve: Curve) -> str:
        value = curve[max(curve)] if curve else None
        return format_metric(value, str(self.infos[client].get("unit", "%")))

    def _drawing(self, client: str, small: bool = False) -> str:
        low, high = self.limits[self.metrics[client]]
        tone = self.tone_of(client)
        federated = self.federated.get(client, {})
        local = self.local.get(client, {})
        text = format_text(f"{client}: {self._now(client)} after round {max(federated, default=0)}")
        parts = []
        if not small:
            parts += [_grid(low, high), _round_labels(self.rounds)]
        x = lambda number: LEFT + (RIGHT - LEFT) * number / self.rounds
        y = lambda value: BOTTOM - (BOTTOM - TOP) * (value - low) / (high - low)
        for curve, kind in ((local, "alone"), (federated, "federated")):
            points = " ".join(f"{x(number):.1f},{y(value):.1f}" for number, value in curve.items())
            if points:
                parts.append(f'<polyline class="{kind}" points="{points}"/>')
        if federated:
            last = max(federated)
            parts.append(f'<circle cx="{x(last):.1f}" cy="{y(federated[last]):.1f}" r="3.5"/>')
        elif not small and not local:
            middle = (LEFT + RIGHT) / 2
            parts.append(f'<text x="{middle}" y="62" text-anchor="middle">not measured yet</text>')
        box = f"{LEFT} {TOP - 6} {RIGHT - LEFT + 6} {BOTTOM - TOP + 12}"
        return (
            f'<svg class="curve{" small" * small}" style="--tone: var(--{tone})" role="img" '
            f'preserveAspectRatio="{"none" if small else "xMidYMid"}" aria-label="{text}" '
            f'viewBox="{box if small else f"0 0 {WIDTH} {HEIGHT}"}">{"".join(parts)}</svg>'
        )


def _grid(low: float, high: float) -> str:
    html = ""
    for tick in nice_ticks(low, high):
        y = BOTTOM - (BOTTOM - TOP) * (tick - low) / (high - low)
        html += f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        html += f'<text x="{LEFT - 5}" y="{y + 3.5:.1f}" text-anchor="end">{tick:g}</text>'
    return html


def _round_labels(rounds: int) -> str:
    html = ""
    for tick in nice_ticks(0, rounds):
        if tick.is_integer():
            x = LEFT + (RIGHT - LEFT) * tick / rounds
            html += f'<text x="{x:.1f}" y="{BOTTOM + 15}" text-anchor="middle">{tick:g}</text>'
    return html


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return at most `count` + 1 round numbers between two others.

    >>> nice_ticks(3.2, 81.0), nice_ticks(0, 20)
    ([20.0, 40.0, 60.0, 80.0], [0.0, 5.0, 10.0, 15.0, 20.0])
    """
    raw = (high - low) / count
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(scale * factor for factor in (1, 2, 5, 10) if scale * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _failures(run: Run) -> str:
    """Return who failed and why, and who missed rounds."""
    failures = history.failures(run)
    sentences = outcome.describe_failures(failures)
    title = "What failed" if sentences else "Who missed rounds"
    missed, reasons = outcome.count_missed_rounds(failures)
    if missed:
        names = [f"{client} {count}" for client, count in missed.items()]
        sentences.append(f"Rounds missed: {join_names(names, 12)} ({reasons})")
    if not sentences:
        return ""
    items = "".join(f"<li>{format_text(sentence)}</li>" for sentence in sentences)
    return f'<section><h2>{title}</h2><ul class="failures">{items}</ul></section>'


def _sent_by_round(run: Run) -> list[tuple[int, float, float]]:
    """Return (round, bytes up, bytes down) since the start; of a round done again the later one."""
    sent: dict[int, tuple[float, float]] = {}
    for event in run.events:
        number = to_number(event.get("round"))
        sizes = event.get("bytes")
        if event["event"] == "round" and number is not None and isinstance(sizes, dict):
            up, down = (to_number(sizes.get(direction)) or 0.0 for direction in ("up", "down"))
            sent[int(number)] = (up, down)
    return [(number, *sent[number]) for number in sorted(sent)]


def _traffic(run: Run) -> str:
    """Return a bar for each round: bytes up to the server and down to the clients."""
    sent = [(0, 0.0, 0.0), *_sent_by_round(run)]
    bars = []
    for (_, up_before, down_before), (number, up, down) in pairwise(sent):
        bars.append((number, max(0.0, up - up_before), max(0.0, down - down_before)))
    highest = max((up + down for _, up, down in bars), default=0.0)
    if not highest:
        return ""
    bars = bars[-60:]
    columns = ""
    for number, up, down in bars:
        title = f"round {number}: {format_bytes(up)} up, {format_bytes(down)} down"
        columns += (
            f'<i title="{title}"><b style="height: {100 * down / highest:.1f}%"></b>'
            f'<b class="up" style="height: {100 * up / highest:.1f}%"></b></i>'
        )
    legend = (
        f'<ul class="legend"><li>{format_mark("square", "up")}up to the server</li>'
        f"<li>{format_mark('square', 'down')}down to the clients</li></ul>"
    )
    _, up, down = bars[-1]
    caption = (
        f"Rounds {bars[0][0]} to {bars[-1][0]}; the last one: {format_bytes(up)} up, "
        f"{format_bytes(down)} down."
    )
    return (
        f'<section><h2>Sent in each round</h2>{legend}<div class="columns" role="img" '
        f'aria-label="{escape(caption)}">{columns}</div><p class="small">{caption}</p></section>'
    )


def _notices(live: LiveRun) -> str:
    """Return the last things that happened beside rounds, the newest first."""
    items: list[str] = []
    for event in reversed(live.run.events):
        sentence = SENTENCES.get(event["event"])
        if sentence is None or len(items) == MAX_NOTICES:
            continue
        facts: dict[str, Any] = {"text": "", "reason": "", "client": "", "round": "", "error": ""}
        at = time.strftime("%H:%M:%S", time.localtime(to_number(event.get("time")) or 0))
        text = format_text(sentence.format_map(facts | event))
        items.append(f"<li><time>{at}</time> {text}</li>")
    if not items:
        return ""
    return f'<section><h2>What happened</h2><ul class="notices">{"".join(items)}</ul></section>'


LAYOUT = """
.status { display: flex; flex-wrap: wrap; align-items: center; gap: 0.35rem 0.9rem;
  margin: 0.4rem 0 0.6rem; }
.numbers { font-variant-numeric: tabular-nums; }
.state { display: inline-flex; align-items: center; gap: 0.5em; font-weight: 600;
  font-size: 0.9rem; padding: 0.15rem 0.75rem; border-radius: 99px; background: var(--paper);
  border: 1px solid var(--rule); }
.state::before { content: ""; width: 0.6em; height: 0.6em; border-radius: 50%;
  background: var(--soft); }
.state.running::before, .state.finished::before { background: var(--good); }
.state.failed::before, .state.stopped::before { background: var(--bad); }
.state.running::before { animation: pulse 1.6s ease-in-out infinite; }
@keyframes pulse { 50% { opacity: 0.25; } }
.bar { height: 8px; border-radius: 99px; background: var(--rule); overflow: hidden;
  margin: 0 0 1.5rem; }
.bar i { display: block; height: 100%; background: var(--good); border-radius: 99px;
  transition: width 0.6s ease; }
.bar.failed i, .bar.stopped i { background: var(--bad); }
.panels { display: grid; gap: 1.1rem 1.6rem; margin-top: 0.9rem;
  grid-template-columns: repeat(auto-fill, minmax(15.5rem, 1fr)); }
.panel .row { display: flex; flex-wrap: wrap; align-items: baseline; gap: 0 0.5rem; }
.panel b { overflow-wrap: anywhere; }
.panel .now { margin-left: auto; font-weight: 600; font-variant-numeric: tabular-nums;
  white-space: nowrap; }
.panel .row.small { margin: 0; }
.panel .badge { margin-left: auto; }
.badge { font-size: 0.75rem; font-weight: 600; border: 1px solid; border-radius: 99px;
  padding: 0 0.5em; color: var(--soft); }
.badge.bad { color: var(--bad); }
td .badge { margin-left: 0.5em; }
svg.curve { display: block; width: 100%; height: auto; margin-top: 0.3rem; }
svg.curve.small { width: 9rem; height: 2.1rem; margin: 0; }
svg.curve text { font-size: 10.5px; fill: var(--soft); font-family: inherit;
  font-variant-numeric: tabular-nums; }
svg.curve text[text-anchor="middle"] { paint-order: stroke; stroke: var(--paper);
  stroke-width: 5px; }
svg.curve line { stroke: var(--rule); }
svg.curve polyline { fill: none; stroke: var(--tone); stroke-width: 1.8;
  stroke-linejoin: round; vector-effect: non-scaling-stroke; }
svg.curve .alone { stroke-width: 1.3; stroke-dasharray: 4 3; opacity: 0.75; }
svg.curve circle { fill: var(--tone); }
.small circle { display: none; }
.columns { display: flex; align-items: flex-end; gap: 2px; height: 5.5rem; margin-top: 0.9rem;
  border-bottom: 1px solid var(--rule); }
.columns i { flex: 1 1 0; max-width: 2.2rem; height: 100%; display: flex;
  flex-direction: column; justify-content: flex-end; }
.columns b { display: block; background: var(--down); }
.columns b.up { background: var(--up); }
ul.notices { list-style: none; margin: 0.7rem 0 0; padding: 0; overflow-wrap: anywhere; }
.notices time { color: var(--soft); font-variant-numeric: tabular-nums; margin-right: 0.5rem; }
.footer { max-width: 60rem; margin: -3rem auto 0; padding: 0 1.25rem 2rem; }
.verdict code { font-size: 0.85em; background: var(--paper); border: 1px solid var(--rule);
  border-radius: 5px; padding: 0.1em 0.4em; }
#lost { position: sticky; top: 0; z-index: 1; text-align: center; padding: 0.45rem 1rem;
  background: var(--ink); color: var(--paper); font-size: 0.9rem; }
@media (max-width: 40rem) { main { padding: 1.6rem 0.9rem 3.5rem; }
  section, figure, details { padding: 1rem 0.8rem; } }
@media (prefers-reduced-motion: reduce) { .state::before { animation: none !important; }
  .bar i { transition: none; } }
"""
