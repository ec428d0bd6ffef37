"""What all settings share: no unknown names, no infinities, no truth taken for a number, and what is wrong in our words. Knows none."""

import re
import reprlib
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from unalike.base.errors import Problem, Problems, suggest_name, unknown_name

short = reprlib.Repr()  # a file may hold more than a line can show
short.maxstring = short.maxother = 60
short.maxlevel = 2


class Settings(BaseModel):
    """Named values that are checked where they are given, and then stay."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    RENAMED: ClassVar[
        dict[str, str]
    ] = {}  # fields that had another name, for the error that says so

    def __init__(self, **given: Any):
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise Problems(
                type(self).__name__, [to_problem(each, type(self)) for each in error.errors()]
            ) from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]     # inside a file, pydantic says where in it

    @field_validator("*", mode="before")
    @classmethod
    def _numbers(cls, value: Any, info: ValidationInfo) -> Any:
        return reject_bool(value, cls.model_fields[str(info.field_name)].annotation)


def reject_bool(value: Any, kind: Any) -> Any:
    """The value as it is, unless true or false stands where only numbers may: pydantic, like Python, takes them for 1 and 0."""
    known = nested_types(kind)
    if contains_bool(value) and {int, float} & set(known) and not {bool, Any} & set(known):
        raise PydanticCustomError(
            "number_type", "must be a number" if float in known else "must be a whole number"
        )
    return value


def contains_bool(value: Any) -> bool:
    return isinstance(value, bool) or (
        isinstance(value, (list, tuple)) and any(map(contains_bool, value))
    )


def nested_types(annotation: Any) -> list[Any]:
    """A type and all it is made of."""
    inside = getattr(annotation, "__args__", ())
    return [annotation, *(t for a in inside for t in nested_types(a))]


def to_problem(error: Any, owner: type[BaseModel]) -> Problem:
    """Where, and a sentence, for what pydantic found in settings of a kind."""
    where = ".".join(str(part) for part in error["loc"])
    name = str(error["loc"][-1])
    if error["type"] == "extra_forbidden" and name in getattr(owner, "RENAMED", {}):
        return where, f'"{name}" is called "{owner.RENAMED[name]}" now.'  # type: ignore[attr-defined]
    if error["type"] == "extra_forbidden":
        return where, unknown_name("field", name, owner.model_fields)
    return where, describe_errors([error], error["input"])


def describe_errors(errors: list[Any], value: Any) -> str:
    """What a value must be, and what it was; where several kinds are allowed, each of them."""
    if errors[0]["type"] == "missing":
        return "is missing."
    kinds = list(dict.fromkeys(requirement(error) for error in errors))
    if all(kind.startswith("must be ") for kind in kinds):
        said = "must be " + " or ".join(kind.removeprefix("must be ") for kind in kinds)
    else:
        said = kinds[0]
    names = [
        name
        for error in errors
        if error["type"] == "literal_error"
        for name in re.findall("'(.*?)'", error["ctx"]["expected"])
    ]
    return f"{said}, got {'nothing' if value is None else short.repr(value)}.{suggest_name(value, names)}"


def requirement(error: Any) -> str:
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
        case "too_short":
            return f"must be a list of {context['min_length']} or more"
        case "int_type" | "int_parsing" | "int_from_float" | "int_parsing_size":
            return "must be a whole number"
        case "float_type" | "float_parsing":
            return "must be a number"
        case "finite_number":
            return "must be a finite number"
        case "bool_type" | "bool_parsing":
            return "must be true or false"
        case "string_type":
            return "must be text"
        case "list_type" | "sequence_str" | "is_instance_of":
            return "must be a list"
        case "model_type" | "dict_type":
            named = isinstance(error["input"], str) and context.get("class_name") in (
                "Named",
                "Data",
            )
            return "must be a mapping of names to values" + (
                f": write {{name: {error['input']}}}" if named else ""
            )
        case "invalid_key":
            return "must be a word"
        case _:
            message = error["msg"].removeprefix("Input ")
            return message[0].lower() + message[1:]
