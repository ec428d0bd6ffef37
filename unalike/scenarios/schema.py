"""What a scenario file may say, checked all at once. Knows names and types; builds nothing."""

import copy
import dataclasses
import inspect
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError

from unalike.algorithm import Algorithm
from unalike.errors import Problems, UserError, nearest, unknown
from unalike.federation import Terms
from unalike.training import Training

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Named(BaseModel):
    """A name and the options of the thing it names."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Data(Strict):
    """A dataset, and how its labelled rows are dealt out."""

    name: str
    partition: Named = Named(name="iid")


class Public(Strict):
    """Unlabelled rows that every client holds, taken from the dataset's training rows before they are dealt out."""

    size: Count
    data: str | None = None               # a dataset of its own instead


class Mix(Strict):
    """How many of a group's clients own all modalities, several but not all, or a single one: parts of a ratio, e.g. 1, 0, 1."""

    full: Annotated[float, Field(ge=0)] = 0
    multi: Annotated[float, Field(ge=0)] = 0
    single: Annotated[float, Field(ge=0)] = 0


class Group(Strict):
    """One client, or `count` of the same kind."""

    id: str
    count: Count = 1
    model: Named
    target: str | None = None             # which of the dataset's targets; needed where it has several
    data: Data | None = None              # a dataset of its own
    modalities: Annotated[list[str], Field(min_length=1)] | None = None     # which it owns; all if not said
    mix: Mix | None = None                # instead: drawn for each client of the group
    train: Count | None = None            # how many labelled rows it has at most
    test: Count | None = None
    capacity: Annotated[float, Field(gt=0, le=1)] = 1.0
    speed: Positive = 1000.0
    link: Positive = 1e7
    latency: Annotated[float, Field(ge=0)] = 0.01


class Scenario(Strict):
    """Who takes part, with what, and with what budget."""

    name: str
    summary: str = ""
    algorithm: Named
    training: Training = Training()
    federation: Terms = Terms()
    data: Data
    public: Public | None = None
    clients: Annotated[list[Group], Field(min_length=1)]
    test: Literal["own", "common"] = "own"     # whether there is a test set for everyone
    safeguard: bool = False
    alone: bool = True
    seed: int = 0
    workers: Annotated[int, Field(ge=0)] = 0
    threads: Count = 1                         # of this process; small models run fastest with one
    device: str = "cpu"
    dtype: Literal["float32", "float64"] = "float32"
    checkpoint: Count = 1                      # rounds between checkpoints


def read(raw: Any, source: str) -> tuple[Scenario, Algorithm]:
    """The scenario and its algorithm, or every problem at once."""
    problems: list[tuple[str, str]] = []
    if not isinstance(raw, dict):
        raise Problems(source, [("", f"a scenario is a mapping of names to values, got {type(raw).__name__}")])
    scenario = None
    try:
        scenario = Scenario.model_validate(raw)
    except ValidationError as error:
        problems += [_sentence(e, raw) for e in error.errors()]
    named = raw.get("algorithm")
    algorithm = None
    if isinstance(named, dict) and isinstance(named.get("name"), str):
        algorithm, wrong = read_algorithm(named["name"], {k: v for k, v in named.items() if k != "name"})
        problems += wrong
    if scenario is not None:
        problems += _names(scenario)
        if algorithm is not None:
            count = sum(group.count for group in scenario.clients)
            found = algorithm.check(count, scenario.public.size if scenario.public else 0)
            problems += [(f"algorithm.{field}", sentence) for field, sentence in found]
    if problems or scenario is None or algorithm is None:
        raise Problems(source, problems)
    return scenario, algorithm


def read_algorithm(name: str, fields: dict[str, Any]) -> tuple[Algorithm | None, list[tuple[str, str]]]:
    """An algorithm by name with its fields set, and what is wrong with them."""
    from unalike.algorithms import ALGORITHMS
    if name not in ALGORITHMS:
        return None, [("algorithm.name", unknown("algorithm", name, ALGORITHMS))]
    made = ALGORITHMS[name]
    good, problems = _options("algorithm", made.__name__, {field.name: field.type for field in dataclasses.fields(made)}, fields)
    return (None, problems) if problems else (made(**good), [])


def checked(algorithm: Any) -> Algorithm:
    """A method made in Python with its fields as a file would have given them: numbers as their type, tensors as lists."""
    if isinstance(algorithm, type) and issubclass(algorithm, Algorithm):
        raise UserError(f"algorithm is the class {algorithm.__name__}, make one of it: {algorithm.__name__}()")
    if not isinstance(algorithm, Algorithm):
        raise UserError(f"algorithm must be a method, such as unalike.FedMuscle(), got {algorithm!r}")
    known = {field.name: field.type for field in dataclasses.fields(algorithm) if _has_schema(field.type)}
    given = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in vars(algorithm).items() if name in known}
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


