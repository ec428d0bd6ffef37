"""Finds the benchmarks of a checkout: they are beside the package and not installed with it."""

import os
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from unalike.base.errors import UserError

FOLDER = "benchmarks"


def benchmark_module(name: str = "") -> ModuleType:
    """Import the package `benchmarks`, or a module of it.

    It is looked for in the checkout of this package and in the current folder.
    Raises: UserError, if it is in neither.
    """
    for root in (Path(__file__).parents[2], Path.cwd()):
        if (root / FOLDER / "study.py").is_file():
            if str(root) not in sys.path:
                sys.path.insert(0, str(root))
            path = [str(root), os.environ.get("PYTHONPATH", "")]
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))  # for other processes
            return import_module(f"{FOLDER}.{name}" if name else FOLDER)
    raise UserError(
        "benchmarks are in the repository, not in the installed package: "
        "clone it and call `unalike bench` there"
    )


def benchmark_summaries() -> dict[str, str]:
    """The first line of each benchmark's docstring, by name; empty outside a checkout."""
    try:
        benchmarks = benchmark_module().load_benchmarks()
    except UserError:
        return {}
    return {
        name: (function.__doc__ or "").strip().split("\n")[0]
        for name, function in benchmarks.items()
    }
