"""Base class of all settings: unknown names, infinities and booleans in place of numbers are
rejected, and pydantic's errors become plain sentences."""

import re
import reprlib
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from unalike.base.errors import Problem, Problems, suggest_name, unknown_name

# Shortens values in error messages: a file may hold more than a line can show.
short = reprlib.Repr()
short.maxstring = short.maxother = 60
short.maxlevel = 2

# What a value must be, by the type of pydantic's error.
REQUIREMENTS = {
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing_size": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    "list_type": "must be a list",
    "sequence_str": "must be a list",
    "is_instance_of": "must be a list",
    "invalid_key": "must be a word",
    "callable_type": "must be module:name of a function",
}

# The same where the requirement has a parameter: (key in the error's context, text).
BOUNDS = {
    "greater_than": ("gt", "must be above {:g}"),
    "greater_than_equal": ("ge", "must be at least {:g}"),
    "less_than": ("lt", "must be below {:g}"),
    "less_than_equal": ("le", "must be at most {:g}"),
    "literal_error": ("expected", "must be {}"),
    "too_short": ("min_length", "must be a list of {} or more"),
}


class Settings(BaseModel):
    """Named values that are validated when they are created and cannot be changed after.

    Raises: Problems, with every mistake at once, when created from Python.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    # Former names of fields and their present ones, for the error message.
    RENAMED: ClassVar[dict[str, str]] = {}

    def __init__(self, **values: Any):
        try:
            super().__init__(**values)
        except ValidationError as error:
            problems = [to_problem(detail, type(self)) for detail in error.errors()]
            raise Problems(type(self).__name__, problems) from None

    # Inside a file pydantic must not call this __init__: it reports where in the file itself.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @field_validator("*", mode="before")
    @classmethod
    def _reject_bool(cls, value: Any, info: ValidationInfo) -> Any:
        return reject_bool(value, cls.model_fields[str(info.field_name)].annotation)


def reject_bool(value: Any, annotation: Any) -> Any:
    """Return the value unchanged; raise if it is (or contains) a bool where only numbers may be.

    Without this pydantic, like Python, would accept true and false as 1 and 0.
    """
    allowed = set(nested_types(annotation))
    wants_number = bool({int, float} & allowed)
    accepts_bool = bool({bool, Any} & allowed)
    if contains_bool(value) and wants_number and not accepts_bool:
        kind = "a number" if float in allowed else "a whole number"
        raise PydanticCustomError("number_type", f"must be {kind}")  # type: ignore[arg-type]
    return value


def contains_bool(value: Any) -> bool:
    """Whether a value is a bool, or a list with a bool at any depth."""
    if isinstance(value, (list, tuple)):
        return any(map(contains_bool, value))
    return isinstance(value, bool)


def nested_types(annotation: Any) -> list[Any]:
    """An annotation and all types it is made of.

    >>> nested_types(list[int])
    [list[int], <class 'int'>]
    """
    types = [annotation]
    for part in getattr(annotation, "__args__", ()):
        types += nested_types(part)
    return types


def to_problem(error: Any, owner: type[BaseModel]) -> Problem:
    """One of pydantic's error details about settings of class `owner`, as (path, sentence)."""
    path = ".".join(str(part) for part in error["loc"])
    if error["type"] != "extra_forbidden":
        return path, describe_errors([error], error["input"])
    name = str(error["loc"][-1])
    renamed: dict[str, str] = getattr(owner, "RENAMED", {})
    if name in renamed:
        return path, f'"{name}" is called "{renamed[name]}" now.'
    return path, unknown_name("field", name, owner.model_fields)


def describe_errors(errors: list[Any], value: Any) -> str:
    """What a value must be and what it was; where several types are allowed, all of them.

    Args:
        errors: pydantic's error details, one for each type that was tried.
        value: the rejected value.
    """
    if errors[0]["type"] == "missing":
        return "is missing."
    requirements = list(dict.fromkeys(requirement(error) for error in errors))
    if all(text.startswith("must be ") for text in requirements):
        text = "must be " + " or ".join(text.removeprefix("must be ") for text in requirements)
    else:
        text = requirements[0]
    choices: list[str] = []
    for error in errors:
        if error["type"] == "literal_error":
            choices += re.findall("'(.*?)'", error["ctx"]["expected"])
    shown = "nothing" if value is None else short.repr(value)
    return f"{text}, got {shown}.{suggest_name(value, choices)}"


def requirement(error: Any) -> str:
    """What a value must be, by one of pydantic's error details."""
    kind = error["type"]
    context = error.get("ctx", {})
    if kind in REQUIREMENTS:
        return REQUIREMENTS[kind]
    if kind in BOUNDS:
        key, text = BOUNDS[kind]
        return text.format(context[key])
    if kind in ("model_type", "dict_type"):
        text = "must be a mapping of names to values"
        if isinstance(error["input"], str) and context.get("class_name") in ("Named", "Data"):
            text += f": write {{name: {error['input']}}}"
        return text
    message = error["msg"].removeprefix("Input ")
    return message[0].lower() + message[1:]
