"""The ledger adds up, leaves measurements out of totals, and is restored from its file."""

import csv

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unalike.base.errors import UserError
from unalike.base.ledger import COLUMNS, Ledger

MEASUREMENTS = frozenset({"evaluate", "describe"})

entries = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from(["ada", "ben, jr", 'c"']),
        st.sampled_from(["up", "down"]),
        st.sampled_from(["train", "align", *sorted(MEASUREMENTS)]),
        st.integers(0, 2**40),
    ),
    max_size=20,
)


def ledger_of(entries):
    ledger = Ledger(measurements=MEASUREMENTS)
    for entry in entries:
        ledger.add(*entry)
    return ledger


@given(entries)
def test_totals_are_sums_of_the_entries(entries):
    ledger = ledger_of(entries)
    for way in ("up", "down"):
        assert ledger.total(way) == sum(
            size for _, _, w, o, size in entries if w == way and o not in MEASUREMENTS
        )
        for round in range(4):
            assert ledger.total(way, round=round) == sum(
                s for r, _, w, o, s in entries if (r, w) == (round, way) and o not in MEASUREMENTS
            )
        assert ledger.total(way, client="ada", operation="evaluate") == sum(
            s for _, c, w, o, s in entries if (c, w, o) == ("ada", way, "evaluate")
        )
    assert sum(messages for messages, _ in ledger.rows.values()) == len(entries)


@given(entries, entries)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_read_restores_the_state_at_a_length_whatever_was_appended_after(tmp_path, entries, later):
    path = tmp_path / "l.csv"
    path.unlink(missing_ok=True)
    ledger = ledger_of(entries)
    length = ledger.append(path)
    then = {key: list(row) for key, row in ledger.rows.items()}
    for entry in later:
        ledger.add(*entry)
    ledger.append(path)
    back = Ledger.read(path, length, MEASUREMENTS)
    assert dict(back.rows) == then and path.stat().st_size == length["bytes"]
    assert [back.total(way) for way in ("up", "down")] == [
        ledger_of(entries).total(way) for way in ("up", "down")
    ]


def test_a_restored_ledger_can_be_continued(tmp_path):
    path = tmp_path / "l.csv"
    ledger = Ledger.read(path, ledger_of([(1, "ada", "up", "train", 5)]).append(path))
    ledger.add(1, "ada", "up", "train", 7)
    ledger.add(2, "ben", "up", "train", 1)
    assert ledger.total("up") == 13 and ledger.rows[1, "ada", "up", "train"] == [2, 12]
    assert Ledger.read(path, ledger.append(path)).rows == ledger.rows


def test_a_missing_or_truncated_file_is_a_user_error(tmp_path):
    path = tmp_path / "l.csv"
    written = ledger_of([(1, "ada", "up", "train", 5)]).append(path)
    with pytest.raises(UserError, match="missing"):
        Ledger.read(tmp_path / "other.csv", written)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"5", b"6"))
    with pytest.raises(UserError, match="was changed"):
        Ledger.read(path, written)
    path.write_bytes(data[:-1])
    with pytest.raises(UserError, match="cut short"):
        Ledger.read(path, written)


def test_asking_for_totals_adds_no_rows():
    ledger = Ledger()
    assert (
        ledger.total("up") == 0
        and ledger.total("down", 1, "nobody", "nothing") == 0
        and not ledger.rows
    )


def test_write_gives_a_sorted_table(tmp_path):
    ledger_of(
        [
            (2, "ada", "up", "train", 7),
            (1, "ben, jr", "down", "train", 5),
            (1, "ben, jr", "down", "train", 6),
        ]
    ).write(tmp_path / "l.csv")
    with (tmp_path / "l.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows == [
        list(COLUMNS),
        ["1", "ben, jr", "down", "train", "2", "11"],
        ["2", "ada", "up", "train", "1", "7"],
    ]
