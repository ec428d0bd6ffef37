"""What besides the settings decides the last bits of a run: code, versions, threads, processor."""

import hashlib
import platform
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch

from unalike.base.version import __version__

Environment = dict[str, Any]


def environment(threads: int) -> Environment:
    """Versions of this code and of what it computes with.

    Args:
        threads: of this process; sums over several threads end in other bits.
    """
    return {
        "unalike": __version__,
        "code": hash_of_the_code(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "threads": threads,
    }


@cache
def hash_of_the_code(root: Path = Path(__file__).parents[1]) -> str:
    """Hash all source files, so that values measured by other code are never taken for ours.

    Args:
        root: the folder they are in, by default this package's.
    """
    out = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        out.update(str(path.relative_to(root)).encode())
        out.update(path.read_bytes())
    return out.hexdigest()[:16]


def describe_changes(before: Environment, now: Environment) -> str:
    """What differs between two environments, in words; empty where nothing does.

    >>> describe_changes({"torch": "2.5", "threads": 1}, {"torch": "2.6", "threads": 1})
    'torch was 2.5, is 2.6'
    """
    changes = []
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            changes.append(f"{name} was {before.get(name)}, is {now.get(name)}")
    return ", ".join(changes)
