"""What pydantic finds, in our words. Knows nothing of scenarios."""

import re
import reprlib
from typing import Any

from unalike.errors import nearest

short = reprlib.Repr()      # a file may hold more than a line can show
short.maxstring = short.maxother = 60
short.maxlevel = 2


def sentence(errors: list[Any], value: Any) -> str:
    """What a value must be, and what it was; where several kinds are allowed, each of them."""
    if errors[0]["type"] == "missing":
        return "is missing."
    kinds = list(dict.fromkeys(plain(error) for error in errors))
    if all(kind.startswith("must be ") for kind in kinds):
        said = "must be " + " or ".join(kind.removeprefix("must be ") for kind in kinds)
    else:
        said = kinds[0]
    names = [name for error in errors if error["type"] == "literal_error" for name in re.findall("'(.*?)'", error["ctx"]["expected"])]
    return f"{said}, got {'nothing' if value is None else short.repr(value)}.{nearest(value, names)}"


def plain(error: Any) -> str:
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
            named = isinstance(error["input"], str) and context.get("class_name") in ("Named", "Data")
            return "must be a mapping of names to values" + (f": write {{name: {error['input']}}}" if named else "")
        case "invalid_key":
            return "must be a word"
        case _:
            message = error["msg"].removeprefix("Input ")
            return message[0].lower() + message[1:]
