"""From the mapping in a scenario file to a Scenario and its Algorithm, or all problems at once.

Checks names, types and options; loads no data and builds no model.
"""

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from pydantic import BaseModel, ValidationError

from unalike.algorithms import ALGORITHMS
from unalike.base.errors import Problem, Problems, UserError, closest_name
from unalike.base.registry import add_module_folder, find_named, name_problem
from unalike.base.settings import nested_types, to_problem
from unalike.core.algorithm import Algorithm
from unalike.data import DATASETS
from unalike.engines import ENGINES, engine_class, hosts_clients
from unalike.scenarios.options import (
    convert,
    dataset_options,
    engine_options,
    field_types,
    model_options,
    partition_options,
)
from unalike.scenarios.schema import NO_DATASET, Data, Public, Scenario

# Finds problems that show only when clients are built. Called with the scenario, the algorithm
# (None if its name is unknown) and whether the algorithm's fields are valid.
BuildCheck = Callable[[Scenario, Algorithm | None, bool], list[Problem]]

# Replace invalid parts that are required, so that the other parts can be checked. Nothing is
# called "?".
STAND_INS: dict[str, Any] = {
    "name": "?",
    "id": "?",
    "model": {"name": "?"},
    "partition": {"name": "?"},
    "data": {"name": "?"},
    "algorithm": {"name": "?"},
    "size": 1,
    "clients": [],
}


def parse_scenario(
    mapping: Any, source: str, build_check: BuildCheck | None = None
) -> tuple[Scenario, Algorithm]:
    """The scenario and the algorithm that a mapping describes.

    Args:
        mapping: what a scenario file holds.
        source: the file's name, for error messages.
        build_check: called if there are problems, for those that show only when clients are built.
            It gets stand-ins or defaults for the invalid parts.
    Raises: Problems, with everything that is wrong; consequences of other problems are left out.
    """
    if not isinstance(mapping, dict):
        text = f"a scenario is a mapping of names to values, got {type(mapping).__name__}."
        raise Problems(source, [("", text)])
    folders = mapping.get("modules")
    for folder in reversed(folders) if isinstance(folders, list) else ():
        add_module_folder(str(folder))
    engine = mapping.get("engine")
    has_clients = bool(mapping.get("clients"))
    if isinstance(engine, dict) and not has_clients and not hosts_clients(engine.get("name")):
        # Organisations bring their own clients.
        mapping = {**mapping, "data": {"name": NO_DATASET}, "clients": []}
    scenario, problems, invalid = _validate_schema(mapping)
    algorithm, method_problems, invalid_fields = parse_algorithm(mapping.get("algorithm"))
    invalid |= invalid_fields
    if "public.data" in invalid:
        invalid.add("public.size")  # its upper bound is unknown then
    if algorithm is not None:
        method_problems += _independent(_check_algorithm(algorithm, scenario, invalid), invalid)
    problems += method_problems
    problems += _independent(check_names(scenario), invalid)
    if problems and build_check is not None:
        if any(path == "device" for path, _ in problems):
            scenario = scenario.model_copy(update={"device": "cpu"})
        more = _independent(build_check(scenario, algorithm, not method_problems), invalid)
        problems += [problem for problem in more if problem not in problems]
    if problems or algorithm is None:
        raise Problems(source, sorted(problems, key=_position))
    return scenario, algorithm


def _check_algorithm(algorithm: Algorithm, scenario: Scenario, invalid: set[str]) -> list[Problem]:
    """What the algorithm says of the numbers of clients and of public rows."""
    counts_known = not any(path == "clients" or path.endswith(".count") for path in invalid)
    if not scenario.clients or not counts_known:
        return []
    if {"public", "public.size"} & invalid:
        public_rows = sys.maxsize
    else:
        public_rows = scenario.public.size if scenario.public else 0
    count = sum(group.count for group in scenario.clients)
    problems = algorithm.check(count, public_rows)
    problems = problems or algorithm.check_round(scenario.federation.clients_per_round(count))
    return [(f"algorithm.{field}", text) for field, text in problems]


def _independent(problems: list[Problem], invalid: set[str]) -> list[Problem]:
    """Only problems that are not at or inside an invalid part."""
    independent = []
    for path, text in problems:
        if not any(path == part or path.startswith(f"{part}.") for part in invalid):
            independent.append((path, text))
    return independent


def _position(problem: Problem) -> tuple[int, int]:
    """Sort key: problems are reported in the order of the scenario's fields."""
    first, _, remainder = problem[0].partition(".")
    second = remainder.partition(".")[0]
    fields = list(Scenario.model_fields)
    field = fields.index(first) if first in fields else len(fields)
    return field, int(second) if second.isdigit() else sys.maxsize


