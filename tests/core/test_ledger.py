"""The ledger adds up, leaves out what is free, and comes back from its file and its lists as it was."""

import csv
import json

from hypothesis import given
from hypothesis import strategies as st

from unalike.ledger import COLUMNS, FREE, Ledger

entries = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["ada", "ben, jr", 'c"'] ), st.sampled_from(["up", "down"]),
                             st.sampled_from(["train", "align", *FREE]), st.integers(0, 2**40)), max_size=20)


def filled(entries):
    ledger = Ledger()
    for entry in entries:
        ledger.add(*entry)
    return ledger


@given(entries)
def test_totals_are_sums_of_what_was_added(entries):
    ledger = filled(entries)
    for way in ("up", "down"):
        assert ledger.total(way) == sum(size for _, _, w, o, size in entries if w == way and o not in FREE)
        for round in range(4):
            assert ledger.total(way, round=round) == sum(s for r, _, w, o, s in entries if (r, w) == (round, way) and o not in FREE)
        assert ledger.total(way, client="ada", operation="evaluate") == sum(
            s for _, c, w, o, s in entries if (c, w, o) == ("ada", way, "evaluate"))
    assert sum(messages for messages, _ in ledger.rows.values()) == len(entries)


@given(entries)
def test_it_comes_back_as_it_was(entries):
    ledger = filled(entries)
    assert dict(Ledger.from_lists(json.loads(json.dumps(ledger.as_lists()))).rows) == dict(ledger.rows)


def test_it_goes_on_after_coming_back():
    ledger = Ledger.from_lists(filled([(1, "ada", "up", "train", 5)]).as_lists())
    ledger.add(1, "ada", "up", "train", 7)
    ledger.add(2, "ben", "up", "train", 1)
    assert ledger.total("up") == 13 and ledger.rows[1, "ada", "up", "train"] == [2, 12]


def test_asking_writes_nothing():
    ledger = Ledger()
    assert ledger.total("up") == 0 and ledger.total("down", 1, "nobody", "nothing") == 0 and not ledger.rows


def test_the_file_is_a_table_in_order(tmp_path):
    filled([(2, "ada", "up", "train", 7), (1, "ben, jr", "down", "train", 5), (1, "ben, jr", "down", "train", 6)]).write(tmp_path / "l.csv")
    with (tmp_path / "l.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows == [list(COLUMNS), ["1", "ben, jr", "down", "train", "2", "11"], ["2", "ada", "up", "train", "1", "7"]]
