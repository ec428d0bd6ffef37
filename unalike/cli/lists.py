"""Lists scenarios, algorithms, datasets, models and benchmarks, with one sentence each.

A list of one kind also shows what can be set: fields, targets, options, with their defaults.
"""

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
from unalike.base.registry import describe_package, find_named, installed_parts
from unalike.cli.benchmarks import benchmark_summaries
from unalike.data import DATASETS, load_dataset
from unalike.models import ENCODERS
from unalike.scenarios import load_mapping, shipped_scenarios
from unalike.tasks import TASKS

Rows = list[tuple[str, ...]]
BROKEN = "broken: "  # before what is wrong with a part of an installed package


def show(kind: str | None = None, folder: str | None = None) -> None:
    """Print all lists, or the list of one kind with details.

    Args:
        folder: where datasets are.
    Raises: UserError, if there is no such kind.
    """
    if kind is not None and kind not in SUMMARIES:
        raise UserError(unknown_name("kind of thing", kind, SUMMARIES))
    console = Console()
    if kind is not None and kind in DETAILS:
        for name, summary in SUMMARIES[kind]().items():
            console.print(name, style="cyan")
            broken = summary.startswith(BROKEN)
            details = _table([] if broken else DETAILS[kind](name, folder), "bold")
            console.print(Padding(Text(summary), (0, 2)), Padding(details, (0, 2, 1, 2)))
        return
    for title in [kind] if kind else SUMMARIES:
        console.print(f"[bold]{title}[/]")
        console.print(_table(list(SUMMARIES[title]().items()), "cyan"), "")
    if kind is None:
        console.print(
            "For details: unalike list algorithms (fields), datasets (targets, options), "
            "models (options).",
            highlight=False,
        )


def _table(rows: Rows, style: str) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2))
    table.add_column(no_wrap=True, style=style)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def summarize_scenarios() -> dict[str, str]:
    """The summary of each shipped scenario."""
    return {name: load_mapping(name).get("summary", "") for name in shipped_scenarios()}


def summarize_algorithms() -> dict[str, str]:
    """The first line of the file of each algorithm."""
    lines = {
        name: _first_line(import_module(method.__module__)) for name, method in ALGORITHMS.items()
    }
    return lines | _summarize_installed("algorithm")


def summarize_datasets() -> dict[str, str]:
    """The first line of the docstring of each dataset's loader."""
    lines = {name: _first_line(loader) for name, loader in DATASETS.items()}
    return lines | _summarize_installed("dataset")


def summarize_models() -> dict[str, str]:
    """The first line of the docstring of each model."""
    lines = {name: _first_line(model) for name, model in ENCODERS.items()}
    return lines | _summarize_installed("model")


def summarize_tasks() -> dict[str, str]:
    """The first line of the file of each task."""
    lines = {name: _first_line(import_module(task.__module__)) for name, task in TASKS.items()}
    return lines | _summarize_installed("task")


def _summarize_installed(kind: str) -> dict[str, str]:
    """The first line of the docstring of each part of an installed package, or what is wrong."""
    lines = {}
    for name, point in installed_parts(kind).items():
        try:
            part: Any = find_named(kind, name, {})
            lines[name] = f"{_first_line(part)} ({describe_package(point)})"
        except UserError as error:
            lines[name] = f"{BROKEN}{error}"
    return lines


def _first_line(documented: Any) -> str:
    return (documented.__doc__ or "").strip().split("\n")[0]


def algorithm_fields(name: str, folder: str | None) -> Rows:
    """Fields of an algorithm: name, default, choices."""
    algorithm = find_named("algorithm", name, ALGORITHMS)()
    rows: Rows = []
    for field in dataclasses.fields(algorithm):
        default = format_default(getattr(algorithm, field.name))
        rows.append((field.name, default, format_choices(field.type)))
    return rows or [("nothing to set",)]


def model_options(name: str, folder: str | None) -> Rows:
    """Options of a model: name, default, choices."""
    return _parameters(find_named("model", name, ENCODERS), "shape")


def dataset_details(name: str, folder: str | None) -> Rows:
    """Targets, modalities and options of a dataset; if its files are missing, what it needs."""
    options = _parameters(find_named("dataset", name, DATASETS), "folder")
    option_rows = [(f"options.{option}", *columns) for option, *columns in options]
    try:
        table = load_dataset(name, folder)
    except ValueError as error:
        return [*option_rows, ("", str(error))]
    rows: Rows = []
    for target, task in table.tasks.items():
        rows.append((target, f"{task.name}, {len(task.labels)} labels"))
    if isinstance(table.x, dict):
        rows.append(("modalities", ", ".join(table.x)))
    return rows + option_rows


def _parameters(function: Callable[..., Any], excluded: str) -> Rows:
    """Parameters of a function but one: name, default, choices."""
    rows: Rows = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name != excluded:
            required = parameter.default is parameter.empty
            default = "" if required else format_default(parameter.default)
            rows.append((parameter.name, default, format_choices(parameter.annotation)))
    return rows


def format_default(default: Any) -> str:
    """A default as it is written in a scenario.

    >>> format_default(None), format_default(True), format_default((1, 2))
    ('null', 'true', '[1, 2]')
    """
    if default is None:
        return "null"
    if isinstance(default, bool):
        return "true" if default else "false"
    return str(list(default) if isinstance(default, tuple) else default)


def format_choices(kind: Any) -> str:
    """The words that a field of a type may be; empty if it takes none.

    >>> format_choices(Literal["a", "b"]), format_choices(float | Literal["auto"])
    ('a, b', 'or auto')
    """
    if get_origin(kind) is Literal:
        return ", ".join(map(str, get_args(kind)))
    choices = [format_choices(part) for part in get_args(kind)]
    return "".join(f"or {words}" for words in choices if words)


SUMMARIES: dict[str, Callable[[], dict[str, str]]] = {
    "scenarios": summarize_scenarios,
    "algorithms": summarize_algorithms,
    "datasets": summarize_datasets,
    "models": summarize_models,
    "tasks": summarize_tasks,
    "benches": benchmark_summaries,
}

# Functions of a name and the datasets' folder, for kinds with details.
DETAILS: dict[str, Callable[[str, str | None], Rows]] = {
    "algorithms": algorithm_fields,
    "datasets": dataset_details,
    "models": model_options,
}