def check_names(scenario: Scenario) -> list[Problem]:
    """Names that must be known, options they must have, client ids that must differ."""
    problems: list[Problem] = []
    clients_elsewhere = not scenario.clients and not hosts_clients(scenario.engine.name)
    if not clients_elsewhere:
        if not scenario.clients:
            problems.append(("clients", "a federation needs at least one client."))
        for path, data in _data_blocks(scenario):
            problems += dataset_options(path, data)[1]
            problems += partition_options(f"{path}.partition", data.partition)[1]
    if scenario.public is not None:
        problems += _check_public(scenario, scenario.public)
    for i, group in enumerate(scenario.clients):
        problems += model_options(f"clients.{i}.model", group.model)[1]
        if group.modalities and group.mix:
            text = "modalities are named or drawn: leave out modalities or mix."
            problems.append((f"clients.{i}.mix", text))
    if scenario.server is not None:
        problems += model_options("server.model", scenario.server.model)[1]
        if scenario.public is None:
            problems.append(("server", "learns from the public set: add `public`."))
    problems += _check_ids(scenario)
    problems += engine_options(scenario.engine, scenario.workers)[1]
    return problems + _check_device(scenario.device, _uses_this_machine(scenario.engine.name))


def _check_ids(scenario: Scenario) -> list[Problem]:
    """Client ids that occur twice, also among `id-0`, `id-1`, ... of groups with a count."""
    problems: list[Problem] = []
    ids = [group.id for group in scenario.clients]
    counts = {group.id: group.count for group in scenario.clients if group.count > 1}
    for i, id in enumerate(ids):
        prefix, _, number = id.rpartition("-")
        in_group = id not in counts and number.isdigit() and int(number) < counts.get(prefix, 0)
        if id in ids[:i] or in_group:
            problems.append((f"clients.{i}.id", f'two clients are called "{id}".'))
    return problems


def public_datasets(scenario: Scenario) -> list[str]:
    """Names of the datasets whose rows are public."""
    if scenario.public is None:
        return []
    return scenario.public.data or [scenario.data.name]


def _check_public(scenario: Scenario, public: Public) -> list[Problem]:
    """Names and options of public datasets."""
    names = public_datasets(scenario)
    problems: list[Problem] = []
    for name in dict.fromkeys(names):
        problem = name_problem("dataset", name, DATASETS) if name != scenario.data.name else None
        if problem is not None:
            problems.append(("public.data", problem))
    if problems:
        return problems
    if len(names) == 1:
        if not public.options:
            return []
        return dataset_options("public", Data(name=names[0], options=public.options))[1]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        return [("public.data", f'"{repeated[0]}" is listed twice.')]
    several = f"there are {len(names)} public datasets"
    if public.options:
        text = f"{several}, and options are for a single one: leave options out."
        problems.append(("public.options", text))
    if public.size < len(names):
        text = f"{several}: must be at least {len(names)}, got {public.size}."
        problems.append(("public.size", text))
    if scenario.server:
        text = f"learns from one dataset, and {several}: name one in public.data."
        problems.append(("server", text))
    return problems


def _data_blocks(scenario: Scenario) -> list[tuple[str, Data]]:
    """Every `data:` in the scenario with its path."""
    blocks = [("data", scenario.data)]
    for i, group in enumerate(scenario.clients):
        if group.data:
            blocks.append((f"clients.{i}.data", group.data))
    return blocks


def _uses_this_machine(engine: str) -> bool:
    """Whether clients run on this machine, so that their device must be one of it."""
    if engine not in ENGINES:
        return True
    try:
        return engine_class(engine).uses_this_machine
    except UserError:  # its package is missing, which is a problem of its own
        return False


def _check_device(name: str, on_this_machine: bool) -> list[Problem]:
    """Whether there is a device of that name."""
    try:
        device = torch.device(name)
    except RuntimeError:
        return [("device", f'there is no device "{name}"; devices are cpu, cuda, cuda:1 ...')]
    if not on_this_machine or device.type != "cuda":
        return []
    # Counts GPUs without initialising CUDA: worker processes are forked later.
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        return [("device", f"{name} does not exist here: torch sees {count} GPUs.")]
    return []


