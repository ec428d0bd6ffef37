"""Reads scenario files, applies overrides such as `--set rounds=5`, and validates the result."""

from copy import copy
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from unalike.base.errors import UserError, unknown_name
from unalike.base.registry import add_module_folder, own_names
from unalike.base.yaml_text import construct_yaml
from unalike.core.algorithm import Algorithm
from unalike.core.participation import FederationConfig
from unalike.core.privacy import Privacy
from unalike.engines import has_slow_messages
from unalike.scenarios.schema import Data, Group, Public, Scenario
from unalike.scenarios.validate import BuildCheck, find_algorithm, parse_scenario
from unalike.training.loop import Training

# Parts of a scenario whose fields `--set` accepts only with the part's name before them.
QUALIFIED_PARTS = {
    "clients": Group.model_fields,
    "public": Public.model_fields,
    "privacy": Privacy.model_fields,
    "data": Data.model_fields,
}


def shipped_scenarios() -> list[str]:
    """Names of the scenarios that come with the package."""
    files = [file.name for file in resources.files(__package__).iterdir()]
    return sorted(name.removesuffix(".yaml") for name in files if name.endswith(".yaml"))


def load_mapping(name: str) -> dict[str, Any]:
    """The mapping in a shipped scenario or in a YAML file.

    Raises: UserError, if there is none of that name, or the file is not a scenario.
    """
    mapping = parse_yaml(_read_text(name), name)
    if not isinstance(mapping, dict):
        kind = "empty" if mapping is None else f"a {type(mapping).__name__}"
        raise UserError(
            f"{name} is not a scenario: expected a mapping of names to values, it is {kind}"
        )
    if mapping.get("python"):
        raise UserError(
            f"{name} belongs to a run started from Python, whose clients only that program can "
            "create; run it there"
        )
    return mapping


def _read_text(name: str) -> str:
    if name in shipped_scenarios():
        return resources.files(__package__).joinpath(f"{name}.yaml").read_text("utf-8")
    path = Path(name)
    if path.suffix not in (".yaml", ".yml") and not path.exists():
        names = unknown_name("scenario", name, shipped_scenarios())
        raise UserError(f"{names} A file of your own ends in .yaml.")
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError:
        cause = "it is not text in UTF-8"
    except OSError as error:
        cause = error.strerror or str(error)
    raise UserError(f"the scenario file {path} cannot be read: {cause}")


class Loader(yaml.SafeLoader):
    """YAML whose keys are text (`on` is not true) and must not be repeated in a mapping.

    Standard YAML silently keeps the last of repeated keys.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in keys:
                raise yaml.MarkedYAMLError(
                    problem=f'the key "{key.value}" occurs twice', problem_mark=key.start_mark
                )
            keys.add(key.value)
            if key.tag != "tag:yaml.org,2002:merge":
                key.tag = "tag:yaml.org,2002:str"
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, source: str) -> Any:
    """The value of a YAML text.

    Args:
        source: the file's name, for error messages.
    Raises: UserError, with line and column where they are known.
    """
    try:
        return construct_yaml(text, Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        position = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{source}{position}: {error.problem or error.context}") from None
    except yaml.YAMLError:
        raise UserError(
            f"{source} is not YAML: it has characters that are not allowed in text"
        ) from None


def load(
    name: str,
    algorithm: str | None = None,
    settings: list[str] | None = None,
    build_check: BuildCheck | None = None,
    mapping: dict[str, Any] | None = None,
    **top_level: Any,
) -> tuple[Scenario, Algorithm]:
    """Load and validate a scenario.

    Args:
        name: a shipped scenario, or the path of a YAML file.
        algorithm: another method than the scenario's.
        settings: `key=value` overrides, as of `--set`.
        build_check: see `parse_scenario`.
        mapping: the scenario itself, if it is not to be read from `name`.
        top_level: top-level fields to replace; None leaves one as it is.
    Raises: UserError, or Problems with everything that is wrong with the scenario.
    """
    mapping = dict(mapping) if mapping is not None else load_mapping(name)
    described = mapping.get("algorithm")
    current = described.get("name") if isinstance(described, dict) else None
    if algorithm is not None and algorithm != current:
        mapping["algorithm"] = {"name": algorithm}
    engine = top_level.pop("engine", None)
    if engine is not None and engine != _engine_name(mapping.get("engine")):
        mapping["engine"] = {"name": engine}
    for key, value in top_level.items():
        if value is not None:
            mapping[key] = value
    _add_module_folders(mapping, name)
    for setting in settings or []:
        apply_setting(mapping, setting)
    _add_module_folders(mapping, name)
    if isinstance(mapping.get("engine"), str):
        mapping["engine"] = {"name": mapping["engine"]}
    method = _method(mapping)
    if method is not None:
        slow_messages = has_slow_messages(_engine_name(mapping.get("engine")))
        mapping["algorithm"] = method.for_engine(mapping["algorithm"], slow_messages)
    return parse_scenario(mapping, name, build_check)


def _add_module_folders(mapping: dict[str, Any], name: str) -> None:
    """Where a scenario has names of its own: look beside its file, then in the current folder."""
    if not own_names(mapping) or "modules" in mapping:
        return
    folders = [Path(name).parent] if name not in shipped_scenarios() else []
    mapping["modules"] = list(dict.fromkeys(str(f.resolve()) for f in [*folders, Path()]))
    for folder in reversed(mapping["modules"]):
        add_module_folder(folder)


def _method(mapping: dict[str, Any]) -> type[Algorithm] | None:
    """The class of a scenario's method, None if its name is missing or unknown."""
    described = mapping.get("algorithm")
    if not isinstance(described, dict):
        return None
    try:
        return find_algorithm(str(described.get("name")))
    except UserError:
        return None


