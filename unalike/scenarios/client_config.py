"""From a client.yaml to the one client it describes: its model, data and task."""

import inspect
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field, ValidationError

from unalike.base.errors import Problem, Problems, UserError, describe_error, unknown_name
from unalike.base.registry import add_module_folder, import_object, own_names
from unalike.base.settings import Settings, to_problem
from unalike.core.client import Client
from unalike.data import samples
from unalike.data.samples import Relabelled, Tensors, as_samples, reorder_labels
from unalike.models import build_encoder
from unalike.scenarios.build import build_clients
from unalike.scenarios.load import load, parse_yaml
from unalike.scenarios.options import build_task, model_options
from unalike.scenarios.schema import Named
from unalike.scenarios.site_policy import SiteRules
from unalike.tasks import Task


class DataSources(Settings):
    """Where the rows are.

    Each is an .npz file with arrays x and y; a .csv or .parquet file, or a folder of images, with
    `x`, `y` and other arguments of `unalike.samples` in a mapping beside `file`; or `module:name`
    of a function that returns what a Client takes.
    """

    train: str | dict[str, Any]
    test: str | dict[str, Any] | None = None
    public: str | dict[str, Any] | None = None


class ClientConfig(SiteRules):
    """The fields of a client.yaml."""

    id: Annotated[str, Field(min_length=1)]
    model: Named
    task: Named
    data: DataSources
    capacity: Annotated[float, Field(gt=0, le=1)] = 1.0
    device: str = "cpu"
    dtype: Literal["float32", "float64"] = "float32"


class FromFactory(SiteRules):
    """Fields of a client.yaml with a function of your own that creates the Client.

    The function is called with a description of the run and the options. It may raise a Refusal.
    """

    factory: str
    options: dict[str, Any] = {}


class FromScenario(SiteRules):
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


def read_config(path: str | Path) -> SiteRules:
    """The fields of a client.yaml. Nothing that it names is imported or read.

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
    kind: type[SiteRules] = ClientConfig
    if "factory" in mapping:
        kind = FromFactory
    elif "scenario" in mapping:
        kind = FromScenario
    try:
        return kind.model_validate(mapping)
    except ValidationError as error:
        raise Problems(str(path), [to_problem(detail, kind) for detail in error.errors()]) from None


def load_client(path: str | Path, run: dict[str, Any] | None = None) -> Client:
    """The client that a file describes.

    Args:
        run: description of the run the client is for, passed to a factory.
    Raises: UserError, or Problems with everything that is wrong with the file.
    """
    path = Path(path)
    config = read_config(path)
    if own_names(config.model_dump()):
        add_module_folder(path.parent)  # modules beside the file can be imported
    if isinstance(config, FromFactory):
        client = _call_factory(config, run or {}, path)
    elif isinstance(config, FromScenario):
        client = _client_of_scenario(path.parent / config.scenario, config.client)
    else:
        assert isinstance(config, ClientConfig)
        client = _build_client(config, path)
    return client if config.privacy is None else replace(client, privacy=config.privacy)


def _build_client(config: ClientConfig, path: Path) -> Client:
    problems: list[Problem] = []
    labels = config.task.options.get("labels")
    rows = _load_all_rows(config.data, path.parent, labels, problems)
    described = {"name": config.task.name, **config.task.options}
    task, task_problems = build_task("task", None, described)
    problems += task_problems
    model = _model_factory(config.model, rows.get("train"), problems)
    if problems or task is None:
        raise Problems(str(path), problems)
    task, rows = sort_labels(task, rows)
    return Client(
        id=config.id,
        model=model,
        task=task,
        **rows,
        model_name=config.model.name.rpartition(":")[2],
        capacity=config.capacity,
        device=config.device,
        dtype=getattr(torch, config.dtype),
    )


def sort_labels(task: Task, rows: dict[str, Any]) -> tuple[Task, dict[str, Any]]:
    """The same task and rows with labels in the order of their names.

    So clients that write the same labels in another order agree on what each number means.

    Args:
        rows: what a Client takes, by the name of its field.
    """
    order = sorted(range(len(task.labels)), key=lambda i: _natural_key(task.labels[i]))
    if not task.classifies or order == sorted(order):
        return task, rows
    sorted_task = replace(task, labels=tuple(task.labels[i] for i in order))
    numbers = torch.tensor(order)
    relabelled = dict(rows)
    for name in rows.keys() - {"public"}:
        own = as_samples(rows[name])
        if isinstance(own, Tensors) and own.y is not None:
            task.check(own.y)  # in the order of the file, for the error message
            y = reorder_labels(own.y, numbers, task.multilabel)
            relabelled[name] = Tensors(own.x, y, own.index)
        elif not isinstance(own, Tensors):
            relabelled[name] = Relabelled(own, numbers, task.multilabel)
    return sorted_task, relabelled


def _natural_key(label: str) -> tuple:
    """Sorts numbers by value, so that "2" comes before "10", and before words."""
    return (0, int(label), label) if label.isdecimal() else (1, 0, label)


def _load_all_rows(
    sources: DataSources, folder: Path, labels: Any, problems: list[Problem]
) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name, source in sources.model_dump().items():
        if source is None:
            continue
        try:
            if isinstance(source, dict) or source.endswith((".csv", ".parquet")):
                columns = dict(source) if isinstance(source, dict) else {"file": source}
                if isinstance(labels, list):
                    columns.setdefault("labels", labels)
                rows[name] = _load_table(columns, folder)
            else:
                rows[name] = _load_rows(source, folder, with_labels=name != "public")
        except Exception as error:  # a function of the user's may raise anything
            problems.append((f"data.{name}", describe_error(error)))
    return rows


def _model_factory(named: Named, train: Any, problems: list[Problem]) -> Any:
    """A function without arguments that builds the encoder; None where there are problems."""
    options, model_problems = model_options("model", named)
    problems += model_problems
    if train is None or model_problems:
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


def _load_table(columns: dict[str, Any], folder: Path) -> Any:
    """Rows of a file whose columns are chosen by name."""
    if "file" not in columns:
        raise UserError(f"`file` is missing; it has: {', '.join(columns)}")
    known = inspect.signature(samples).parameters
    for name in columns:
        if name not in known and name != "file":
            raise UserError(unknown_name("field", name, [*list(known)[1:], "file"]))
    if columns.get("images") is not None:
        columns["images"] = folder / columns["images"]
    return samples(folder / columns.pop("file"), **columns)


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
