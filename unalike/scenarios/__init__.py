"""Scenarios: who takes part, with what, and with what budget. Shipped ones are the YAML files beside this one."""

from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from unalike.algorithm import Algorithm
from unalike.errors import Problems, UserError, unknown
from unalike.scenarios.schema import Scenario, read


def shipped() -> list[str]:
    return sorted(p.name.removesuffix(".yaml") for p in resources.files(__package__).iterdir() if p.name.endswith(".yaml"))


def raw(name: str) -> dict[str, Any]:
    """The mapping in a shipped scenario or in a file."""
    if name in shipped():
        text, source = resources.files(__package__).joinpath(f"{name}.yaml").read_text(), name
    elif (path := Path(name)).suffix in (".yaml", ".yml") or path.exists():
        try:
            text, source = path.read_text(), str(path)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"the scenario file {path} cannot be read: {error}") from None
    else:
        raise UserError(unknown("scenario", name, shipped()) + " A file of your own ends in .yaml.")
    try:
        told = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise Problems(source, [("", f"is no YAML: {error}")]) from None
    if not isinstance(told, dict):
        raise Problems(source, [("", f"a scenario is a mapping of names to values, got {type(told).__name__}")])
    return told


def load(name: str, algorithm: str | None = None, settings: list[str] | None = None, **top: Any) -> tuple[Scenario, Algorithm]:
    """A scenario with another algorithm, `key=value` settings and top-level fields (None: as it is) put in."""
    told = raw(name)
    if algorithm is not None and (not isinstance(told.get("algorithm"), dict) or told["algorithm"].get("name") != algorithm):
        told["algorithm"] = {"name": algorithm}
    for key, value in top.items():
        if value is not None:
            told[key] = value
    for setting in settings or []:
        put(told, setting)
    return read(told, name)


def put(told: dict[str, Any], setting: str) -> None:
    """Set one `key=value`: a dotted path, or a bare field of the algorithm or the training where only one of them has it."""
    from dataclasses import fields

    from unalike.algorithms import ALGORITHMS
    from unalike.federation import Terms
    from unalike.training import Training
    key, equals, text = setting.partition("=")
    if not equals or not key:
        raise UserError(f'--set takes key=value, got "{setting}"')
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise UserError(f"--set {key}: {text} is no YAML") from None
    path = key.split(".")
    if len(path) == 1 and key not in Scenario.model_fields:
        named = told.get("algorithm")
        method = ALGORITHMS.get(str(named.get("name"))) if isinstance(named, dict) else None
        rooms = {"algorithm": [f.name for f in fields(method)] if method else [], "training": list(Training.model_fields),
                 "federation": list(Terms.model_fields)}
        found = [room for room, names in rooms.items() if key in names]
        if len(found) > 1:
            raise UserError(f'--set {key}: both {" and ".join(found)} have it; write {" or ".join(f"{r}.{key}" for r in found)}')
        if not found:
            raise UserError(f"--set {key}: " + unknown("field", key, [n for names in rooms.values() for n in names]))
        path = [found[0], key]
    at: Any = told
    for part in path[:-1]:
        if isinstance(at, list) and part.isdigit() and int(part) < len(at):
            at = at[int(part)]
        elif isinstance(at, dict):
            at = at.setdefault(part, {})
        else:
            raise UserError(f'--set {key}: there is nothing at "{part}"')
    if isinstance(at, list) and path[-1].isdigit() and int(path[-1]) < len(at):
        at[int(path[-1])] = value
    elif isinstance(at, dict):
        at[path[-1]] = value
    else:
        raise UserError(f'--set {key}: there is nothing at "{path[-1]}"')


__all__ = ["Scenario", "load", "raw", "read", "shipped"]
