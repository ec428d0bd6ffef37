"""The progress bar: names of stages, counts of rounds, missed rounds and failures."""

import io

import pytest
from rich.console import Console
from rich.progress import Progress

from unalike.report.progress import ProgressDisplay


@pytest.fixture
def display():
    """A display of 20 rounds; `printed()` is its output so far, `bar()` its only bar."""
    console = Console(file=io.StringIO(), width=200)
    display = ProgressDisplay(Progress(console=console, disable=True), console)
    display.printed, display.bar = console.file.getvalue, lambda: display.bars.tasks[0]
    display("start", rounds=20, algorithm="fedmuscle")
    return display


def sent(size=1_500_000):
    return {"up": size, "down": size}


def test_a_stage_shows_its_name_and_counts_rounds(display):
    display("stage", text="alone", round=0)
    display("alone", round=20)
    assert (display.bar().description, display.bar().completed, display.bar().fields["count"]) == (
        "alone",
        20,
        "20 of 20 rounds",
    )
    display("stage", text="fedmuscle", round=3)
    assert (display.bar().description, display.bar().total, display.bar().fields["count"]) == (
        "fedmuscle",
        20,
        "3 of 20 rounds",
    )
    display("round", round=4, bytes=sent())
    assert display.bar().fields["doing"] == "1.5 MB up, 1.5 MB down so far"
    display("stage", text="the report")
    assert (display.bar().total, display.bar().fields["count"]) == (None, "") and len(
        display.bars.tasks
    ) == 1


def test_asynchronous_methods_count_visits_of_a_client(display):
    display("stage", text="afmcc", round=0)
    for instant in range(1, 229):
        display("round", round=instant, progress=instant / 12, bytes=sent())
    assert (
        display.bar().fields["count"] == "19.0 of 20 visits a client"
        and display.bar().completed == 19
    )
    assert len(display.printed().splitlines()) == 9


def test_missed_rounds_are_counted_and_failed_clients_named(display):
    display("stage", text="fedmuscle", round=0)
    for client in "abc":
        display(
            "failure",
            client=client,
            operation="train",
            round=1,
            reason="dropped out",
            lasting=False,
        )
    display("failure", client="d", operation="train", round=1, reason="its disk is full")
    assert display.printed() == "d failed in train, round 1: its disk is full\n"
    display("round", round=1, bytes=sent())
    assert display.bar().fields["doing"] == "1.5 MB up, 1.5 MB down so far, 3 missed this round"
    display("round", round=2, bytes=sent())
    assert display.printed().endswith(
        "\nfedmuscle: 2 of 20 rounds, 1.5 MB up, 1.5 MB down so far\n"
    )


def test_the_last_line_shows_the_total_bytes(display):
    display("stage", text="fedavg", round=18)
    for number in (19, 20):
        display("round", round=number, bytes=sent())
    assert display.printed() == ""
    display("sent", bytes=sent(2_000_000))
    assert display.printed() == "fedavg: 20 of 20 rounds, 2 MB up, 2 MB down\n"
    display("start", rounds=1)
    assert display.format_count(1) == "1 of 1 round"