def _options(at: str, owner: str, known: dict[str, Any], given: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """What was given, as the types that are known, and what is wrong with it."""
    good, problems = {}, []
    for key, value in given.items():
        if key not in known:
            has = f"It has: {', '.join(known)}." if known else "It has none."
            problems.append((f"{at}.{key}", f'{owner} has no field "{key}".{nearest(key, known)} {has}'))
            continue
        try:
            good[key] = TypeAdapter(known[key], config=ConfigDict(allow_inf_nan=False)).validate_python(value)
        except ValidationError as error:
            problems.append((f"{at}.{key}", f"{_plain(error.errors()[0])}, got {value!r}."))
    return good, problems


def _names(scenario: Scenario) -> list[tuple[str, str]]:
    """Names that must be known and ids that must differ."""
    from unalike.data import DATASETS
    from unalike.data.partitions import PARTITIONS
    from unalike.models import ENCODERS
    problems = []
    sets = [("data", scenario.data)] + [(f"clients.{i}.data", g.data) for i, g in enumerate(scenario.clients) if g.data]
    for where, data in sets:
        if data.name not in DATASETS:
            problems.append((f"{where}.name", unknown("dataset", data.name, DATASETS)))
        if data.partition.name not in PARTITIONS:
            problems.append((f"{where}.partition.name", unknown("partition", data.partition.name, PARTITIONS)))
        else:
            problems += _partition(f"{where}.partition", PARTITIONS[data.partition.name], data.partition)
    for i, group in enumerate(scenario.clients):
        if group.model.name not in ENCODERS:
            problems.append((f"clients.{i}.model.name", unknown("model", group.model.name, ENCODERS)))
    ids = [group.id for group in scenario.clients]
    problems += _device(scenario.device)
    problems += [(f"clients.{i}.id", f'two clients are called "{id}".') for i, id in enumerate(ids) if id in ids[:i]]
    return problems


def _partition(where: str, made: Any, named: Named) -> list[tuple[str, str]]:
    """Options a partition has not, or needs; rows, clients and generator are not the user's to give."""
    known = {name: p for name, p in list(inspect.signature(made).parameters.items())[2:] if name != "generator"}
    _, problems = _options(where, named.name, {name: p.annotation for name, p in known.items()} | {"by": str}, named.options)
    missing = [name for name, p in known.items() if p.default is p.empty and name not in named.options]
    return problems + [(f"{where}.{name}", "is missing.") for name in missing]


def _device(name: str) -> list[tuple[str, str]]:
    try:
        device = torch.device(name)
    except RuntimeError:
        return [("device", f'there is no device "{name}"; cpu, cuda and cuda:1 are some.')]
    count = torch.cuda.device_count() if device.type == "cuda" else 0       # counts without waking CUDA up: workers fork later
    if device.type == "cuda" and (device.index or 0) >= count:
        return [("device", f"{name} is not here: torch sees {count} such GPUs.")]
    return []


def _sentence(error: Any, raw: Any) -> tuple[str, str]:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        owner: Any = Scenario
        for part in error["loc"][:-1]:
            owner = _inner(owner, part)
        key = error["loc"][-1]
        return where, unknown("field", str(key), owner.model_fields if owner else [])
    if error["type"] == "missing":
        return where, "is missing."
    return where, f"{_plain(error)}, got {error['input']!r}."


def _inner(owner: Any, part: Any) -> Any:
    """The schema class behind a field or a list entry."""
    if isinstance(part, int) or owner is None:
        return owner
    field = owner.model_fields.get(part)
    found = [t for t in _types(field.annotation) if isinstance(t, type) and issubclass(t, BaseModel)] if field else []
    return found[0] if found else None


def _types(annotation: Any) -> list[Any]:
    inside = getattr(annotation, "__args__", ())
    return [annotation, *(t for a in inside for t in _types(a))]


def _plain(error: Any) -> str:
    """pydantic's message in our words."""
    context = error.get("ctx", {})
    match error["type"]:
        case "greater_than":
            return f"must be above {context['gt']:g}"
        case "greater_than_equal":
            return f"must be at least {context['ge']:g}"
        case "less_than":
            return f"must be below {context['lt']:g}"
        case "less_than_equal":
            return f"must be at most {context['le']:g}"
        case "literal_error":
            return f"must be {context['expected']}"
        case _:
            message = error["msg"].removeprefix("Input ")
            return message[0].lower() + message[1:]