def _engine_name(engine: Any) -> Any:
    """The name in `engine:`, which is a name or a mapping with options."""
    return engine.get("name") if isinstance(engine, dict) else engine or "local"


def apply_setting(mapping: dict[str, Any], setting: str) -> None:
    """Apply one `key=value` to a scenario.

    The key is a dotted path, or a field's name alone where only one of algorithm, training and
    federation has it.
    Raises: UserError, if the setting cannot be read or there is no such key.
    """
    key, equals, text = setting.partition("=")
    if not equals or not all(key.split(".")):
        raise UserError(f'--set takes key=value, got "{setting}"')
    try:
        value = construct_yaml(text, Loader)
    except yaml.YAMLError:
        raise UserError(f"--set {key}: {text} is not YAML") from None
    if "." in key or key in Scenario.model_fields:
        *parents, last = key.split(".")
    else:
        parents, last = [_find_owner(mapping, key)], key
    if parents[:1] == ["engine"] and not isinstance(mapping.get("engine"), dict):
        mapping["engine"] = {"name": _engine_name(mapping.get("engine"))}
    node: Any = mapping
    for part in parents:
        index = _index(node, part, key)
        if isinstance(node, dict):
            node.setdefault(index, {})
        # Two clients may share one object by a YAML anchor; the other one must not change.
        node[index] = copy(node[index])
        node = node[index]
    node[_index(node, last, key)] = value


def _find_owner(mapping: dict[str, Any], key: str) -> str:
    """Which part of a scenario has the field: algorithm, training or federation."""
    method = _method(mapping)
    part_fields = {
        "algorithm": [field.name for field in fields(method)] if method else [],
        "training": list(Training.model_fields),
        "federation": list(FederationConfig.model_fields),
    }
    if key in Training.RENAMED:
        new = Training.RENAMED[key]
        other = f", or algorithm.{key}" if key in part_fields["algorithm"] else ""
        raise UserError(f"--set {key}: training.{key} is called {new} now; write {new}{other}")
    if method is not None and key in method.RENAMED:
        new = method.RENAMED[key]
        raise UserError(f"--set {key}: algorithm.{key} is called {new} now; write {new}")
    owners = [part for part, names in part_fields.items() if key in names]
    if len(owners) == 1:
        return owners[0]
    if len(owners) > 1:
        choices = " or ".join(f"{owner}.{key}" for owner in owners)
        raise UserError(f"--set {key}: both {' and '.join(owners)} have it; write {choices}")
    for part, model_fields in QUALIFIED_PARTS.items():
        if key in model_fields:
            raise UserError(f"--set {key}: {_qualified(mapping, part, key)}")
    known = list(Scenario.model_fields)
    for names in part_fields.values():
        known += names
    raise UserError(f"--set {key}: " + unknown_name("field", key, known))


def _qualified(mapping: dict[str, Any], part: str, key: str) -> str:
    """How to write a field of a part whose name must be written before it."""
    if part != "clients":
        return f"{part} has it; write {part}.{key}"
    groups = mapping.get("clients") or []
    ids = [group.get("id") for group in groups if isinstance(group, dict)]
    by_id = f" or clients.{ids[0]}.{key}" if ids else ""
    return f"a client has it; write clients.0.{key}{by_id}"


def _index(node: Any, part: str, key: str) -> str | int:
    """Key or index of a part of a dotted path; clients are also found by id."""
    if isinstance(node, dict):
        return part
    if isinstance(node, list):
        ids = [str(item.get("id")) if isinstance(item, dict) else "" for item in node]
        if part.isdigit() and int(part) < len(node):
            return int(part)
        if part in ids:
            return ids.index(part)
        if any(ids) and not part.isdigit():
            raise UserError(f"--set {key}: " + unknown_name("client", part, ids))
    raise UserError(f'--set {key}: there is nothing at "{part}"')
