"""From what a file says to a scenario and its algorithm, or every problem at once. Knows names and types; builds nothing."""

import copy
import dataclasses
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any

import torch
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
)

from unalike.base.errors import (
    Problem,
    Problems,
    UserError,
    closest_name,
    suggest_name,
    unknown_name,
)
from unalike.base.settings import describe_errors, nested_types, reject_bool, to_problem
from unalike.core.algorithm import Algorithm
from unalike.scenarios.schema import Count, Data, Named, Scenario
from unalike.tasks import Task

Rest = Callable[[Scenario, Algorithm | None, bool], list[Problem]]

# what takes the place of a broken part that must be there, so that the others can be looked at; nothing is called "?"
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


def read(raw: Any, source: str, rest: Rest | None = None) -> tuple[Scenario, Algorithm]:
    """The scenario and its algorithm, or every problem at once. Where there are some, `rest` is asked for those that only building tells,
    with stand-ins for what is broken, no algorithm if there is none of that name, and whether its fields are sound."""
    if not isinstance(raw, dict):
        raise Problems(
            source, [("", f"a scenario is a mapping of names to values, got {type(raw).__name__}.")]
        )
    from unalike.engines import hosts_clients

    engine = raw.get("engine")
    if isinstance(engine, dict) and not raw.get("clients"):
        if not hosts_clients(engine.get("name")):  # organisations bring their own clients
            raw = {**raw, "data": {"name": "none"}, "clients": []}
    scenario, problems, broken = _scenario(raw)
    algorithm, wrong, doubtful = read_algorithm(raw.get("algorithm"))
    broken |= doubtful | (
        {"public.size"} if "public.data" in broken else set()
    )  # how many there may be is not known then
    later = names(scenario)
    if (
        algorithm is not None
        and scenario.clients
        and not any(where == "clients" or where.endswith(".count") for where in broken)
    ):
        public = (
            sys.maxsize
            if {"public", "public.size"} & broken
            else scenario.public.size
            if scenario.public
            else 0
        )
        count = sum(g.count for g in scenario.clients)
        told = algorithm.check(count, public) or algorithm.check_round(
            scenario.federation.places(count)
        )
        wrong += [
            (f"algorithm.{field}", said)
            for field, said in told
            if _stands((f"algorithm.{field}", said), broken)
        ]
    problems += wrong
    problems += [problem for problem in later if _stands(problem, broken)]
    if problems and rest is not None:
        found = rest(scenario, algorithm, not wrong)
        problems += [
            problem for problem in found if _stands(problem, broken) and problem not in problems
        ]
    if problems or algorithm is None:
        raise Problems(source, sorted(problems, key=_place))
    return scenario, algorithm


def _place(problem: Problem) -> tuple[int, int]:
    """Where in a scenario a problem is: what belongs together is told together."""
    first, _, more = problem[0].partition(".")
    fields, second = list(Scenario.model_fields), more.partition(".")[0]
    return fields.index(first) if first in fields else len(fields), int(
        second
    ) if second.isdigit() else sys.maxsize


def names(scenario: Scenario) -> list[Problem]:
    """Names that must be known, options they must have, ids that must differ."""
    from unalike.engines import hosts_clients

    brought = not scenario.clients and not hosts_clients(scenario.engine.name)
    problems: list[Problem] = (
        []
        if scenario.clients or brought
        else [("clients", "a federation needs at least one client.")]
    )
    for where, data in blocks(scenario) if not brought else ():
        problems += dataset_options(where, data)[1]
        problems += partition_options(f"{where}.partition", data.partition)[1]
    problems += _public(scenario)
    for i, group in enumerate(scenario.clients):
        problems += model_options(f"clients.{i}.model", group.model)[1]
        if group.modalities and group.mix:
            problems.append(
                (f"clients.{i}.mix", "modalities are named or drawn: leave out modalities or mix.")
            )
    if scenario.server is not None:
        problems += model_options("server.model", scenario.server.model)[1]
        problems += (
            []
            if scenario.public
            else [("server", "learns from the public set, and there is none: say public.")]
        )
    ids = [group.id for group in scenario.clients]
    many = {group.id: group.count for group in scenario.clients if group.count > 1}
    for i, id in enumerate(ids):
        first, _, number = id.rpartition("-")
        if id in ids[:i] or (
            id not in many and number.isdigit() and int(number) < many.get(first, 0)
        ):
            problems.append((f"clients.{i}.id", f'two clients are called "{id}".'))
    problems += read_engine(scenario.engine, scenario.workers)[1]
    return problems + _device(scenario.device, uses_this_machine(scenario.engine.name))


