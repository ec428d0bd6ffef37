"""JSON from files that somebody else may have written."""

import json
from typing import Any

MAX_DEPTH = 100  # lists and mappings inside one another; what we write has about ten


def parse_json(text: str | bytes) -> Any:
    """Return the value that a JSON text holds.

    Raises: ValueError where it is none, or is nested so deep that reading it on could overflow
        the stack.
    """
    too_deep = f"it is nested more than {MAX_DEPTH} deep"
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(too_deep) from None
    opening = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    if sum(map(text.count, opening)) > MAX_DEPTH and is_deeper(value, MAX_DEPTH):  # type: ignore[arg-type]
        raise ValueError(too_deep)
    return value


def is_deeper(value: Any, depth: int) -> bool:
    """Return whether more lists and mappings than `depth` are inside one another.

    >>> is_deeper([{"a": [1]}], 3), is_deeper([{"a": [1]}], 2)
    (False, True)
    """
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(depth):
        inner = []
        for parent in level:
            children = parent.values() if isinstance(parent, dict) else parent
            inner += [child for child in children if isinstance(child, dict | list)]
        level = inner
    return bool(level)
