"""What a name stands for: a part that is shipped, one of an installed package, or `module:name`.

A package announces its parts as entry points in the groups `unalike.algorithms`,
`unalike.datasets`, `unalike.models` and `unalike.tasks`.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

from unalike.base.errors import UserError, describe_error, unknown_name

Part = TypeVar("Part")
# The folder whose settings may not name code to import, inside `without_imports`.
_untrusted: ContextVar[str | None] = ContextVar("untrusted", default=None)
OWN_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")  # module:name


def find_named(kind: str, name: str, shipped: Mapping[str, Part]) -> Part:
    """The part that a name stands for.

    Args:
        kind: "algorithm", "dataset", "model", "task", "partition", "loss" or "metric".
        name: a shipped or installed name, or `module:name`.
        shipped: the parts that come with this package, by name.
    Raises: UserError where there is none, or it cannot be imported.

    >>> find_named("metric", "math:sqrt", {})(9)
    3.0
    """
    if name in shipped:
        return shipped[name]
    if is_own_name(name):
        return import_object(name)
    installed = installed_parts(kind)
    if name not in installed:
        names = unknown_name(kind, name, [*shipped, *installed])
        raise UserError(f"{names} One of your own is written module:name.")
    point = installed[name]
    try:
        return point.load()
    except Exception as error:  # a package may fail in any way when it is imported
        raise UserError(
            f"the {kind} {name} of {describe_package(point)} cannot be imported: "
            f"{describe_import_error(error)}"
        ) from error


def name_problem(kind: str, name: str, shipped: Mapping[str, Any]) -> str | None:
    """Why a name stands for nothing, in a sentence; None if it does."""
    try:
        find_named(kind, name, shipped)
    except UserError as error:
        return str(error)
    return None


def installed_parts(kind: str) -> dict[str, EntryPoint]:
    """The parts of that kind that installed packages announce, by name; not yet imported."""
    return _read_entry_points(f"unalike.{kind}s", tuple(sys.path))


@lru_cache(maxsize=32)
def _read_entry_points(group: str, _path: tuple[str, ...]) -> dict[str, EntryPoint]:
    """Reading all packages' metadata takes a while; once for each search path is enough."""
    return {point.name: point for point in entry_points(group=group)}


def describe_package(point: EntryPoint) -> str:
    """The package of an entry point and its version, as far as they are known."""
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.value


def describe_import_error(error: BaseException) -> str:
    """What went wrong, with the kind of error in front where the text alone says too little."""
    if isinstance(error, ImportError | UserError):
        return str(error)
    return f"{type(error).__name__}: {describe_error(error)}"


def is_own_name(name: object) -> bool:
    """Whether a name has the form `module:name`.

    >>> is_own_name("papers.fedx:FedX"), is_own_name("fedavg")
    (True, False)
    """
    return isinstance(name, str) and OWN_NAME.fullmatch(name) is not None


def own_names(value: Any) -> list[str]:
    """All texts of the form `module:name` in a mapping or list, at any depth."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        names: list[str] = []
        for item in value:
            names += own_names(item)
        return names
    return [value] if is_own_name(value) else []


@contextmanager
def without_imports(source: str | Path, trust: bool = False) -> Iterator[None]:
    """Refuse to import what settings name as `module:name`: inside, a UserError is raised.

    For folders that somebody else may have sent: reading a model runs none of their code.

    Args:
        source: the folder, for the message.
        trust: the user has said that its code may run.
    """
    token = _untrusted.set(None if trust else str(source))
    try:
        yield
    finally:
        _untrusted.reset(token)


def import_object(name: str) -> Any:
    """Import what `module:name` names.

    Raises: UserError, if there is no such module or name, or inside `without_imports`. An
    exception inside the module is a bug of its author and arrives as it is.
    """
    source = _untrusted.get()
    if source is not None:
        raise UserError(
            f"{source} names code to import, {name}, and nothing of it was run. If you know who "
            "wrote it and what it does, say so: --trust, from Python trust=True"
        )
    module, _, attributes = name.partition(":")
    try:
        thing: Any = import_module(module)
    except (ImportError, ValueError) as error:
        raise UserError(
            f"{name} cannot be imported: {error}; write module:name, with the module beside this "
            "file, in the current folder or installed"
        ) from None
    for attribute in attributes.split("."):
        if not hasattr(thing, attribute):
            known = [key for key in vars(thing) if not key.startswith("_")] if vars(thing) else []
            raise UserError(
                f"{name} cannot be imported: " + unknown_name("name", attribute, known)
            ) from None
        thing = getattr(thing, attribute)
    return thing


def add_module_folder(folder: str | Path) -> None:
    """Let modules in a folder be imported, before others of the same name."""
    path = str(Path(folder).resolve())
    if path not in sys.path and _untrusted.get() is None:
        sys.path.insert(0, path)
