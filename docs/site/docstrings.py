"""Reads the docstrings of the package: summary, sections, and what is said of each argument."""

import inspect
import re
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Yields", "Reference", "References")
HEADING = re.compile(rf"^({'|'.join(SECTIONS)}):\s*(.*)$")
ENTRY = re.compile(r"^    ([*\w]+(?:, [*\w]+)*): ?(.*)$")


@dataclass
class Docstring:
    """A docstring taken apart.

    Attributes:
        text: what comes before the first section, and between sections.
        arguments: of "Args" and "Attributes": what is said of each name.
        sections: the other sections by name, as text.
        example: the lines of its doctest.
    """

    text: str = ""
    arguments: dict[str, str] = field(default_factory=dict)
    sections: dict[str, str] = field(default_factory=dict)
    example: str = ""


def parse(doc: str | None) -> Docstring:
    """Take a docstring apart.

    >>> parse("Adds.\\n\\nArgs:\\n    a, b: numbers,\\n        any.").arguments
    {'a': 'numbers, any.', 'b': 'numbers, any.'}
    """
    parsed = Docstring()
    text: list[str] = []
    example: list[str] = []
    section, names = "", []
    for line in inspect.cleandoc(doc or "").splitlines():
        heading = HEADING.match(line)
        entry = ENTRY.match(line)
        if heading:
            section, names = heading[1], []
            if section not in ("Args", "Attributes"):
                parsed.sections[section] = heading[2]
        elif line.startswith(">>>") or (example and line):
            example.append(line)
            section = ""
        elif section in ("Args", "Attributes") and entry:
            names = entry[1].split(", ")
            parsed.arguments |= dict.fromkeys((name.strip("*") for name in names), entry[2])
        elif section and line.startswith(" "):
            if names:
                for name in names:
                    name = name.strip("*")
                    parsed.arguments[name] = f"{parsed.arguments[name]} {line.strip()}".strip()
            elif section in parsed.sections:
                parsed.sections[section] = f"{parsed.sections[section]} {line.strip()}".strip()
        else:
            section = section if not line else ""
            text.append(line)
    parsed.text = "\n".join(text).strip()
    parsed.example = "\n".join(example)
    return parsed


def public_names() -> dict[str, Any]:
    """Everything that is documented, by the name that a user imports it by."""
    names = {f"unalike.{name}": _get("unalike", name) for name in dir(import_module("unalike"))}
    losses = import_module("unalike.losses")
    names |= {f"unalike.losses.{name}": getattr(losses, name) for name in losses.__all__}
    return {name: thing for name, thing in sorted(names.items()) if callable(thing)}


def _get(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


def parameters(thing: Any) -> dict[str, inspect.Parameter]:
    """The parameters that a user passes by name or place."""
    try:
        found = inspect.signature(thing).parameters
    except ValueError:  # a class made in C
        return {}
    return {name: found[name] for name in found if name not in ("args", "kwargs")}


def descriptions(thing: Any) -> dict[str, str]:
    """What the docstring says of each argument; of a class also those of its bases."""
    if not inspect.isclass(thing):
        return parse(thing.__doc__).arguments
    described: dict[str, str] = {}
    for base in reversed(thing.__mro__):
        if base.__module__.startswith("unalike"):
            described |= parse(base.__dict__.get("__doc__")).arguments
    return described


def undocumented(name: str, thing: Any) -> list[str]:
    """What is missing: `name` where it has no docstring of its own, `name(argument)` otherwise."""
    own = thing.__dict__.get("__doc__") if inspect.isclass(thing) else thing.__doc__
    if not own:
        return [name]
    described = descriptions(thing)
    return [f"{name}({argument})" for argument in parameters(thing) if argument not in described]
