"""The public names of `unalike`: complete, lazy at run time, and typed for editors and checkers."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import unalike
from unalike.algorithms import ALGORITHMS
from unalike.tasks import TASKS

PACKAGE = Path(unalike.__file__).parent

PROGRAM = """\
import torch
from torch import nn

import unalike

unalike.Clinet("a")
unalike.FedMuscle(peeers=3)
unalike.Training(rate=0.1)

x, y = torch.zeros(8, 6), torch.arange(8) % 4
task = unalike.Classification(4)
unalike.MultiLabel(["cat", "dog"], criterion="focal")
client = unalike.Client("a", nn.Linear(6, 4), task, train=(x, y))
method: unalike.Algorithm = unalike.FedMuscle(peers=3)
result = unalike.run(method, [client], training=unalike.Training(lr=0.1, rounds=3))
"""


def names_for_type_checkers():
    """Module by name of the imports below `if TYPE_CHECKING` in unalike/__init__.py."""
    modules = {}
    for node in ast.walk(ast.parse((PACKAGE / "__init__.py").read_text())):
        if isinstance(node, ast.If) and getattr(node.test, "id", None) == "TYPE_CHECKING":
            for statement in node.body:
                modules |= {alias.name: statement.module for alias in statement.names}
    assert modules.pop("*") == "unalike.tasks"  # methods and tasks are listed in their packages
    return modules


def test_the_imports_for_checkers_the_lazy_table_and_all_agree():
    assert names_for_type_checkers() == unalike._MODULES
    assert sorted([*unalike._MODULES, "__version__"]) == sorted(unalike.__all__)
    assert {*unalike.__all__, "FedMuscle", "Regression", "Task"} <= {*dir(unalike)}


def test_every_public_name_can_be_imported():
    for name in unalike.__all__:
        assert getattr(unalike, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Clinet'"):
        _ = unalike.Clinet


def test_every_method_and_every_task_is_public():
    for kind in [*ALGORITHMS.values(), *TASKS.values()]:
        assert getattr(unalike, kind.__name__) is kind


def test_importing_the_package_does_not_import_torch():
    loaded = "import sys, unalike; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], cwd=PACKAGE.parent).returncode == 0


def test_the_package_says_that_it_is_typed():
    assert (PACKAGE / "py.typed").exists()
    assert '"py.typed"' in (PACKAGE.parent / "pyproject.toml").read_text()


def test_a_type_checker_finds_wrong_names_and_accepts_correct_code(tmp_path):
    """The first three uses in PROGRAM are mistakes; nothing below them is."""
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    # The cache of `make check`, with its options: others would have it filled anew, in a minute.
    command = [sys.executable, "-m", "mypy", str(program)]
    output = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True).stdout
    errors = [line.split("error: ")[1] for line in output.splitlines() if ": error: " in line]
    assert len(errors) == 3, output
    assert errors[0].startswith('Module has no attribute "Clinet"')
    assert errors[1].startswith('Unexpected keyword argument "peeers" for "FedMuscle"')
    assert errors[2].startswith('Unexpected keyword argument "rate" for "Training"')
