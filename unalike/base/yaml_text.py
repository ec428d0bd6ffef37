"""YAML of settings, by the loader and dumper written in C where there is one: ten times as fast."""

from typing import Any

MAX_NODES = 1_000_000  # values that a text may stand for


def load_yaml(text: str) -> Any:
    """The value that a YAML text holds. Raises yaml.YAMLError where it is none."""
    import yaml

    return construct_yaml(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def construct_yaml(text: str, loader_class: Any) -> Any:
    """The value of a YAML text, by a loader class of PyYAML.

    Raises: yaml.YAMLError where it is none, or where its aliases stand for too many values: a few
        lines of them can stand for billions.
    """
    import yaml

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
    finally:
        loader.dispose()


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
