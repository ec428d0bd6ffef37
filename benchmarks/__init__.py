"""Benchmarks: every number in docs/results.md is made by one of these. Not part of the installed package.

`unalike bench NAME` runs one. A file per method registers its benchmarks with `@benchmark("name")`.
"""

from collections.abc import Callable
from importlib import import_module

from benchmarks.study import BENCHMARKS

MODULES = (
    "afmcc",
    "attacks",
    "baselines",
    "creamfl",
    "digits",
    "engines",
    "evidence",
    "faults",
    "fedmpt",
    "fedmuscle",
    "muscle_dependence",
    "muscle_digits",
    "muscle_printed",
    "muscle_prospects",
    "muscle_rank",
    "fednca",
    "flare",
    "hetlora",
    "language",
    "leaderboard",
    "people",
    "recording",
    "speed",
    "strangers",
    "subflot",
    "tracking",
)


def load_benchmarks() -> dict[str, Callable[..., dict]]:
    """Import every file and return its benchmarks by name."""
    for module in MODULES:
        import_module(f"benchmarks.{module}")
    return dict(sorted(BENCHMARKS.items()))
