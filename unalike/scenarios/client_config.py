"""From a client.yaml to the one client it describes: your model, your data, your task. Knows nothing of methods or engines."""

import inspect
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field, ValidationError

from unalike.base.errors import Problem, Problems, UserError, describe_error, unknown_name
from unalike.base.settings import Settings, to_problem
from unalike.core.client import Client
from unalike.core.privacy import Privacy
from unalike.data.samples import as_samples
from unalike.models import ENCODERS, build_encoder
from unalike.scenarios import parse
from unalike.scenarios.reading import model_options
from unalike.scenarios.schema import Named
from unalike.tasks import TASKS


class Rows(Settings):
    """Where rows lie: an .npz file with x and y, or `module:name` of a function that gives what a Client takes."""

    train: str
    test: str | None = None
    public: str | None = None


class Member(Settings):
    """What a client.yaml may say."""

    id: Annotated[str, Field(min_length=1)]
    model: Named
    task: Named
    data: Rows
    capacity: Annotated[float, Field(gt=0, le=1)] = 1.0
    device: str = "cpu"
    dtype: Literal["float32", "float64"] = "float32"
    privacy: Privacy | None = None  # the least it asks for


class Factory(Settings):
    """Instead: a function of your own that makes the Client. It is told of the run, and may refuse it by a Refusal."""

    factory: str
    options: dict[str, Any] = {}


class Played(Settings):
    """Instead: one client of a scenario, where organisations are played on one machine."""

    scenario: str
    client: str


def describes_client(path: str | Path) -> bool:
    """Whether a file is one of a client, not of a scenario."""
    try:
        told = parse(Path(path).read_text("utf-8"), str(path))
    except (OSError, UnicodeDecodeError):
        return False
    return isinstance(told, dict) and (
        "factory" in told or {"scenario", "client"} <= told.keys() or {"id", "model"} <= told.keys()
    )


def member(path: str | Path, run: dict[str, Any] | None = None) -> Client:
    """The client that a file describes, or every problem of it at once. `run` tells a factory what it is for."""
    path = Path(path)
    try:
        told = parse(path.read_text("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"the client file {path} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None
    if not isinstance(told, dict):
        raise UserError(
            f"{path} describes no client: that is a mapping with id, model, task and data"
        )
    kind: type[Settings] = (
        Factory if "factory" in told else Played if "scenario" in told else Member
    )
    try:
        made = kind.model_validate(told)
    except ValidationError as error:
        raise Problems(str(path), [to_problem(each, kind) for each in error.errors()]) from None
    beside = str(path.parent.resolve())
    if beside not in sys.path:  # modules that lie beside the file are found
        sys.path.insert(0, beside)
    if isinstance(made, Factory):
        return _made(made, run or {}, path)
    if isinstance(made, Played):
        return _played(path.parent / made.scenario, made.client)
    assert isinstance(made, Member)
    return _described(made, path)


def _described(said: Member, path: Path) -> Client:
    problems: list[Problem] = []
    rows: dict[str, Any] = {}
    for name, where in said.data.model_dump().items():
        if where is not None:
            try:
                rows[name] = _rows(where, path.parent, name)
            except Exception as error:  # what a function of one's own may raise is open
                problems.append((f"data.{name}", describe_error(error)))
    task: Any = None
    if said.task.name not in TASKS:
        problems.append(("task.name", unknown_name("task", said.task.name, TASKS)))
    else:
        try:
            task = TASKS[said.task.name](**said.task.options)
        except (TypeError, ValueError) as error:
            problems.append(("task", str(error)))
    model: Any = None
    if ":" in said.model.name:
        try:
            model = partial(found(said.model.name), **said.model.options)
            inspect.signature(model.func).bind(**said.model.options)
        except (UserError, TypeError) as error:
            problems.append(("model", str(error)))
    elif said.model.name not in ENCODERS:
        problems.append(
            (
                "model.name",
                unknown_name("model", said.model.name, ENCODERS)
                + " One of your own is module:name.",
            )
        )
    else:
        options, wrong = model_options("model", said.model)
        problems += wrong
        if "train" in rows:
            model = partial(
                build_encoder, said.model.name, as_samples(rows["train"]).shape, options
            )
    if problems:
        raise Problems(str(path), problems)
    return Client(
        id=said.id,
        model=model,
        task=task,
        **rows,
        model_name=said.model.name.rpartition(":")[2],
        capacity=said.capacity,
        device=said.device,
        dtype=getattr(torch, said.dtype),
        privacy=said.privacy,
    )


def _made(said: Factory, run: dict[str, Any], path: Path) -> Client:
    client = found(said.factory)(run, **said.options)
    if not isinstance(client, Client):
        raise UserError(
            f"{path}: the factory {said.factory} must return an unalike.Client, got {type(client).__name__}"
        )
    return client


def _played(scenario: Path, id: str) -> Client:
    from unalike.scenarios import build, load

    made, _ = load(str(scenario))
    there = {client.id: client for client in build.clients(made)}
    if id not in there:
        raise UserError(f"{scenario}: " + unknown_name("client", id, there))
    return there[id]


def _rows(where: str, beside: Path, name: str) -> Any:
    """What a Client takes as rows, from a file or from a function."""
    if not where.endswith(".npz"):
        if ":" not in where:
            raise UserError(
                f"rows are an .npz file with x and y, or module:name of a function that gives them, got {where!r}"
            )
        given = found(where)
        return given() if callable(given) else given
    try:
        with np.load(beside / where, allow_pickle=False) as file:
            held = {key: torch.from_numpy(file[key]) for key in file.files}
    except (OSError, ValueError) as error:
        raise UserError(
            f"{beside / where} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None
    if "x" not in held:
        raise UserError(f"{where} has no array x; it has: {', '.join(held)}")
    return held["x"], None if name == "public" else held.get("y")


def found(name: str) -> Any:
    """What `module:name` names."""
    module, _, attribute = name.partition(":")
    try:
        thing: Any = import_module(module)
        for part in attribute.split("."):
            thing = getattr(thing, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"{name} cannot be imported: {error}; it is written module:name, and the module lies beside this file or is "
            "installed"
        ) from None
    return thing