def sources(scenario: Scenario) -> list[str]:
    """The datasets whose rows are public."""
    return [] if scenario.public is None else scenario.public.data or [scenario.data.name]


def _public(scenario: Scenario) -> list[Problem]:
    """What is wrong with the names of public datasets, and with what is said of them."""
    from unalike.data import DATASETS

    named, options = sources(scenario), scenario.public.options if scenario.public else {}
    unheard = [
        ("public.data", unknown_name("dataset", name, DATASETS))
        for name in dict.fromkeys(named)
        if name not in DATASETS and name != scenario.data.name
    ]
    if unheard or not named:
        return unheard
    if len(set(named)) < len(named):
        return [
            (
                "public.data",
                f'"{next(name for name in named if named.count(name) > 1)}" is there twice.',
            )
        ]
    if len(named) > 1:
        several = f"there are {len(named)} public datasets"
        refused = (
            [
                (
                    "public.options",
                    f"{several}, each read as its clients say or as it is: leave options out.",
                )
            ]
            if options
            else []
        )
        if scenario.public and scenario.public.size < len(named):
            refused.append(
                (
                    "public.size",
                    f"{several}: must be at least {len(named)}, got {scenario.public.size}.",
                )
            )
        return refused + (
            [("server", f"learns from one dataset, and {several}: name one in public.data.")]
            if scenario.server
            else []
        )
    return dataset_options("public", Data(name=named[0], options=options))[1] if options else []


def blocks(scenario: Scenario) -> list[tuple[str, Data]]:
    """Every `data:` in the scenario, and where it is."""
    return [("data", scenario.data)] + [
        (f"clients.{i}.data", g.data) for i, g in enumerate(scenario.clients) if g.data
    ]


def dataset_options(where: str, data: Data) -> tuple[dict[str, Any], list[Problem]]:
    """The options of a dataset, and what is wrong with them; where it lies is not among them."""
    from unalike.data import DATASETS

    if data.name not in DATASETS:
        return {}, [(f"{where}.name", unknown_name("dataset", data.name, DATASETS))]
    _, *theirs = inspect.signature(DATASETS[data.name]).parameters.values()
    return _options(
        f"{where}.options", data.name, {p.name: p.annotation for p in theirs}, data.options
    )


def task_options(
    where: str, task: Task, given: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Problem]]:
    """The options of a task, and what is wrong with them; its labels are the dataset's to say."""
    known = {field.name: field.type for field in dataclasses.fields(task) if field.name != "labels"}
    return _options(where, f"A {task.name} task", known, given)


def model_options(where: str, named: Named) -> tuple[dict[str, Any], list[Problem]]:
    """The options of a model, and what is wrong with them."""
    from unalike.models import ENCODERS

    return _named(where, "model", named, ENCODERS, {"shape"})


def partition_options(where: str, named: Named) -> tuple[dict[str, Any], list[Problem]]:
    """The options of a partition, and what is wrong with them; those that look at labels may be told which, those that look at features
    which model makes them; and all how many would share, where only the first of these take part."""
    from unalike.data import PARTITIONS
    from unalike.models import ENCODERS

    good, problems = _named(
        where,
        "partition",
        named,
        PARTITIONS,
        {"rows", "sizes_or_clients", "y", "features", "clients", "generator"},
    )
    if good.get("encoder", "mlp") not in ENCODERS:
        problems.append((f"{where}.encoder", unknown_name("model", good["encoder"], ENCODERS)))
    return good, problems


def uses_this_machine(engine: str) -> bool:
    """Whether clients compute on this machine; so does an engine that nobody knows."""
    from unalike.engines import ENGINES, engine_class

    if engine not in ENGINES:
        return True
    try:
        return engine_class(engine).uses_this_machine
    except UserError:  # its package is missing, which is a problem of its own
        return False


