"""What carries calls between server and clients: the list of engines. Knows messages, never an algorithm."""

import inspect
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from unalike.base.errors import UserError, unknown_name

# where its class is, and the package it needs
ENGINES = {
    "local": ("engines.local:LocalEngine", None),
    "ray": ("engines.ray:RayEngine", "ray"),
    "flare": ("cross_silo.flare:FlareEngine", "nvflare"),
    "flower": ("cross_silo.flower:FlowerEngine", "flwr"),
}
BETWEEN = ("flare", "flower")  # those between organisations, who bring their own clients


def engine(name: str) -> Any:
    """The class of an engine; its package is imported when it is made."""
    if name not in ENGINES:
        raise UserError(unknown_name("engine", name, ENGINES))
    made, needs = ENGINES[name]
    if needs is not None and find_spec(needs) is None:
        raise UserError(
            f'the engine {name} needs the package {needs}: pip install "unalike[{name}]"'
        )
    file, _, kind = made.partition(":")
    return getattr(import_module(f"unalike.{file}"), kind)


def options(name: str) -> dict[str, Any]:
    """What a user may set of it, with types: its keyword-only arguments."""
    arguments = inspect.signature(engine(name)).parameters.values()
    return {a.name: a.annotation for a in arguments if a.kind is a.KEYWORD_ONLY}
