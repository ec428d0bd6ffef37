"""`unalike metrics`: the text format of Prometheus from a run's events and ledger."""

import json
import re

import pytest

from unalike.base.errors import UserError
from unalike.report.metrics import format_metrics

SAMPLE = re.compile(r'unalike_[a-z_]+\{([a-z]+="([^"\\\n]|\\.)*",?)+\} [0-9.e+-]+')


def write_run(folder, events):
    folder.mkdir()
    (folder / "config.yaml").write_text('name: two "sites"\nalgorithm: {name: fedavg}\n')
    lines = [json.dumps({"time": 100.0 + i, **event}) for i, event in enumerate(events)]
    (folder / "events.jsonl").write_text("\n".join(lines) + '\n{"event": "rou')
    (folder / "ledger.csv").write_text(
        "round,client,direction,operation,messages,bytes\n"
        "1,a,up,update,1,500\n1,b,up,update,1,500\n1,a,down,update,1,300\n2,a,up,evaluate,1,7\n"
    )
    return folder


def read_samples(text):
    """{(metric, extra labels): value}; every line is a comment or a sample of the right form."""
    samples = {}
    for line in text.splitlines():
        if line.startswith("#"):
            assert re.fullmatch(r"# (HELP|TYPE) unalike_[a-z_]+ .+", line)
            continue
        assert SAMPLE.fullmatch(line), line
        name, labels, value = re.fullmatch(r"unalike_([a-z_]+)\{(.*)\} (\S+)", line).groups()
        extra = re.findall(r'(?:state|direction|operation)="([^"]*)"', labels)
        samples[(name, *extra)] = float(value)
    return samples


START = {"event": "start", "rounds": 5, "clients": {"a": {}, "b": {}, "c": {}}}
ROUND = {"event": "round", "round": 1, "seconds": 2.5}


def failure(client, lasting):
    return {"event": "failure", "client": client, "lasting": lasting, "round": 2}


def test_a_run_that_goes_on_is_counted(tmp_path):
    """b failed for good; c missed one round, which is over."""
    events = [START, failure("c", False), ROUND, failure("b", True)]
    text = format_metrics(write_run(tmp_path / "run", events))
    samples = read_samples(text)
    assert samples["rounds_finished",] == 1 and samples["rounds_planned",] == 5
    assert samples["clients", "active"] == 2 and samples["clients", "failed"] == 1
    assert samples["failures_total",] == 2 and samples["finished",] == 0
    assert samples["bytes_total", "up", "update"] == 1000
    assert samples["bytes_total", "down", "update"] == 300
    assert samples["bytes_total", "up", "evaluate"] == 7
    assert samples["seconds",] == 2.5 and samples["last_event_timestamp_seconds",] == 103
    assert 'scenario="two \\"sites\\""' in text and text.endswith("\n")


def test_a_client_that_is_asked_again_is_active(tmp_path):
    events = [START, failure("b", True), ROUND, {"event": "again", "client": "b", "round": 2}]
    samples = read_samples(format_metrics(write_run(tmp_path / "run", events)))
    assert samples["clients", "active"] == 3 and samples["clients", "failed"] == 0


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="not a run folder"):
        format_metrics(tmp_path)