def read_engine(named: Named, workers: int) -> tuple[dict[str, Any], list[Problem]]:
    """Check the options of an engine.

    Args:
        workers: the scenario's `workers`, short for `engine.workers`; 0: not set.
    Returns: the options as the types the engine asks for, and what is wrong with them.
    """
    from unalike.engines import engine_options

    try:
        known = engine_options(named.name)
    except UserError as error:
        return {}, [("engine.name", str(error))]
    good, problems = _options("engine", named.name, known, named.options)
    if workers and "workers" not in known:
        problems.append(("workers", f"the engine {named.name} has none; leave them out."))
    elif workers:
        good.setdefault("workers", workers)
    return good, problems


def _named(
    where: str, kind: str, named: Named, there: Mapping[str, Any], ours: set[str]
) -> tuple[dict[str, Any], list[Problem]]:
    """The options of what is named, which are its parameters but for those that are not the user's to give."""
    if named.name not in there:
        return {}, [(f"{where}.name", unknown_name(kind, named.name, there))]
    parameters = inspect.signature(there[named.name]).parameters
    theirs = {name: p for name, p in parameters.items() if name not in ours}
    more: dict[str, Any] = (
        {"by": str} if "y" in parameters else {"encoder": str} if "features" in parameters else {}
    )
    more |= {"clients": Count} if "clients" in parameters else {}
    good, problems = _options(
        where, named.name, {name: p.annotation for name, p in theirs.items()} | more, named.options
    )
    meant = {closest_name(name, theirs) for name in named.options}
    missing = [name for name, p in theirs.items() if p.default is p.empty and name not in meant]
    return good, problems + [(f"{where}.{name}", "is missing.") for name in missing]


def _options(
    at: str,
    owner: str,
    known: Mapping[str, Any],
    given: Mapping[str, Any],
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> tuple[dict[str, Any], list[Problem]]:
    """What was given, as the types that are known, and what is wrong with it; `renamed` has old names and what they are called now."""
    good: dict[str, Any] = {}
    problems: list[Problem] = []
    for key, value in given.items():
        if key in renamed:
            problems.append((f"{at}.{key}", f'"{key}" is called "{renamed[key]}" now.'))
            continue
        if key not in known:
            has = f"It has: {', '.join(known)}." if known else "It has none."
            problems.append(
                (f"{at}.{key}", f'{owner} has no field "{key}".{suggest_name(key, known)} {has}')
            )
            continue
        try:
            before = BeforeValidator(partial(reject_bool, annotation=known[key]))
            kind = Annotated[known[key], before]  # type: ignore[valid-type]
            good[key] = TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False)).validate_python(
                value
            )
        except ValidationError as error:
            found = error.errors()
            if len(found) == 1 and found[0]["loc"]:  # one entry of a list
                key, value = ".".join([key, *map(str, found[0]["loc"])]), found[0]["input"]
            problems.append((f"{at}.{key}", describe_errors(found, value)))
    return good, problems


def checked(algorithm: Any) -> Algorithm:
    """A method made in Python with its fields as a file would have given them: numbers as their type, tensors as lists."""
    if isinstance(algorithm, type) and issubclass(algorithm, Algorithm):
        raise UserError(
            f"algorithm is the class {algorithm.__name__}, make one of it: {algorithm.__name__}()"
        )
    if not isinstance(algorithm, Algorithm):
        raise UserError(
            f"algorithm must be a method, such as unalike.FedMuscle(), got {algorithm!r}"
        )
    known = {
        field.name: field.type for field in dataclasses.fields(algorithm) if _has_schema(field.type)
    }
    given = {
        name: value.tolist() if hasattr(value, "tolist") else value
        for name, value in vars(algorithm).items()
        if name in known
    }
    good, problems = _options("algorithm", type(algorithm).__name__, known, given)
    if problems:
        raise Problems(type(algorithm).__name__, problems)
    made = copy.copy(algorithm)
    vars(made).update(good)
    return made


