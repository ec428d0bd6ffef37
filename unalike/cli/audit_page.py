"""Writes an audit as a page in plain words, for a data-protection officer to sign."""

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from unalike.base.errors import UserError
from unalike.base.version import __version__
from unalike.cli.audit import group_clients
from unalike.core.privacy import Sends, noise_for
from unalike.engines import hosts_clients

SUFFIXES = (".md", ".html")
TARGET_EPSILON = 8.0  # the noise that this would take is told where a run costs more

# What happens to a field of a reply before it leaves, by its kind in `@sends`.
PROTECTIONS = {
    "parameters": "clipped, with noise",
    "rows": "each row clipped, with noise",
    "first": "as it is; it comes from the seed, before anything was learnt",
    "open": "as it is; computed without private data",
}

# What a field of a reply is, by its kind in `@sends`.
CONTENTS = {
    "parameters": "weights of the model",
    "rows": "the model's output for examples, a row each",
    "first": "weights of the model before it is trained",
}

# What an epsilon is worth, for those up to the number.
VERDICTS = (
    (1.0, "a strong promise"),
    (3.0, "a fair promise"),
    (TARGET_EPSILON, "a weak promise"),
    (20.0, "hardly a promise"),
    (math.inf, "no protection worth the name"),
)

SEED = (
    "The noise comes from the run's seed (entropy: seed), which the server and all clients know: "
    "whoever knows it can take the noise off again, so against them this promises nothing. Use "
    "entropy: secret between organisations."
)

STYLE = (
    "body{font:15px/1.45 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;width:100%;margin:.6em 0}"
    "td,th{border:1px solid #999;padding:.25em .5em;text-align:left;vertical-align:top}"
    "th{background:#eee}@media print{body{margin:0;font-size:12px}}"
)


class Block(NamedTuple):
    """A part of the page: "title", "heading", "text", "list" or "table" (its first row: names)."""

    kind: str
    content: Any


def check_page(path: Path) -> None:
    """Raise UserError where no page can be written to `path`; to call before the audit."""
    if path.suffix not in SUFFIXES:
        raise UserError(f"--page writes {' or '.join(SUFFIXES)}, got {path.name}")
    if not path.absolute().parent.is_dir():
        raise UserError(
            f"there is no folder {path.parent} to write {path.name} to: create it first"
        )


def write_page(path: Path, audit: Mapping[str, Any]) -> str:
    """Write the result of `unalike.runs.audit` as a page; return a sentence that says so."""
    blocks = build_page(audit)
    text = render_html(blocks) if path.suffix == ".html" else render_markdown(blocks)
    path.write_text(text, "utf-8")
    return f"{path}: a page to read, print and sign."


def build_page(audit: Mapping[str, Any]) -> list[Block]:
    """The page, block by block."""
    blocks = [
        Block("title", f"What leaves in the run {audit['scenario']}"),
        Block("text", _introduction(audit)),
    ]
    for clients in group_clients(dict(audit)):
        blocks += _client_blocks(clients, audit)
    blocks += [
        Block("heading", "What never leaves"),
        Block("list", _kept(audit)),
        Block("heading", "Who is protected against whom"),
        Block("table", _protection_table(audit)),
        Block(
            "text",
            "A member that poisons the common result, and a stranger on the network, are matters "
            "of docs/threats.md.",
        ),
        Block("heading", "Signature"),
        Block(
            "table",
            [
                ("", ""),
                ("Operator of the server (who receives this)", ""),
                ("Legal basis and purpose", ""),
                ("Place and date", ""),
                ("Name and function", ""),
                ("Signature", ""),
            ],
        ),
    ]
    return blocks


def _introduction(audit: Mapping[str, Any]) -> str:
    rounds = audit["rounds"]
    engine = audit["engine"]
    text = (
        f"Method {audit['algorithm']}, rounds: {rounds}, engine {engine}, unalike {__version__}. "
        "The run was rehearsed on this machine with the real data, and "
        "every message was counted; nothing was sent. Sizes are those of the messages, without "
        "what encryption and network add. Messages that are repeated after a failure come on top. "
    )
    if hosts_clients(engine):
        text += "With this engine all clients are on one operator's machines: it is a simulation. "
    if "digest" in audit:
        text += (
            f"This page is true of the run with the digest {audit['digest'][:16]}. The line "
            f"accept: [{{digest: {audit['digest'][:16]}}}] in client.yaml refuses every other. "
        )
    else:
        text += "Another method, number of rounds, model or privacy setting needs a new page. "
    return text.strip()


