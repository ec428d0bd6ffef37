"""What the documentation promises: docstrings with arguments, whole links, pages within reach."""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs" / "site"))

import docstrings  # noqa: E402

PUBLIC = docstrings.public_names()


def test_every_public_name_has_a_docstring_that_describes_each_argument():
    missing = [
        gap for name, thing in PUBLIC.items() for gap in docstrings.undocumented(name, thing)
    ]
    assert missing == []


def test_a_missing_argument_is_found():
    def half(a, b):
        """Adds.

        Args:
            a: a number.
        """

    class Bare:
        pass

    assert docstrings.undocumented("half", half) == ["half(b)"]
    assert docstrings.undocumented("Bare", Bare) == ["Bare"]


def test_results_have_a_verdict_a_command_and_the_date_of_their_measurement():
    rows = re.findall(r"^\| (?!what |---)(.*) \|$", (ROOT / "docs/results.md").read_text(), re.M)
    assert len(rows) > 20
    for row in rows:
        what, number, _, verdict, made, command = row.split(" | ")
        assert what and number and "`" in command, row
        assert set(re.split("[;,] ", verdict)) <= {"met", "missed", "no target"}, row
        date, path = re.fullmatch(r"\[([-\d]+)\]\(\.\./(results/.*\.json)\)", made).groups()
        assert json.loads((ROOT / path).read_text()).get("date", date) == date, row
