"""What there is to choose from, with a sentence each, or one kind of it with all there is to set. Reads the lists of the other rooms."""

import dataclasses
import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal, get_args, get_origin

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from unalike.algorithms import ALGORITHMS
from unalike.base.errors import UserError, unknown_name
from unalike.cli.benchmarks import benchmark_summaries
from unalike.data import DATASETS
from unalike.models import ENCODERS
from unalike.scenarios import load_mapping, shipped_scenarios

Rows = list[tuple[str, ...]]


def first(thing: Any) -> str:
    return (thing.__doc__ or "").strip().split("\n")[0]


KINDS: dict[str, Callable[[], dict[str, str]]] = {
    "scenarios": lambda: {
        name: load_mapping(name).get("summary", "") for name in shipped_scenarios()
    },
    "algorithms": lambda: {
        name: first(import_module(method.__module__)) for name, method in ALGORITHMS.items()
    },
    "datasets": lambda: {name: first(loader) for name, loader in DATASETS.items()},
    "models": lambda: {name: first(model) for name, model in ENCODERS.items()},
    "benches": benchmark_summaries,
}


def show(what: str | None = None, folder: str | None = None) -> None:
    """Everything there is; or all of one kind, with what can be set or asked of each. `folder` is where datasets lie."""
    if what is not None and what not in KINDS:
        raise UserError(unknown_name("kind of thing", what, KINDS))
    console = Console()
    if what is not None and what in DETAILS:
        for name, sentence in KINDS[what]().items():
            console.print(name, style="cyan")
            console.print(
                Padding(Text(sentence), (0, 2)),
                Padding(table(DETAILS[what](name, folder), "bold"), (0, 2, 1, 2)),
            )
        return
    for title in KINDS if what is None else [what]:
        console.print(f"[bold]{title}[/]")
        console.print(table(list(KINDS[title]().items()), "cyan"), "")
    if what is None:
        console.print(
            "More of each: unalike list algorithms (fields), datasets (targets, options), models (options).",
            highlight=False,
        )


def table(rows: Rows, style: str) -> Table:
    made = Table(box=None, show_header=False, padding=(0, 2))
    made.add_column(no_wrap=True, style=style)
    for row in rows:
        made.add_row(*map(Text, row))
    return made


def fields(name: str, folder: str | None) -> Rows:
    made = ALGORITHMS[name]()
    return [
        (f.name, said(getattr(made, f.name)), choices(f.type)) for f in dataclasses.fields(made)
    ] or [("nothing to set",)]


def options(name: str, folder: str | None) -> Rows:
    return asked(ENCODERS[name], "shape")


def targets(name: str, folder: str | None) -> Rows:
    """The targets a client can have, the modalities, and the options; a dataset whose file is not here says what it needs."""
    settable = [(f"options.{row[0]}", *row[1:]) for row in asked(DATASETS[name], "folder")]
    try:
        made = DATASETS[name](folder)
    except ValueError as error:
        return [*settable, ("", str(error))]
    rows: Rows = [
        (target, f"{task.name}, {len(task.labels)} labels") for target, task in made.tasks.items()
    ]
    if isinstance(made.x, dict):
        rows.append(("modalities", ", ".join(made.x)))
    return rows + settable


def asked(maker: Callable[..., Any], given: str) -> Rows:
    """What a maker may be told besides what it is given: name, default, choices."""
    known = [p for p in inspect.signature(maker).parameters.values() if p.name != given]
    return [
        (p.name, "" if p.default is p.empty else said(p.default), choices(p.annotation))
        for p in known
    ]


DETAILS: dict[str, Callable[[str, str | None], Rows]] = {
    "algorithms": fields,
    "datasets": targets,
    "models": options,
}


def said(default: Any) -> str:
    """A default as a scenario would write it."""
    if default is None or isinstance(default, bool):
        return {None: "null", True: "true", False: "false"}[default]
    return str(list(default) if isinstance(default, tuple) else default)


def choices(kind: Any) -> str:
    """The words a field may be; a number tells itself by its default."""
    if get_origin(kind) is Literal:
        return ", ".join(map(str, get_args(kind)))
    return "".join(f"or {words}" for part in get_args(kind) if (words := choices(part)))
