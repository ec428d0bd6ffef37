"""Scenarios: who takes part, with what, and with what budget. Shipped ones are the YAML files beside this one."""

from copy import copy
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from unalike.base.errors import UserError, unknown_name
from unalike.core.algorithm import Algorithm
from unalike.core.privacy import Privacy
from unalike.scenarios.reading import Rest, read
from unalike.scenarios.schema import Data, Group, Public, Scenario


def shipped() -> list[str]:
    return sorted(
        p.name.removesuffix(".yaml")
        for p in resources.files(__package__).iterdir()
        if p.name.endswith(".yaml")
    )


def raw(name: str) -> dict[str, Any]:
    """The mapping in a shipped scenario or in a file."""
    if name in shipped():
        text = resources.files(__package__).joinpath(f"{name}.yaml").read_text("utf-8")
    elif (path := Path(name)).suffix in (".yaml", ".yml") or path.exists():
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            raise UserError(
                f"the scenario file {path} cannot be read: it is no text in UTF-8"
            ) from None
        except OSError as error:
            raise UserError(
                f"the scenario file {path} cannot be read: {error.strerror or error}"
            ) from None
    else:
        raise UserError(
            unknown_name("scenario", name, shipped()) + " A file of your own ends in .yaml."
        )
    told = parse(text, name)
    if not isinstance(told, dict):
        got = "empty" if told is None else f"a {type(told).__name__}"
        raise UserError(
            f"{name} is no scenario: that is a mapping of names to values, this is {got}"
        )
    if told.get("python"):
        raise UserError(
            f"{name} is of a run started from Python, with clients that only that program can make; run it there"
        )
    return told