def _has_schema(kind: Any) -> bool:
    """Whether pydantic can tell values of that type; a method of one's own may have any."""
    try:
        TypeAdapter(kind, config=ConfigDict())
    except PydanticUserError:
        return False
    return not isinstance(kind, str)


def read_algorithm(named: Any) -> tuple[Algorithm | None, list[Problem], set[str]]:
    """An algorithm with its fields set, what is wrong with them, and which fields are not what was meant."""
    from unalike.algorithms import ALGORITHMS

    if not isinstance(named, dict) or not isinstance(named.get("name"), str):
        return None, [], set()
    if named["name"] not in ALGORITHMS:
        return (
            None,
            [("algorithm.name", unknown_name("algorithm", named["name"], ALGORITHMS))],
            set(),
        )
    made, fields = (
        ALGORITHMS[named["name"]],
        {str(key): value for key, value in named.items() if key != "name"},
    )
    known = {field.name: field.type for field in dataclasses.fields(made)}
    good, problems = _options("algorithm", made.__name__, known, fields, made.RENAMED)
    return (
        made(**good),
        problems,
        {
            f"algorithm.{made.RENAMED.get(key) or closest_name(key, known)}"
            for key in fields
            if key not in good
        },
    )


def _scenario(raw: dict) -> tuple[Scenario, list[Problem], set[str]]:
    """The scenario, what is wrong with it, and where it is not what was meant: there are defaults or stand-ins."""
    try:
        return Scenario.model_validate(raw), [], set()
    except ValidationError as error:
        found = error.errors()
    told, problems, broken = copy.deepcopy(raw), [], set()
    for each in found:
        way = each["loc"]
        where = ".".join(str(part) for part in way)
        broken.add(where)
        extra = each["type"] == "extra_forbidden"
        owner = _owner(way[:-1]) if extra else Scenario
        problems.append(to_problem(each, owner))
        if extra:
            broken.add(
                ".".join(
                    [
                        *map(str, way[:-1]),
                        closest_name(str(way[-1]), owner.model_fields) or str(way[-1]),
                    ]
                )
            )
        if (
            len(way) > 2 and isinstance(way[-1], int) and each["type"] != "invalid_key"
        ):  # one of a list of names: the list is as broken
            way = way[:-1]
            broken.add(".".join(map(str, way)))
        _replace(told, way)
    while True:
        try:
            return Scenario.model_validate(told), problems, broken
        except (
            ValidationError
        ) as error:  # a part that cannot be without what was broken in it goes as a whole
            _replace(told, error.errors()[0]["loc"][:-1])


def _replace(told: Any, way: tuple[int | str, ...]) -> None:
    """A stand-in for what must be there; the rest goes, and has its default."""
    for part in way[:-1]:
        told = told[part]
    last = way[-1]
    if isinstance(told, list):
        told[int(last)] = {"id": "?", "model": {"name": "?"}}
    elif last in STAND_INS and way != ("public", "data"):  # which may be left out
        told[last] = copy.deepcopy(STAND_INS[str(last)])
    else:
        told.pop(last, None)


def _stands(problem: Problem, broken: set[str]) -> bool:
    """Whether a problem is one of its own, not the consequence of a broken part."""
    return not any(problem[0] == where or problem[0].startswith(f"{where}.") for where in broken)


def _owner(way: tuple[int | str, ...]) -> type[BaseModel]:
    """The schema class of the mapping at a place."""
    owner: Any = Scenario
    for part in way:
        if not isinstance(part, int):
            owner = next(
                t
                for t in nested_types(owner.model_fields[part].annotation)
                if isinstance(t, type) and issubclass(t, BaseModel)
            )
    return owner


def _device(name: str, here: bool) -> list[Problem]:
    """What is wrong with a device, which must be in this machine where clients live here."""
    try:
        device = torch.device(name)
    except RuntimeError:
        return [("device", f'there is no device "{name}"; cpu, cuda and cuda:1 are some.')]
    count = (
        torch.cuda.device_count() if device.type == "cuda" else 0
    )  # counts without waking CUDA up: workers fork later
    if here and device.type == "cuda" and (device.index or 0) >= count:
        return [("device", f"{name} is not here: torch sees {count} such GPUs.")]
    return []
