"""From a client.yaml to the one client it describes: its model, data and task."""

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
from unalike.scenarios.build import build_clients
from unalike.scenarios.load import load, parse_yaml
from unalike.scenarios.options import model_options
from unalike.scenarios.schema import Named
from unalike.tasks import TASKS, Task


class DataSources(Settings):
    """Where the rows are.

    Each is an .npz file with arrays x and y, or `module:name` of a function that returns what a
    Client takes.
    """

    train: str
    test: str | None = None
    public: str | None = None


class ClientConfig(Settings):
    """The fields of a client.yaml."""

    id: Annotated[str, Field(min_length=1)]
    model: Named
    task: Named
    data: DataSources
    capacity: Annotated[float, Field(gt=0, le=1)] = 1.0
    device: str = "cpu"
    dtype: Literal["float32", "float64"] = "float32"
    privacy: Privacy | None = None  # the least protection it accepts


class FromFactory(Settings):
    """Fields of a client.yaml with a function of your own that creates the Client.

    The function is called with a description of the run and the options. It may raise a Refusal.
    """

    factory: str
    options: dict[str, Any] = {}


class FromScenario(Settings):
    """Fields of a client.yaml that takes a client of a scenario, to try out a federation."""

    scenario: str
    client: str


def describes_client(path: str | Path) -> bool:
    """Whether a file describes a client, not a scenario."""
    try:
        mapping = parse_yaml(Path(path).read_text("utf-8"), str(path))
    except (OSError, UnicodeDecodeError):
        return False
    if not isinstance(mapping, dict):
        return False
    keys = mapping.keys()
    return "factory" in keys or {"scenario", "client"} <= keys or {"id", "model"} <= keys


def load_client(path: str | Path, run: dict[str, Any] | None = None) -> Client:
    """The client that a file describes.

    Args:
        run: description of the run the client is for, passed to a factory.
    Raises: UserError, or Problems with everything that is wrong with the file.
    """
    path = Path(path)
    try:
        mapping = parse_yaml(path.read_text("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or error
        raise UserError(f"the client file {path} cannot be read: {cause}") from None
    if not isinstance(mapping, dict):
        raise UserError(
            f"{path} does not describe a client: expected a mapping with id, model, task and data"
        )
    kind: type[Settings] = ClientConfig
    if "factory" in mapping:
        kind = FromFactory
    elif "scenario" in mapping:
        kind = FromScenario
    try:
        config = kind.model_validate(mapping)
    except ValidationError as error:
        raise Problems(str(path), [to_problem(detail, kind) for detail in error.errors()]) from None
    folder = str(path.parent.resolve())
    if folder not in sys.path:  # modules beside the file can be imported
        sys.path.insert(0, folder)
    if isinstance(config, FromFactory):
        return _call_factory(config, run or {}, path)
    if isinstance(config, FromScenario):
        return _client_of_scenario(path.parent / config.scenario, config.client)
    assert isinstance(config, ClientConfig)
    return _build_client(config, path)


def _build_client(config: ClientConfig, path: Path) -> Client:
    problems: list[Problem] = []
    rows = _load_all_rows(config.data, path.parent, problems)
    task = _build_task(config.task, problems)
    model = _model_factory(config.model, rows.get("train"), problems)
    if problems or task is None:
        raise Problems(str(path), problems)
    return Client(
        id=config.id,
        model=model,
        task=task,
        **rows,
        model_name=config.model.name.rpartition(":")[2],
        capacity=config.capacity,
        device=config.device,
        dtype=getattr(torch, config.dtype),
        privacy=config.privacy,
    )


def _load_all_rows(sources: DataSources, folder: Path, problems: list[Problem]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name, source in sources.model_dump().items():
        if source is None:
            continue
        try:
            rows[name] = _load_rows(source, folder, with_labels=name != "public")
        except Exception as error:  # a function of the user's may raise anything
            problems.append((f"data.{name}", describe_error(error)))
    return rows


def _build_task(named: Named, problems: list[Problem]) -> Task | None:
    if named.name not in TASKS:
        problems.append(("task.name", unknown_name("task", named.name, TASKS)))
        return None
    try:
        return TASKS[named.name](**named.options)
    except (TypeError, ValueError) as error:
        problems.append(("task", str(error)))
        return None


def _model_factory(named: Named, train: Any, problems: list[Problem]) -> Any:
    """A function without arguments that builds the encoder; None where there are problems."""
    if ":" in named.name:
        try:
            function = import_object(named.name)
            inspect.signature(function).bind(**named.options)
        except (UserError, TypeError) as error:
            problems.append(("model", str(error)))
            return None
        return partial(function, **named.options)
    if named.name not in ENCODERS:
        text = unknown_name("model", named.name, ENCODERS)
        problems.append(("model.name", f"{text} One of your own is written module:name."))
        return None
    options, model_problems = model_options("model", named)
    problems += model_problems
    if train is None:
        return None
    return partial(build_encoder, named.name, as_samples(train).shape, options)


def _call_factory(config: FromFactory, run: dict[str, Any], path: Path) -> Client:
    client = import_object(config.factory)(run, **config.options)
    if not isinstance(client, Client):
        raise UserError(
            f"{path}: the factory {config.factory} must return an unalike.Client, "
            f"got {type(client).__name__}"
        )
    return client


def _client_of_scenario(path: Path, id: str) -> Client:
    scenario, _ = load(str(path))
    clients = {client.id: client for client in build_clients(scenario)}
    if id not in clients:
        raise UserError(f"{path}: " + unknown_name("client", id, clients))
    return clients[id]


def _load_rows(source: str, folder: Path, with_labels: bool) -> Any:
    """Rows as a Client takes them, from an .npz file or from `module:name`."""
    if not source.endswith(".npz"):
        if ":" not in source:
            raise UserError(
                "rows are an .npz file with x and y, or module:name of a function that returns "
                f"them, got {source!r}"
            )
        rows = import_object(source)
        return rows() if callable(rows) else rows
    try:
        with np.load(folder / source, allow_pickle=False) as file:
            arrays = {key: torch.from_numpy(file[key]) for key in file.files}
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or error
        raise UserError(f"{folder / source} cannot be read: {cause}") from None
    if "x" not in arrays:
        raise UserError(f"{source} has no array x; it has: {', '.join(arrays)}")
    return arrays["x"], arrays.get("y") if with_labels else None


def import_object(name: str) -> Any:
    """Import what `module:name` names.

    Raises: UserError, if there is no such module or name.
    """
    module, _, attributes = name.partition(":")
    try:
        thing: Any = import_module(module)
        for attribute in attributes.split("."):
            thing = getattr(thing, attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"{name} cannot be imported: {error}; write module:name, with the module beside this "
            "file or installed"
        ) from None
    return thing
