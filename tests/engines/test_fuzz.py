"""A share of `make fuzz`: hostile inputs at every door."""

from fuzz import fuzz
from test_hostile import MANY


def test_no_hostile_input_crashes_or_enters():
    counts = fuzz(100_000 if MANY else 1500)
    assert len(counts) == 9 and min(counts.values()) > 3
