"""Pictures of labels: drawn where a scenario's clients have the same ones, true to what they hold."""

import json

import torch

from unalike.report import holdings
from unalike.report.folder import read
from unalike.runs import held_labels, run_scenario
from unalike.scenarios import build, load

SMALL = ["rounds=1", "epochs=1", "data.options={train: 60, test: 20}", "clients.0.model={name: cnn, width: 16}"]


def test_what_clients_hold_is_told_and_drawn(tmp_path):
    made, method = load("fednca-digits", settings=SMALL, alone=False)
    run_scenario(made, method, out=tmp_path / "run")
    event, = [e for e in map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines()) if e["event"] == "labels"]
    first = build.clients(made)[0]
    y = first.train.y[first.train.index]
    assert event["counts"][first.id] == y.sum(0).int().tolist()
    assert event["together"][2][3] == sum(int((c.train.y[c.train.index][:, [2, 3]].sum(1) == 2).sum()) for c in build.clients(made))
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Who holds which labels" in page and "Which labels go together" in page
    run = read(tmp_path / "run")
    lacks = [count.count(0) for count in event["counts"].values()]
    assert f"lacks {min(lacks)} to {max(lacks)} of 10 labels" in holdings.holdings(run).caption


def test_clients_with_unlike_labels_have_no_such_picture():
    assert held_labels(build.clients(load("digits")[0])) is None


def test_one_label_a_sample_has_no_pairs(toys):
    told = held_labels(toys.clients())
    assert told["together"] is None and told["pairs"] == {} and torch.tensor(told["counts"]["a"]).sum() == 20