def _client_blocks(clients: Sequence[str], audit: Mapping[str, Any]) -> list[Block]:
    """What clients that send the same send and receive, and what noise promises them."""
    details = audit["clients"][clients[0]]
    card = {key: value for key, value in details["card"].items() if value is not None}
    if len(clients) > 1:
        announced = ", ".join(card)
    else:
        announced = ", ".join(f"{key} {value}" for key, value in card.items())
    size = details["bytes"]
    measuring = size["measuring"]
    each = ", each" if len(clients) > 1 else ""
    return [
        Block("heading", f"What leaves {', '.join(clients)}{each}, and goes to the server"),
        Block("text", f"Once, when it registers, without noise: {announced}."),
        Block("table", _sent_table(details["messages"])),
        Block(
            "text",
            f"In all {size['up']:,} bytes leave for the method and {measuring['up']:,} for "
            f"measuring how good the models are; {size['down'] + measuring['down']:,} bytes come "
            "in. The server uses what it gets as the method says, and other clients get what it "
            "makes of it.",
        ),
        Block("heading", f"Noise and epsilon for {', '.join(clients)}{each}"),
        Block("list", _describe_noise(audit, details)),
    ]


def _describe_noise(audit: Mapping[str, Any], details: Mapping[str, Any]) -> list[str]:
    """Sentences on all noise of a run: of clients, in their training, and of the server."""
    sample, central = audit["sample"], audit["central"]
    sentences: list[str] = []
    if sample is not None and details["sample_privacy"] is not None:
        sentences += describe_sample_privacy(sample, details["sample_privacy"])
    if central is not None and audit["central_privacy"] is not None:
        sentences += describe_central_privacy(central, audit["central_privacy"])
    if sentences and audit["privacy"] is None:
        return sentences
    return [*sentences, *describe_privacy(audit["privacy"], details["privacy"])]


def describe_sample_privacy(settings: Mapping[str, Any], spent: Mapping[str, Any]) -> list[str]:
    """Sentences on what DP-SGD promises a single record.

    Args:
        settings: `sample:` of the method.
        spent: epsilon, delta and releases (steps) of the client over the whole run.
    """
    sentences = [
        f"The model is trained by DP-SGD: in each of {spent['releases']:,} steps records are drawn "
        f"at random, the gradient of each is clipped to length {settings['clip']:g}, and their sum "
        f"gets Gaussian noise of {settings['noise']:g} times that. So what leaves is protected for "
        "each single record, against everybody, the server included.",
        describe_epsilon(spent["epsilon"], spent["delta"], "this client that differ in one record"),
    ]
    if settings.get("entropy", "seed") == "seed":
        sentences.append(SEED)
    return sentences


def describe_central_privacy(settings: Mapping[str, Any], spent: Mapping[str, Any]) -> list[str]:
    """Sentences on what the server's noise promises.

    Args:
        settings: `central:` of the method.
        spent: epsilon, delta and releases (rounds) of the client that took part most often.
    """
    sentences = [
        "The server sees each client's update without noise, and must be trusted. It clips each to "
        f"length {settings['clip']:g} and adds Gaussian noise of {settings['noise']:g} times that "
        f"to their sum, in {spent['releases']:,} rounds. So the models that it sends on and "
        "publishes are protected, for this client's data as a whole; losses and metrics are not.",
        describe_epsilon(spent["epsilon"], spent["delta"], "this client"),
    ]
    if settings.get("entropy", "seed") == "seed":
        sentences.append(SEED)
    return sentences


def describe_epsilon(epsilon: float, delta: float, whose: str) -> str:
    """One paragraph on what an epsilon is worth."""
    verdict = next(text for limit, text in VERDICTS if epsilon <= limit)
    return (
        f"Together that is epsilon {epsilon:.3g} at delta {delta:g}: {verdict}. "
        f"{explain_epsilon(epsilon, whose)} With probability {delta:g} even that need not hold."
    )


