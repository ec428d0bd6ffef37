"""The rooms of the package: imports point one way, every file says what it is, and none is too long to read."""

import ast
import sys
from pathlib import Path

import pytest

import unalike

ROOT = Path(unalike.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
NAMES = {
    path: ".".join(("unalike", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
        ".__init__"
    )
    for path in FILES
}


def imports(path):
    """Modules a file imports, wherever in it; what is only for the type checker is left out."""
    found = set()

    def visit(node):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            inside = NAMES[path] + (".__init__" if path.name == "__init__.py" else "")
            base = inside.rsplit(".", node.level)[0] if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            found.add(module)
            found.update(
                f"{module}.{alias.name}"
                for alias in node.names
                if f"{module}.{alias.name}" in NAMES.values()
            )
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def ours(path):
    return {
        module.removeprefix("unalike.") for module in imports(path) if module.startswith("unalike")
    }


def room(module):
    return module.split(".")[0]


# who may know whom, by the room's name; "unalike" itself stands for the version
MAY = {
    "message": set(),
    "randomness": set(),
    "errors": set(),
    "conditions": {"errors"},
    "ledger": {"errors"},
    "settings": {"errors"},
    "playing": set(),
    "training": {"playing", "settings"},
    "terms": {"randomness", "settings"},
    "losses": {"losses"},
    "matching": {"matching"},
    "tasks": {"losses", "tasks"},
    "models": {"models", "errors"},
    "data": {"data", "errors", "tasks", "randomness", "training"},
    "client": {"data", "tasks", "privacy", "randomness", "message"},
    "engine": {"client", "message"},
    "replay": {"engine", "errors"},
    "forms": {"message"},
    "federation": {
        "client",
        "data",
        "engine",
        "forms",
        "terms",
        "ledger",
        "message",
        "randomness",
        "replay",
        "training",
    },
    "safeguard": {"randomness", "training"},
    "privacy": {"errors", "message", "randomness", "settings"},
    "operations": {"ledger", "privacy"},
    "clusters": {"client", "data", "federation", "models", "randomness", "tasks"},
    "algorithm": {
        "operations",
        "client",
        "clusters",
        "data",
        "forms",
        "ledger",
        "message",
        "models",
        "privacy",
        "randomness",
        "safeguard",
        "tasks",
        "training",
    },
    "alike": {
        "algorithm",
        "averaging",
        "federation",
        "message",
        "operations",
        "safeguard",
        "tasks",
    },
    "averaging": {
        "operations",
        "algorithm",
        "clusters",
        "federation",
        "forms",
        "message",
        "client",
        "randomness",
        "tasks",
        "training",
    },
    "prompting": {
        "operations",
        "algorithm",
        "averaging",
        "client",
        "data",
        "federation",
        "forms",
        "message",
        "models",
        "training",
    },
    "unlabelled": {
        "operations",
        "algorithm",
        "data",
        "federation",
        "forms",
        "randomness",
        "tasks",
        "training",
    },
    "joint": {"federation", "forms", "operations", "unlabelled"},
    "opinions": {"federation", "message", "operations", "safeguard", "tasks", "unlabelled"},
    "narrowing": {
        "operations",
        "algorithm",
        "forms",
        "averaging",
        "client",
        "errors",
        "federation",
        "message",
        "models",
        "randomness",
        "training",
    },
    "engines": {"engines", "forms", "client", "engine", "errors", "message", "randomness"},
    "report": {"report"},
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: NAMES[path])
def test_imports_point_one_way(path):
    here = room(NAMES[path].removeprefix("unalike."))
    if here in MAY:
        known = {room(module) for module in ours(path)} - {"unalike"}
        assert known <= MAY[here], (
            f"{NAMES[path]} may know {sorted(MAY[here])}, imports {sorted(known - MAY[here])}"
        )


def test_methods_know_no_engine_run_or_scenario():
    for path in (ROOT / "algorithms").glob("*.py"):
        assert not {room(m) for m in ours(path)} & {
            "engines",
            "runs",
            "scenarios",
            "cli",
            "report",
            "benches",
        }, path


def test_nobody_but_lists_names_a_method():
    """A method is one file and one line: elsewhere only local training, the reference, is known by name."""
    for path in FILES:
        named = {m for m in ours(path) if m.startswith("algorithms.")} - {"algorithms.local"}
        assert not named or room(NAMES[path].removeprefix("unalike.")) in (
            "algorithms",
            "benches",
        ), f"{path} names {named}"


def test_losses_and_matching_import_only_torch_and_solvers():
    allowed = {"torch", "ot", "scipy", "unalike"} | set(sys.stdlib_module_names)
    for folder in ("losses", "matching"):
        for path in (ROOT / folder).rglob("*.py"):
            assert {room(m) for m in imports(path)} <= allowed, path


def test_the_report_reads_folders_and_imports_nothing_heavy():
    for path in (ROOT / "report").rglob("*.py"):
        assert not {room(m) for m in imports(path)} & {"torch", "transformers"}, path


@pytest.mark.parametrize("path", FILES, ids=lambda path: NAMES[path])
def test_every_file_opens_with_what_it_is_and_can_be_read_in_one_go(path):
    text = path.read_text()
    said = ast.get_docstring(ast.parse(text))
    assert said and said.split("\n")[0].strip().endswith((".", ":", ",", ";")) and len(said) > 15, (
        f"{path} does not open with a sentence"
    )
    assert len(text.splitlines()) <= 400, (
        f"{path} has {len(text.splitlines())} lines: split it by topic"
    )
