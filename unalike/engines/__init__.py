"""Engines carry calls between the server and the clients. This file lists them.

To add one, write its class (contract: `unalike.core.engine`) and add a line to `ENGINES`.
"""

import inspect
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from unalike.base.errors import UserError, unknown_name

# name: (module:class, the package it needs)
ENGINES: dict[str, tuple[str, str | None]] = {
    "local": ("unalike.engines.local:LocalEngine", None),
    "ray": ("unalike.engines.ray:RayEngine", "ray"),
    "flare": ("unalike.cross_silo.flare:FlareEngine", "nvflare"),
    "flower": ("unalike.cross_silo.flower:FlowerEngine", "flwr"),
}


def engine_class(name: str) -> Any:
    """Import the class of an engine, a `HostingEngine` or a `RemoteLauncher`.

    Raises: UserError for a name that is not listed, or where the engine's package is missing.
    """
    if name not in ENGINES:
        raise UserError(unknown_name("engine", name, ENGINES))
    path, package = ENGINES[name]
    if package is not None and find_spec(package) is None:
        raise UserError(
            f'the engine {name} needs the package {package}: pip install "unalike[{name}]"'
        )
    module, _, class_name = path.partition(":")
    return getattr(import_module(module), class_name)


def engine_options(name: str) -> dict[str, Any]:
    """Options a user may set, with their types: keyword-only arguments of the constructor."""
    parameters = inspect.signature(engine_class(name)).parameters.values()
    return {p.name: p.annotation for p in parameters if p.kind is p.KEYWORD_ONLY}


def hosts_clients(name: Any) -> bool:
    """Whether a scenario for the engine of this name must describe the clients.

    Not where organisations bring their own. True for a name that is not listed. Where the engine's
    package is missing nobody can tell, and False keeps from asking for clients in vain.
    """
    if not isinstance(name, str) or name not in ENGINES:
        return True
    try:
        return engine_class(name).hosts_clients
    except UserError:
        return False


def has_slow_messages(name: Any) -> bool:
    """Whether a message takes seconds on the engine of this name, so that few are better.

    False for a name that is not listed, and where the engine's package is missing.
    """
    if not isinstance(name, str) or name not in ENGINES:
        return False
    try:
        return getattr(engine_class(name), "slow_messages", False)
    except UserError:
        return False
