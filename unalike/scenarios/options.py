"""Options of datasets, models, partitions, tasks, engines and methods.

Options are the parameters or fields of the thing they belong to. Each function here returns them
converted to their types, without those that have problems, and the problems.
"""

import dataclasses
import inspect
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BeforeValidator, ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from unalike.base.errors import Problem, UserError, closest_name, suggest_name
from unalike.base.registry import find_named, import_object, is_own_name, name_problem
from unalike.base.settings import describe_errors, reject_bool
from unalike.data import DATASETS, PARTITIONS
from unalike.engines import engine_options as known_engine_options
from unalike.models import ENCODERS
from unalike.scenarios.schema import Count, Data, Named
from unalike.tasks import TASKS, Task

Options = tuple[dict[str, Any], list[Problem]]

# Parameters of partitions that are not set by the user: the rows, their labels or features, how
# many clients share them, and the random generator.
PARTITION_INPUTS = {"rows", "sizes_or_clients", "y", "features", "clients", "generator"}


def dataset_options(path: str, data: Data) -> Options:
    """Check the options of a dataset: all parameters of its loader but the folder."""
    try:
        loader = find_named("dataset", data.name, DATASETS)
    except UserError as error:
        return {}, [(f"{path}.name", str(error))]
    return function_options(
        f"{path}.options", data.name, data.options, loader, inputs={"folder"}, more={}
    )


def build_task(
    path: str, default: Task | None, values: Mapping[str, Any]
) -> tuple[Task | None, list[Problem]]:
    """The task that a file describes; None where there are problems.

    Args:
        path: where it is described.
        default: the dataset's own task; None if there is none, so that a name is required.
        values: options of the task. A `name` chooses another task than the default, which gets the
            same labels; `criterion` and `score` may be `module:name`.
    """
    values = dict(values)
    kind: type[Task] = type(default) if default is not None else Task
    try:
        if "name" in values:
            kind = _task_class(str(values.pop("name")))
            if default is not None:
                values.setdefault("labels", default.labels)
    except UserError as error:
        return None, [(f"{path}.name", str(error))]
    for function in ("criterion", "score"):
        if is_own_name(values.get(function)):
            try:
                values[function] = import_object(values[function])
            except UserError as error:
                return None, [(f"{path}.{function}", str(error))]
    known = field_types(kind)
    if default is not None and kind is type(default):
        known.pop("labels")  # the dataset sets them
    renamed = {"loss": "criterion", "metric": "score"}
    labels = {"labels": values.pop("labels")} if "labels" in values and "labels" in known else {}
    options, problems = convert(path, f"A {kind.name} task", known, values, renamed)
    if problems:
        return None, problems
    try:
        if default is not None and kind is type(default):
            return dataclasses.replace(default, **options), []
        return kind(**labels, **options), []
    except (TypeError, ValueError) as error:
        return None, [(path, str(error))]


def _task_class(name: str) -> type[Task]:
    kind = find_named("task", name, TASKS)
    if not isinstance(kind, type) or not issubclass(kind, Task):
        raise UserError(f"{name} is no task: expected a subclass of unalike.Task, got {kind!r}")
    return kind


def field_types(kind: type) -> dict[str, Any]:
    """Types of a dataclass's fields by name, `Any` where they cannot be checked."""
    hints: dict[str, Any] = {}
    fields = dataclasses.fields(kind)
    if any(isinstance(field.type, str) for field in fields):  # from __future__ import annotations
        try:
            hints = get_type_hints(kind, include_extras=True)
        except NameError:
            hints = {field.name: Any for field in fields}
    return {field.name: checkable(hints.get(field.name, field.type)) for field in fields}


def checkable(kind: Any) -> Any:
    """A type as it is, or `Any` where pydantic cannot check values of it."""
    if kind is inspect.Parameter.empty or isinstance(kind, str):
        return Any
    try:
        TypeAdapter(kind, config=ConfigDict())
    except PydanticUserError:
        return Any
    return kind


def model_options(path: str, named: Named) -> Options:
    """Check the options of a model: all parameters of its encoder but the shape of the input."""
    try:
        encoder = find_named("model", named.name, ENCODERS)
    except UserError as error:
        return {}, [(f"{path}.name", str(error))]
    return function_options(path, named.name, named.options, encoder, inputs={"shape"}, more={})


