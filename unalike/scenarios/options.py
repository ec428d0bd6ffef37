"""Options of datasets, models, partitions, tasks, engines and methods.

Options are the parameters or fields of the thing they belong to. Each function here returns them
converted to their types, without those that have problems, and the problems.
"""

import dataclasses
import inspect
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from unalike.base.errors import Problem, UserError, closest_name, suggest_name, unknown_name
from unalike.base.settings import describe_errors, reject_bool
from unalike.data import DATASETS, PARTITIONS
from unalike.engines import engine_options as known_engine_options
from unalike.models import ENCODERS
from unalike.scenarios.schema import Count, Data, Named
from unalike.tasks import Task

Options = tuple[dict[str, Any], list[Problem]]

# Parameters of partitions that are not set by the user: the rows, their labels or features, how
# many clients share them, and the random generator.
PARTITION_INPUTS = {"rows", "sizes_or_clients", "y", "features", "clients", "generator"}


def dataset_options(path: str, data: Data) -> Options:
    """Check the options of a dataset: all parameters of its loader but the first, the folder."""
    if data.name not in DATASETS:
        return {}, [(f"{path}.name", unknown_name("dataset", data.name, DATASETS))]
    _, *parameters = inspect.signature(DATASETS[data.name]).parameters.values()
    known = {parameter.name: parameter.annotation for parameter in parameters}
    return convert(f"{path}.options", data.name, known, data.options)


def task_options(path: str, task: Task, values: Mapping[str, Any]) -> Options:
    """Check the options of a task: all fields of it but its labels, which the dataset sets."""
    fields = [field for field in dataclasses.fields(task) if field.name != "labels"]
    known = {field.name: field.type for field in fields}
    return convert(path, f"A {task.name} task", known, values)


def model_options(path: str, named: Named) -> Options:
    """Check the options of a model: all parameters of its encoder but the shape of the input."""
    if named.name not in ENCODERS:
        return {}, [(f"{path}.name", unknown_name("model", named.name, ENCODERS))]
    return _function_options(path, named, ENCODERS[named.name], inputs={"shape"}, more={})


def partition_options(path: str, named: Named) -> Options:
    """Check the options of a partition.

    Besides its own parameters: `by`, the target whose labels it looks at; `encoder`, the model
    that computes the features it looks at; `clients`, among how many clients it deals out rows
    where only the first of them take part.
    """
    if named.name not in PARTITIONS:
        return {}, [(f"{path}.name", unknown_name("partition", named.name, PARTITIONS))]
    function = PARTITIONS[named.name]
    parameters = inspect.signature(function).parameters
    more: dict[str, Any] = {}
    if "y" in parameters:
        more["by"] = str
    elif "features" in parameters:
        more["encoder"] = str
    if "clients" in parameters:
        more["clients"] = Count
    options, problems = _function_options(path, named, function, PARTITION_INPUTS, more)
    if options.get("encoder", "mlp") not in ENCODERS:
        problems.append((f"{path}.encoder", unknown_name("model", options["encoder"], ENCODERS)))
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


def _function_options(
    path: str, named: Named, function: Any, inputs: set[str], more: Mapping[str, Any]
) -> Options:
    """Check options that are parameters of a function.

    Args:
        inputs: parameters that are not options.
        more: names and types of options that are not parameters.
    """
    parameters = dict(inspect.signature(function).parameters)
    for name in inputs & parameters.keys():
        del parameters[name]
    known = {name: parameter.annotation for name, parameter in parameters.items()}
    options, problems = convert(path, named.name, known | dict(more), named.options)
    # A required option that is only misspelt is not reported as missing, too.
    meant = {closest_name(name, parameters) for name in named.options}
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
