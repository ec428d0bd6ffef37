"""What carries calls between server and clients: the list of engines. Knows messages, never an algorithm."""

import inspect
from importlib import import_module
from typing import Any

from unalike.errors import UserError, unknown

ENGINES = {"local": "LocalEngine", "ray": "RayEngine"}      # each in the file of its name


def engine(name: str) -> Any:
    """The class of an engine; its libraries are imported when it is made."""
    if name not in ENGINES:
        raise UserError(unknown("engine", name, ENGINES))
    return getattr(import_module(f"unalike.engines.{name}"), ENGINES[name])


def options(name: str) -> dict[str, Any]:
    """What a user may set of it, with types: its keyword-only arguments."""
    arguments = inspect.signature(engine(name)).parameters.values()
    return {a.name: a.annotation for a in arguments if a.kind is a.KEYWORD_ONLY}
