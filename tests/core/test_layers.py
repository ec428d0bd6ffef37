"""The layers of the package: each imports only those before it, lazily or for types too, and no module stands outside."""

import ast
from pathlib import Path

import pytest

import unalike

LAYERS = (
    "base", "losses", "training", "tasks", "data", "models", "matching", "core", "methods",
    "algorithms", "engines", "report", "tracking", "scenarios", "runs", "cross_silo", "cli",
)  # fmt: skip
ROOT = Path(unalike.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
INNER = [path for path in FILES if path.parent != ROOT]


def imported_layers(path):
    """The packages of ours that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: write imports in full"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            modules = names if node.module == "unalike" else [node.module]
        found |= {name.split(".")[1] for name in modules if name and name.startswith("unalike.")}
    return found


@pytest.mark.parametrize("path", INNER, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_layer_imports_only_those_before_it(path):
    layer = path.relative_to(ROOT).parts[0]
    allowed = set(LAYERS[: LAYERS.index(layer) + 1])
    assert imported_layers(path) <= allowed


def test_no_module_stands_outside_the_layers():
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py"}
    assert {path.name for path in ROOT.iterdir() if path.is_dir()} - {"__pycache__"} == set(LAYERS)


def test_every_file_says_what_it_is():
    undocumented = [str(p) for p in FILES if ast.get_docstring(ast.parse(p.read_text())) is None]
    assert undocumented == []


def test_no_layer_but_the_algorithms_names_a_method():
    """Methods are known by the list in `unalike.algorithms`; nobody else asks which one is running."""
    methods = {path.stem for path in (ROOT / "algorithms").glob("*.py")} - {"__init__", "local"}
    for path in INNER:
        if path.relative_to(ROOT).parts[0] == "algorithms":
            continue
        strings = {
            node.value
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        assert not strings & methods, f"{path} names {strings & methods}"


def test_the_core_names_no_single_task():
    """What one task needs is in its own file: the core imports the base class and the list."""
    allowed = {"unalike.tasks", "unalike.tasks.task"}
    names = {"find_task", "TASKS", "TRAITS", "Task", "UNKNOWN"}
    for path in (ROOT / "core").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("unalike.tasks"):
                assert node.module in allowed and {a.name for a in node.names} <= names, path
