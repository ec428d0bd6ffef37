"""What is drawn while a run goes: stages by their name, counts that are true, misses in few words."""

import io

import pytest
from rich.console import Console
from rich.progress import Progress

from unalike.report.progress import Shown


@pytest.fixture
def shown():
    """Rounds: 20. `said()` is what was printed so far, `bar()` the only bar there is."""
    console = Console(file=io.StringIO(), width=200)
    made = Shown(Progress(console=console, disable=True), console)
    made.said, made.bar = console.file.getvalue, lambda: made.bars.tasks[0]
    made("start", rounds=20, algorithm="fedmuscle")
    return made


def sent(size=1_500_000):
    return {"up": size, "down": size}


def test_each_stage_has_its_name_and_only_rounds_are_counted(shown):
    shown("stage", text="alone", round=0)
    shown("alone", round=20)
    assert (shown.bar().description, shown.bar().completed, shown.bar().fields["count"]) == (
        "alone",
        20,
        "20 of 20 rounds",
    )
    shown("stage", text="fedmuscle", round=3)
    assert (shown.bar().description, shown.bar().total, shown.bar().fields["count"]) == (
        "fedmuscle",
        20,
        "3 of 20 rounds",
    )
    shown("round", round=4, bytes=sent())
    assert shown.bar().fields["doing"] == "1.5 MB up, 1.5 MB down so far"
    shown("stage", text="the report")
    assert (shown.bar().total, shown.bar().fields["count"]) == (None, "") and len(
        shown.bars.tasks
    ) == 1


def test_visits_stand_in_for_rounds_where_there_are_none(shown):
    shown("stage", text="afmcc", round=0)
    for instant in range(1, 229):
        shown("round", round=instant, progress=instant / 12, bytes=sent())
    assert (
        shown.bar().fields["count"] == "19.0 of 20 visits a client" and shown.bar().completed == 19
    )
    assert len(shown.said().splitlines()) == 9


def test_who_missed_a_round_is_counted_and_who_failed_is_named(shown):
    shown("stage", text="fedmuscle", round=0)
    for client in "abc":
        shown(
            "failure",
            client=client,
            operation="train",
            round=1,
            reason="dropped out",
            lasting=False,
        )
    shown("failure", client="d", operation="train", round=1, reason="its disk is full")
    assert shown.said() == "d failed in train, round 1: its disk is full\n"
    shown("round", round=1, bytes=sent())
    assert shown.bar().fields["doing"] == "1.5 MB up, 1.5 MB down so far, 3 missed this round"
    shown("round", round=2, bytes=sent())
    assert shown.said().endswith("\nfedmuscle: 2 of 20 rounds, 1.5 MB up, 1.5 MB down so far\n")


def test_the_last_line_tells_what_the_table_will(shown):
    shown("stage", text="fedavg", round=18)
    for number in (19, 20):
        shown("round", round=number, bytes=sent())
    assert shown.said() == ""
    shown("sent", bytes=sent(2_000_000))
    assert shown.said() == "fedavg: 20 of 20 rounds, 2 MB up, 2 MB down\n"
    shown("start", rounds=1)
    assert shown.count(1) == "1 of 1 round"