def parse_algorithm(mapping: Any) -> tuple[Algorithm | None, list[Problem], set[str]]:
    """The algorithm that `algorithm:` in a scenario describes.

    Returns: the algorithm, with defaults for invalid fields (None if its name is missing or
    unknown); problems; paths of the invalid fields.
    """
    if not isinstance(mapping, dict) or not isinstance(mapping.get("name"), str):
        return None, [], set()
    name = mapping["name"]
    try:
        method = find_algorithm(name)
    except UserError as error:
        return None, [("algorithm.name", str(error))], set()
    values = {str(key): value for key, value in mapping.items() if key != "name"}
    known = field_types(method)
    options, problems = convert("algorithm", method.__name__, known, values, method.RENAMED)
    invalid = set()
    for key in values:
        if key not in options:
            meant = method.RENAMED.get(key) or closest_name(key, known)
            invalid.add(f"algorithm.{meant}")
    return method(**options), problems, invalid


def find_algorithm(name: str) -> type[Algorithm]:
    """The class of a method by its name. Raises: UserError where there is none."""
    method = find_named("algorithm", name, ALGORITHMS)
    if not isinstance(method, type) or not issubclass(method, Algorithm):
        raise UserError(
            f"{name} is no method: expected a subclass of unalike.Algorithm, got {method!r}"
        )
    return method


def validate_algorithm(algorithm: Any) -> Algorithm:
    """An algorithm made in Python with its fields checked and converted as those in a file are.

    Raises: UserError, if it is not an Algorithm; Problems, if fields are invalid.
    """
    if isinstance(algorithm, type) and issubclass(algorithm, Algorithm):
        name = algorithm.__name__
        raise UserError(f"algorithm is the class {name}; pass an instance of it: {name}()")
    if not isinstance(algorithm, Algorithm):
        raise UserError(
            f"algorithm must be a method, such as unalike.FedMuscle(), got {algorithm!r}"
        )
    known = field_types(type(algorithm))
    values = {}
    for name, value in vars(algorithm).items():
        if name in known:
            values[name] = value.tolist() if hasattr(value, "tolist") else value
    options, problems = convert("algorithm", type(algorithm).__name__, known, values)
    if problems:
        raise Problems(type(algorithm).__name__, problems)
    converted = copy.copy(algorithm)
    vars(converted).update(options)
    return converted


def _validate_schema(mapping: dict[str, Any]) -> tuple[Scenario, list[Problem], set[str]]:
    """Validate a mapping against the schema.

    Returns: the scenario, with defaults or stand-ins for invalid parts; the problems; the paths
    of the invalid parts.
    """
    try:
        return Scenario.model_validate(mapping), [], set()
    except ValidationError as error:
        details = error.errors()
    repaired = copy.deepcopy(mapping)
    problems: list[Problem] = []
    invalid: set[str] = set()
    for detail in details:
        location = detail["loc"]
        invalid.add(_dotted(location))
        owner: type[BaseModel] = Scenario
        if detail["type"] == "extra_forbidden":
            # The field that was probably meant has no value then.
            owner = _schema_at(location[:-1])
            name = str(location[-1])
            meant = closest_name(name, owner.model_fields) or name
            invalid.add(_dotted((*location[:-1], meant)))
        problems.append(to_problem(detail, owner))
        is_key = detail["type"] == "invalid_key"
        if len(location) > 2 and isinstance(location[-1], int) and not is_key:
            # One entry of a list of names: the list is invalid as a whole.
            location = location[:-1]
            invalid.add(_dotted(location))
        _replace_invalid(repaired, location)
    while True:
        try:
            return Scenario.model_validate(repaired), problems, invalid
        except ValidationError as error:
            # A part that is incomplete without the invalid one is replaced as a whole.
            _replace_invalid(repaired, error.errors()[0]["loc"][:-1])


def _dotted(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location)


def _replace_invalid(mapping: Any, location: tuple[int | str, ...]) -> None:
    """Put a stand-in at a location where a value is required; remove the value elsewhere."""
    parent = mapping
    for part in location[:-1]:
        parent = parent[part]
    last = location[-1]
    if isinstance(parent, list):
        parent[int(last)] = {"id": "?", "model": {"name": "?"}}
    elif last in STAND_INS and location != ("public", "data"):  # public.data is optional
        parent[last] = copy.deepcopy(STAND_INS[str(last)])
    else:
        parent.pop(last, None)


def _schema_at(location: tuple[int | str, ...]) -> type[BaseModel]:
    """The schema class of the mapping at a location."""
    schema: Any = Scenario
    for part in location:
        if isinstance(part, int):
            continue
        for kind in nested_types(schema.model_fields[part].annotation):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                schema = kind
                break
    return schema