class Loader(yaml.SafeLoader):
    """YAML whose names are text (not `on` for true), and without the freedom to say a thing twice, of which only the last would count."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        said = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in said:
                    raise yaml.MarkedYAMLError(
                        problem=f'"{key.value}" is there twice', problem_mark=key.start_mark
                    )
                said.add(key.value)
                if key.tag != "tag:yaml.org,2002:merge":
                    key.tag = "tag:yaml.org,2002:str"
        return super().construct_mapping(node, deep)


def parse(text: str, source: str) -> Any:
    """What a text in YAML says."""
    try:
        return yaml.load(text, Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{source}{at}: {error.problem or error.context}") from None
    except yaml.YAMLError:
        raise UserError(f"{source} is no YAML: it has characters that are no text") from None
    except RecursionError:
        raise UserError(f"{source} is no scenario: it is nested too deep") from None
    except ValueError as error:  # a date such as 2026-99-99
        raise UserError(f"{source} is no YAML: {error}") from None


def load(
    name: str,
    algorithm: str | None = None,
    settings: list[str] | None = None,
    rest: Rest | None = None,
    told: dict[str, Any] | None = None,
    **top: Any,
) -> tuple[Scenario, Algorithm]:
    """A scenario, or what was `told` under its name, with another algorithm, `key=value` settings and top-level fields (None: as it is) put
    in; for `rest` see `read`."""
    told = dict(told) if told is not None else raw(name)
    if algorithm is not None and (
        not isinstance(told.get("algorithm"), dict) or told["algorithm"].get("name") != algorithm
    ):
        told["algorithm"] = {"name": algorithm}
    if (engine := top.pop("engine", None)) is not None and engine != engine_name(
        told.get("engine")
    ):
        told["engine"] = {"name": engine}
    for key, value in top.items():
        if value is not None:
            told[key] = value
    for setting in settings or []:
        put(told, setting)
    if isinstance(told.get("engine"), str):
        told["engine"] = {"name": told["engine"]}
    method = algorithm_class(told)
    if method is not None:
        told["algorithm"] = method.for_engine(engine_name(told.get("engine")), told["algorithm"])
    return read(told, name, rest)


def put(told: dict[str, Any], setting: str) -> None:
    """Set one `key=value`: a dotted path, or a bare field of the algorithm or the training where only one of them has it."""
    key, equals, text = setting.partition("=")
    if not equals or not all(key.split(".")):
        raise UserError(f'--set takes key=value, got "{setting}"')
    try:
        value = yaml.load(text, Loader)
    except (yaml.YAMLError, RecursionError, ValueError):
        raise UserError(f"--set {key}: {text} is no YAML") from None
    at: Any = told
    *way, last = (
        key.split(".") if "." in key or key in Scenario.model_fields else [room(told, key), key]
    )
    if way[:1] == ["engine"] and not isinstance(told.get("engine"), dict):
        told["engine"] = {"name": engine_name(told.get("engine"))}
    for part in way:
        place = index(at, part, key)
        if isinstance(at, dict):
            at.setdefault(place, {})
        at[place] = copy(
            at[place]
        )  # two clients may be one thing in YAML (&name, *name); the other stays as it is
        at = at[place]
    at[index(at, last, key)] = value


def room(told: dict[str, Any], key: str) -> str:
    """The part of a scenario that has a bare field."""
    from unalike.core.participation import FederationConfig
    from unalike.training.loop import Training

    method = algorithm_class(told)
    rooms = {
        "algorithm": [f.name for f in fields(method)] if method else [],
        "training": list(Training.model_fields),
        "federation": list(FederationConfig.model_fields),
    }
    if (new := Training.RENAMED.get(key)) is not None:
        other = f", or algorithm.{key}" if key in rooms["algorithm"] else ""
        raise UserError(f"--set {key}: training.{key} is called {new} now; write {new}{other}")
    if method is not None and key in method.RENAMED:
        new = method.RENAMED[key]
        raise UserError(f"--set {key}: algorithm.{key} is called {new} now; write {new}")
    found = [name for name, its in rooms.items() if key in its]
    if len(found) > 1:
        raise UserError(
            f"--set {key}: both {' and '.join(found)} have it; write {' or '.join(f'{r}.{key}' for r in found)}"
        )
    if not found and (owners := [owner for owner, its in PARTS.items() if key in its]):
        raise UserError(f"--set {key}: {elsewhere(told, owners[0], key)}")
    if not found:
        raise UserError(
            f"--set {key}: "
            + unknown_name(
                "field", key, [*Scenario.model_fields, *(n for its in rooms.values() for n in its)]
            )
        )
    return found[0]


def algorithm_class(told: dict[str, Any]) -> type[Algorithm] | None:
    """The class of the algorithm that a scenario names; None where it names none that exists."""
    from unalike.algorithms import ALGORITHMS

    named = told.get("algorithm")
    return ALGORITHMS.get(str(named.get("name"))) if isinstance(named, dict) else None


PARTS = {
    "clients": Group.model_fields,
    "public": Public.model_fields,
    "privacy": Privacy.model_fields,
    "data": Data.model_fields,
}


def elsewhere(told: dict[str, Any], owner: str, key: str) -> str:
    """How to write a field of a part whose fields need its name before them."""
    if owner != "clients":
        return f"{owner} has it; write {owner}.{key}"
    ids = [group.get("id") for group in told.get("clients") or [] if isinstance(group, dict)]
    return f"a client has it; write clients.0.{key}" + (
        f" or clients.{ids[0]}.{key}" if ids else ""
    )


def index(at: Any, part: str, key: str) -> str | int:
    """Where a part of a dotted path is: a name, a place in a list, or the place of the client with that id."""
    if isinstance(at, dict):
        return part
    if isinstance(at, list):
        ids = [str(item.get("id")) if isinstance(item, dict) else "" for item in at]
        if part.isdigit() and int(part) < len(at):
            return int(part)
        if part in ids:
            return ids.index(part)
        if any(ids) and not part.isdigit():
            raise UserError(f"--set {key}: " + unknown_name("client", part, ids))
    raise UserError(f'--set {key}: there is nothing at "{part}"')


def engine_name(engine: Any) -> Any:
    """The name in what a scenario says of its engine: a name, or a mapping with its options."""
    return engine.get("name") if isinstance(engine, dict) else engine or "local"


__all__ = ["Scenario", "load", "raw", "read", "shipped"]