def partition_options(path: str, named: Named) -> Options:
    """Check the options of a partition.

    Besides its own parameters: `by`, the target whose labels it looks at; `of`, whether it looks at
    inputs or labels; `encoder`, the model that computes the features it looks at; `clients`, among
    how many clients it deals out rows where only the first of them take part.
    """
    try:
        function = find_named("partition", named.name, PARTITIONS)
    except UserError as error:
        return {}, [(f"{path}.name", str(error))]
    parameters = inspect.signature(function).parameters
    more: dict[str, Any] = {}
    if "y" in parameters:
        more["by"] = str
    elif "features" in parameters:
        more |= {"encoder": str, "of": Literal["inputs", "labels"], "by": str}
    if "clients" in parameters:
        more["clients"] = Count
    options, problems = function_options(
        path, named.name, named.options, function, PARTITION_INPUTS, more
    )
    problem = name_problem("model", options["encoder"], ENCODERS) if "encoder" in options else None
    if problem is not None:
        problems.append((f"{path}.encoder", problem))
    if options.get("of") == "labels" and "encoder" in options:
        text = "computes features of inputs, and `of: labels` clusters labels: leave one out."
        problems.append((f"{path}.encoder", text))
    return options, problems


def engine_options(named: Named, workers: int) -> Options:
    """Check the options of an engine.

    Args:
        workers: the scenario's `workers`, short for `engine.workers`; 0: not set.
    """
    try:
        known = known_engine_options(named.name)
    except UserError as error:
        return {}, [("engine.name", str(error))]
    options, problems = convert("engine", named.name, known, named.options)
    if workers and "workers" not in known:
        problems.append(("workers", f"the engine {named.name} has none; leave them out."))
    elif workers:
        options.setdefault("workers", workers)
    return options, problems


def function_options(
    path: str,
    owner: str,
    values: Mapping[str, Any],
    function: Any,
    inputs: set[str],
    more: Mapping[str, Any],
) -> Options:
    """Check options that are parameters of a function.

    Args:
        owner: the function's name in the file.
        values: the options, as they are in the file.
        inputs: parameters that are not options.
        more: names and types of options that are not parameters.
    """
    try:
        parameters = dict(inspect.signature(function, eval_str=True).parameters)
    except NameError:  # annotations of a user's function that cannot be read
        parameters = dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}, [(f"{path}.name", f"{owner} is no function or class, got {function!r}.")]
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    takes_any = any(parameter.kind is variable[0] for parameter in parameters.values())
    for name, parameter in list(parameters.items()):
        if name in inputs or parameter.kind in variable:
            del parameters[name]
    known = {name: checkable(parameter.annotation) for name, parameter in parameters.items()}
    if takes_any:
        known = dict.fromkeys(values, Any) | known
    options, problems = convert(path, owner, known | dict(more), values)
    # A required option that is only misspelt is not reported as missing, too.
    meant = {closest_name(name, parameters) for name in values}
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in meant:
            problems.append((f"{path}.{name}", "is missing."))
    return options, problems


def convert(
    path: str,
    owner: str,
    known: Mapping[str, Any],
    values: Mapping[str, Any],
    renamed: Mapping[str, str] | None = None,
) -> Options:
    """Convert values to their types.

    Args:
        path: where the values are in the file.
        owner: what they belong to, for error messages.
        known: names and types of all options there are.
        renamed: former names of options and their present ones, for error messages.
    """
    options: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, value in values.items():
        if renamed and name in renamed:
            problems.append((f"{path}.{name}", f'"{name}" is called "{renamed[name]}" now.'))
            continue
        if name not in known:
            fields = f"It has: {', '.join(known)}." if known else "It has none."
            text = f'{owner} has no field "{name}".{suggest_name(name, known)} {fields}'
            problems.append((f"{path}.{name}", text))
            continue
        try:
            options[name] = convert_value(value, known[name])
        except ValidationError as error:
            details = error.errors()
            location = [path, name]
            if len(details) == 1 and details[0]["loc"]:  # one entry of a list
                location += [str(part) for part in details[0]["loc"]]
                value = details[0]["input"]
            problems.append((".".join(location), describe_errors(details, value)))
    return options, problems


def convert_value(value: Any, kind: Any) -> Any:
    """Convert a value to a type. Raises: pydantic.ValidationError."""
    check = BeforeValidator(partial(reject_bool, annotation=kind))
    adapter = TypeAdapter(Annotated[kind, check], config=ConfigDict(allow_inf_nan=False))
    return adapter.validate_python(value)
