"""YAML of settings, by the loader and dumper written in C where there is one: ten times as fast."""

from typing import Any

MAX_NODES = 1_000_000  # values that a text may stand for
MAX_DEPTH = 100  # lists and mappings inside one another; far deeper ones end the process


def load_yaml(text: str) -> Any:
    """The value that a YAML text holds. Raises yaml.YAMLError where it is none."""
    import yaml

    return construct_yaml(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def construct_yaml(text: str, loader_class: Any) -> Any:
    """The value of a YAML text, by a loader class of PyYAML.

    Raises: yaml.YAMLError where it is none, is nested too deep, or where its aliases stand for too
        many values: a few lines of them can stand for billions.
    """
    import yaml

    _check_depth(text)
    loader = loader_class(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if "*" in text and count_nodes(node, {}) > MAX_NODES:
            raise yaml.MarkedYAMLError(
                problem=f"its aliases stand for more than {MAX_NODES:,} values"
            )
        return loader.construct_document(node)
    except (ValueError, RecursionError) as error:  # a date such as 2026-99-99
        raise yaml.MarkedYAMLError(problem=str(error)) from None
    finally:
        loader.dispose()


def _check_depth(text: str) -> None:
    """Raise yaml.YAMLError for a text that is nested too deep.

    The parser goes through it step by step, whereas the loader written in C calls itself for each
    list or mapping in another, and thousands of them end the process.
    """
    import yaml

    depth = 0
    events: Any = yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    while depth <= MAX_DEPTH:
        try:
            event: Any = next(events, None)
        except yaml.YAMLError:  # the loader will come across it, too, and says it in its own words
            return
        if event is None:
            return
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
    raise yaml.MarkedYAMLError(
        problem=f"it is nested more than {MAX_DEPTH} deep", problem_mark=event.start_mark
    )


def count_nodes(node: Any, known: dict[int, float]) -> float:
    """How many values a node of PyYAML stands for, aliases followed; infinite if it holds itself.

    Args:
        known: numbers by the id of a node, of those that were counted.
    """
    if id(node) not in known:
        known[id(node)] = float("inf")  # until it is counted
        parts = node.value if isinstance(node.value, list) else []
        total = 1.0
        for part in parts:
            pair = part if isinstance(part, tuple) else (part,)
            total += sum(count_nodes(child, known) for child in pair)
        known[id(node)] = total
    return known[id(node)]


def dump_yaml(value: Any) -> str:
    """A value as YAML, its keys in their order."""
    import yaml

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return yaml.dump(value, Dumper=dumper, sort_keys=False, allow_unicode=True)
