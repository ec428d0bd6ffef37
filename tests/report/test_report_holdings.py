"""Pictures of labels: drawn where a scenario's clients have the same ones, true to what they hold."""

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


def test_what_clients_hold_is_told_and_drawn(tmp_path):
    made, method = load("fednca-digits", settings=SMALL, alone=False)
    run_scenario(made, method, out=tmp_path / "run")
    (event,) = [
        e
        for e in map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())
        if e["event"] == "labels"
    ]
    first = build_clients(made)[0]
    y = first.train.y[first.train.index]
    assert event["counts"][first.id] == y.sum(0).int().tolist()
    assert event["together"][2][3] == sum(
        int((c.train.y[c.train.index][:, [2, 3]].sum(1) == 2).sum()) for c in build_clients(made)
    )
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Label distribution" in page and "Labels that occur together" in page
    run = read(tmp_path / "run")
    lacks = [count.count(0) for count in event["counts"].values()]
    assert (
        f"lacks {min(lacks)} to {max(lacks)} of 10 labels"
        in label_distribution.plot_label_counts(run).caption
    )


def test_clients_with_unlike_labels_have_no_such_picture():
    assert label_statistics(build_clients(load("digits")[0])) is None


def test_one_label_a_sample_has_no_pairs(toys):
    told = label_statistics(toys.clients())
    assert (
        told["together"] is None
        and told["pairs"] == {}
        and torch.tensor(told["counts"]["a"]).sum() == 20
    )


def test_clients_given_in_python_are_drawn_too_and_of_many_labels_those_held_most(tmp_path):
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
    drawn = [
        of(read(tmp_path / "run"))
        for of in (label_distribution.plot_label_counts, label_distribution.plot_label_pairs)
    ]
    assert (
        "lacks 9 to 69 of 70 labels. Of 70 labels the 60 with the most samples are drawn."
        in drawn[0].caption
    )
    assert drawn[1].caption.endswith("the 60 with the most samples are drawn.")
    assert label_distribution.label_counts(read(tmp_path / "run"))[2] == [3, *range(5, 64)]
