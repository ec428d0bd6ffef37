"""Plots of what a method logged: points by class, matrices, visits, federation metrics."""

import json

import numpy as np

from unalike.report import read
from unalike.report.page import render_page
from unalike.report.plots import plot_run
from unalike.runs.figures import write_figure


def add(folder, *events):
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def titled(folder, title):
    return next((figure for figure in plot_run(read(folder)) if figure.title == title), None)


def test_points_are_plotted_at_a_few_rounds_in_the_same_colours(make):
    folder, classes = make(), np.arange(30) % 10
    for at in range(1, 9):
        write_figure(
            folder,
            "fused features",
            at,
            points=np.random.default_rng(at).normal(size=(30, 5)) + 9 * classes[:, None],
            classes=classes,
        )
    figure = titled(folder, "Fused features")
    assert [f"round {at}" in figure.svg for at in range(1, 9)] == [
        True,
        False,
        True,
        False,
        False,
        True,
        False,
        True,
    ]
    assert len(figure.legend) == 10 and figure.legend[8][:2] == (
        "square",
        "c0",
    )  # more classes than colours: another mark
    assert figure.svg.count("<path") < 80  # a path a class and panel, not one a point


def test_the_last_matrix_is_plotted(make):
    folder = make()
    for at in (1, 2):
        write_figure(
            folder,
            "weights",
            at,
            matrix=np.eye(3) * at,
            rows=["a", "b", "<c>"],
            columns=["x", "y", "z"],
        )
    figure = titled(folder, "Weights")
    assert figure.caption == "In round 2." and "&lt;c&gt;" in figure.svg
    assert figure.svg.count(">2</text>") == 3 and figure.svg.count(">0</text>") == 6


def test_a_large_matrix_is_shades_and_a_square_one_says_who_gets_from_whom(make):
    folder = make()
    names = [f"c{place}" for place in range(20)]
    write_figure(folder, "weights", 3, matrix=2 * np.eye(20), rows=names, columns=names)
    caption = "In round 3, from 0, the palest, to 2, the darkest; a row is what one gets from each"
    figure = titled(folder, "Weights")
    assert figure.caption == f"{caption} column." and ">2</text>" not in figure.svg


def test_unreadable_or_constant_arrays_do_no_harm(make):
    folder = make()
    write_figure(folder, "same", 1, points=np.zeros((20, 4)), classes=np.zeros(20, dtype=int))
    write_figure(folder, "few", 1, points=np.ones((3, 1)), classes=np.arange(3))
    write_figure(folder, "level", 1, matrix=np.full((2, 2), np.nan))
    (folder / "pictures" / "broken-000001.npz").write_bytes(b"no zip")
    text = render_page(read(folder))
    assert all(title in text for title in ("Same", "Few", "Level")) and "Broken" not in text


def test_visits_follow_each_other_and_fast_clients_come_first(make):
    folder = make()
    infos = {"slow": {"speed": 1.0}, "quick": {"speed": 2.0}}
    lines = [{"event": "start", "clients": infos}]
    for client, pace in (("slow", 4), ("quick", 2)):
        for visit in range(1, 4):
            lines += [
                {
                    "event": "arrival",
                    "client": client,
                    "round": visit,
                    "operation": name,
                    "at": pace * visit - early,
                }
                for name, early in (("weigh", 1), ("visit", 0))
            ]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    from unalike.report.history import visits

    assert list(visits(read(folder)).items()) == [
        ("quick", [(1, 2), (2, 4), (4, 6)]),
        ("slow", [(3, 4), (4, 8), (8, 12)]),
    ]


def test_federation_metrics_are_plotted_over_rounds(make):
    folder = make()
    assert titled(folder, "The whole federation") is None
    add(
        folder,
        *(
            {
                "event": "evaluation",
                "round": at,
                "who": "together",
                "values": {},
                "figures": {"NMI": 40 + at, "loss": 1, "joint": {"NMI": 50 + at}},
            }
            for at in (1, 2)
        ),
    )
    figure = titled(folder, "The whole federation")
    assert (
        figure.legend == [("line", "c0", "NMI"), ("dash", "c1", "joint NMI")]
        and "NMI 42.0 and joint NMI 52.0" in figure.caption
    )