def _sent_table(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Rows of what leaves; messages of one operation that differ in size only are one row."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for message in messages:
        if message["way"] == "up":
            name = message["operation"] + (" (alone)" if message.get("alone") else "")
            kinds.setdefault(name, []).append(message)
    rows: list[tuple[str, ...]] = [("message", "what leaves", "protection", "how often", "bytes")]
    for name, variants in kinds.items():
        largest = max(variants, key=lambda message: message["bytes"])
        times = 0
        total = 0
        rounds: set[int] = set()
        for message in variants:
            count = sum(message["rounds"].values())
            times += count
            total += count * message["bytes"]
            rounds |= message["rounds"].keys()
        purpose = largest["purpose"]
        measuring = " Only for measuring." if largest["measuring"] else ""
        often = f"{times:,} times in {len(rounds)} of the rounds" if times > 1 else "once"
        rows.append(
            (
                f"{name}: {purpose}{measuring}" if purpose else f"{name}.{measuring}",
                describe_contents(largest["holds"], largest["sends"]),
                describe_protection(largest["sends"], largest["protected"]),
                often,
                f"{total:,}",
            )
        )
    return rows


def describe_contents(holds: Sequence[Mapping[str, Any]], sends: Sends) -> str:
    """What a message holds, in plain words; tensors under one name are counted together.

    Args:
        holds: name, kind and shape of each value.
        sends: kinds that the operation declares.

    >>> weights = [{"name": f"parameters.{i}", "kind": "float32", "shape": [4, 2]} for i in "ab"]
    >>> loss = {"name": "loss", "kind": "float", "shape": []}
    >>> describe_contents([*weights, loss], {"parameters": "parameters"})
    'parameters (weights of the model): 16 numbers; loss: a number'
    """
    numbers: dict[str, int] = {}
    texts: dict[str, str] = {}
    for part in holds:
        name = part["name"].partition(".")[0]
        if part["kind"] == "nothing":
            continue
        if part["kind"] in ("str", "bool", "int", "float"):
            texts[name] = "a text" if part["kind"] == "str" else "a number"
        else:
            numbers[name] = numbers.get(name, 0) + math.prod(part["shape"])
            texts[name] = f"{numbers[name]:,} numbers"
    leaving = []
    for name, text in texts.items():
        kind = sends if isinstance(sends, str) else sends.get(name, "")
        title = name or "the answer"
        if kind in CONTENTS:
            title += f" ({CONTENTS[kind]})"
        leaving.append(f"{title}: {text}")
    return "; ".join(leaving) or "only that it is done"


def describe_protection(sends: Sends, protected: bool) -> str:
    """What happens to a reply before it leaves, from what its operation declares.

    >>> describe_protection({"parameters": "parameters"}, protected=True)
    'parameters: clipped, with noise; all else is withheld'
    """
    if not protected:
        return "none: it leaves as it is"
    if isinstance(sends, str):
        return PROTECTIONS[sends]
    names: dict[str, list[str]] = {}
    for name, kind in sends.items():
        names.setdefault(kind, []).append(name)
    texts = [f"{', '.join(fields)}: {PROTECTIONS[kind]}" for kind, fields in names.items()]
    return "; ".join([*texts, "all else is withheld" if texts else "all is withheld"])


def describe_privacy(
    privacy: Mapping[str, Any] | None, spent: Mapping[str, Any] | None
) -> list[str]:
    """Sentences on what the noise of a run promises one client, and what that is worth.

    Args:
        privacy: fields of `Privacy`; None: there is none.
        spent: epsilon, delta and releases of the client over the whole run.
    """
    if privacy is None or spent is None:
        return [
            "No noise is added (the scenario has no privacy). Nothing bounds what can be "
            "concluded from what leaves: epsilon is unbounded."
        ]
    noise, bound, delta = privacy["noise"], privacy["bound"], privacy["delta"]
    releases, epsilon = spent["releases"], spent["epsilon"]
    sentences = [
        f"What is protected is clipped to length {bound:g} and gets Gaussian noise of standard "
        f"deviation {noise * bound:g} (noise: {noise:g}). Over all rounds the data are used for "
        f"{releases:,} such releases.",
    ]
    if epsilon is None:
        sentences.append("Without noise nothing is promised: epsilon is unbounded.")
    else:
        sentences.append(describe_epsilon(epsilon, delta, "this client"))
        if epsilon > TARGET_EPSILON:
            enough = noise_for(TARGET_EPSILON, releases, delta)
            sentences.append(
                f"For epsilon {TARGET_EPSILON:g} with as many releases the noise would have to be "
                f"{enough:.3g}; fewer rounds or fewer public rows need less."
            )
    if privacy["entropy"] == "seed":
        sentences.append(SEED)
    return sentences


def explain_epsilon(epsilon: float, whose: str = "this client") -> str:
    """What an epsilon means: how sure an observer with two equally likely guesses can become.

    >>> explain_epsilon(1.0)[-47:]
    'can be at most 73.1 % sure after the whole run.'
    """
    certainty = 1 / (1 + math.exp(-epsilon))
    if certainty > 0.9999:
        return (
            f"Somebody who held two data sets of {whose} for equally likely may be sure which "
            "it was after the whole run (over 99.99 %)."
        )
    return (
        f"Somebody who held two data sets of {whose} for equally likely can be at most "
        f"{100 * certainty:.1f} % sure after the whole run."
    )


def _kept(audit: Mapping[str, Any]) -> list[str]:
    """What stays at a client, and exceptions, from the messages of this run."""
    tensors: set[str] = set()  # operations that answer with tensors
    measurements: set[str] = set()
    for details in audit["clients"].values():
        for message in details["messages"]:
            if message["way"] == "up" and any(part["shape"] for part in message["holds"]):
                tensors.add(message["operation"])
                if message["measuring"]:
                    measurements.add(message["operation"])
    sentences = [
        "Records: rows of training data and names of files, patients or customers are not among "
        "what the tables list.",
        "Everything else that is not in the tables above: they list all that was sent in the "
        "rehearsal.",
        "Texts of errors: between organisations the server gets an incident number; reason and "
        "traceback stay in the client's own log.",
        "Private keys, and the client's own records (audit.jsonl, privacy.jsonl, incidents.log).",
    ]
    if ":" in audit["algorithm"]:
        sentences.append(
            f"Be aware: {audit['algorithm']} is not a method of unalike. What its fields hold is "
            "up to its code; have it read."
        )
    if not tensors:
        sentences.append("The model: neither weights nor outputs are sent.")
    if measurements:
        sentences.append(
            f"Exception: {', '.join(sorted(measurements))} answers with numbers made from single "
            "records (features, for measuring). Between organisations no client answers that."
        )
    if audit["privacy"] is None and audit["sample"] is None:
        sentences.append(
            "Be aware: weights, representations and losses that leave without noise can still "
            "betray something of the records that they were made from."
        )
    return sentences


def _protection_table(audit: Mapping[str, Any]) -> list[tuple[str, ...]]:
    privacy = audit["privacy"]
    if privacy is None or not privacy["noise"]:
        server = "not protected beyond the tables above: no noise"
        others = server
    elif privacy["entropy"] == "seed":
        server = "not protected: it knows the seed of the noise"
        others = "by noise, as far as epsilon goes, if they do not know the seed"
    else:
        server = "by secret noise, as far as epsilon goes"
        others = server
    records = "only as parts of the whole data set, at the same epsilon"
    if audit["central"] is not None:
        others = "by the server's noise, as far as epsilon goes" + _except_seed(audit["central"])
        server = "not protected: it sees every update, and is trusted"
    if audit["sample"] is not None:
        records = "by noise in training, as far as epsilon goes" + _except_seed(audit["sample"])
    return [
        ("protected", "against", "how"),
        ("this client's data set", "the server", server),
        ("this client's data set", "other clients and readers of the models", others),
        ("single records", "anybody", records),
        (
            "the announcement, the time an answer takes",
            "the server",
            "not protected",
        ),
        (
            "messages on the network",
            "strangers",
            "by TLS and keys with the engines flare and flower; not in a simulation",
        ),
    ]


def _except_seed(settings: Mapping[str, Any]) -> str:
    if settings.get("entropy", "seed") == "seed":
        return "; not against whoever knows the seed, as server and clients do"
    return ""


def render_markdown(blocks: Sequence[Block]) -> str:
    """The page as Markdown."""
    parts = []
    for kind, content in blocks:
        if kind == "table":
            rows = [[_escape_markdown(cell) for cell in row] for row in content]
            lines = ["| " + " | ".join(row) + " |" for row in rows]
            lines.insert(1, "|" + "---|" * len(rows[0]))
            parts.append("\n".join(lines))
        elif kind == "list":
            parts.append("\n".join(f"- {_escape_markdown(item)}" for item in content))
        else:
            prefix = {"title": "# ", "heading": "## "}.get(kind, "")
            parts.append(prefix + _escape_markdown(content))
    return "\n\n".join(parts) + "\n"


def _escape_markdown(text: str) -> str:
    """Text that stays in its cell and line, and is shown as it is."""
    for sign in "\\|*_`<[":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())


def render_html(blocks: Sequence[Block]) -> str:
    """The page as one HTML file without anything from elsewhere."""
    tags = {"title": "h1", "heading": "h2", "text": "p"}
    parts = []
    for kind, content in blocks:
        if kind == "table":
            first, *rest = content
            rows = [_html_row("th", first)] if any(first) else []
            rows += [_html_row("td", row) for row in rest]
            parts.append(f"<table>{''.join(rows)}</table>")
        elif kind == "list":
            items = "".join(f"<li>{html.escape(item)}</li>" for item in content)
            parts.append(f"<ul>{items}</ul>")
        else:
            parts.append(f"<{tags[kind]}>{html.escape(content)}</{tags[kind]}>")
    title = html.escape(blocks[0].content)
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


def _html_row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"
