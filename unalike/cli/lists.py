"""What there is to choose from, with a sentence each. Reads the lists of the other rooms."""

import pkgutil
from importlib import import_module

from rich.console import Console
from rich.table import Table

from unalike import benches
from unalike.algorithms import ALGORITHMS
from unalike.data import DATASETS
from unalike.models import ENCODERS
from unalike.scenarios import raw, shipped


def show() -> None:
    console = Console()
    first = lambda thing: (thing.__doc__ or "").strip().split("\n")[0]
    bench_docs = {name: first(import_module(f"unalike.benches.{name}")) for name in bench_names()}
    for title, rows in {
        "scenarios": {name: raw(name).get("summary", "") for name in shipped()},
        "algorithms": {name: first(import_module(method.__module__)) for name, method in ALGORITHMS.items()},
        "datasets": {name: first(loader) for name, loader in DATASETS.items()},
        "models": {name: first(model) for name, model in ENCODERS.items()},
        "benches": bench_docs,
    }.items():
        table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False, padding=(0, 2))
        table.add_column(no_wrap=True, style="cyan")
        table.add_column(overflow="fold")
        for name, sentence in rows.items():
            table.add_row(name, sentence)
        console.print(table, "")


def bench_names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(benches.__path__))
