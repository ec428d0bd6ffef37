"""Plots of label distributions: only where clients share labels, and true to the data."""

import json

import torch

from unalike import Client, FedAvg, MultiLabel, Training, run
from unalike.report import label_distribution
from unalike.report.folder import read
from unalike.runs import run_scenario
from unalike.runs.label_statistics import label_statistics
from unalike.scenarios import build_clients, load

SMALL = [
    "rounds=1",
    "epochs=1",
    "data.options={train: 60, test: 20}",
    "clients.0.model={name: cnn, width: 16}",
]


def test_label_counts_are_logged_and_plotted(tmp_path):
    scenario, method = load("fednca-digits", settings=SMALL, alone=False)
    run_scenario(scenario, method, out=tmp_path / "run")
    (event,) = [
        e
        for e in map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())
        if e["event"] == "labels"
    ]
    first = build_clients(scenario)[0]
    y = first.train.y[first.train.index]
    assert event["counts"][first.id] == y.sum(0).int().tolist()
    assert event["together"][2][3] == sum(
        int((c.train.y[c.train.index][:, [2, 3]].sum(1) == 2).sum())
        for c in build_clients(scenario)
    )
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Label distribution" in page and "Labels that occur together" in page
    run = read(tmp_path / "run")
    lacks = [count.count(0) for count in event["counts"].values()]
    assert (
        f"lacks {min(lacks)} to {max(lacks)} of 10 labels"
        in label_distribution.plot_label_counts(run).caption
    )


def test_clients_with_unlike_labels_have_no_label_distribution():
    assert label_statistics(build_clients(load("digits")[0])) is None


def test_single_label_tasks_have_no_label_pairs(toys):
    statistics = label_statistics(toys.clients())
    assert (
        statistics["together"] is None
        and statistics["pairs"] == {}
        and torch.tensor(statistics["counts"]["a"]).sum() == 20
    )


def test_of_many_labels_those_with_most_samples_are_plotted(tmp_path):
    y = torch.zeros(6, 70)
    y[:, 3], y[0, 5:65] = (
        1,
        1,
    )  # all hold 3, one holds 5 to 64 as well: 61 labels that somebody holds
    mine = [
        Client(id, lambda: torch.nn.Linear(2, 4), MultiLabel(70), train=(torch.rand(3, 2), y[rows]))
        for id, rows in (("a", slice(3)), ("b", slice(3, 6)))
    ]
    run(FedAvg(), mine, training=Training(rounds=1), alone=False, out=tmp_path / "run")
    figures = [
        of(read(tmp_path / "run"))
        for of in (label_distribution.plot_label_counts, label_distribution.plot_label_pairs)
    ]
    assert (
        "lacks 9 to 69 of 70 labels. Of 70 labels the 60 with the most samples are drawn."
        in figures[0].caption
    )
    assert figures[1].caption.endswith("the 60 with the most samples are drawn.")
    assert label_distribution.label_counts(read(tmp_path / "run"))[2] == [3, *range(5, 64)]
