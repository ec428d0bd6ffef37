"""What the audit says before is what the ledger says after, of every method. A new method is tested here without a line of its own."""

import csv
from collections import Counter
from types import SimpleNamespace

import pytest

from unalike import FederationConfig, Privacy
from unalike.algorithms import ALGORITHMS
from unalike.base.errors import UserError
from unalike.runs import RunPlan
from unalike.runs.audit import audit, audit_client


def rehearsed(toys, method, clients, federation=None, **more):
    federation = federation or FederationConfig()
    return audit(RunPlan(method, clients, toys.training(rounds=3), federation, **more))


def ledgers(folder, found):
    """(round, client, way, operation): messages and bytes, as a run counted them and as the audit did."""
    with (folder / "ledger.csv").open() as file:
        rows = list(csv.DictReader(file))
    ran = {
        (int(r["round"]), r["client"], r["direction"], r["operation"]): (
            int(r["messages"]),
            int(r["bytes"]),
        )
        for r in rows
    }
    messages, bytes = Counter(), Counter()
    for client, told in found["clients"].items():
        for each in told["messages"]:
            for round, count in each["rounds"].items():
                key = (round, client, each["way"], each["operation"])
                messages[key] += count
                bytes[key] += count * each["bytes"]
    return ran, {key: (messages[key], bytes[key]) for key in messages}


def test_the_audit_is_the_ledger_to_the_byte(name, toys, tmp_path):
    there = SimpleNamespace(**(vars(toys) | toys.toys_for(ALGORITHMS[name])))
    federation = FederationConfig(
        participation=1.0 if there.method(name).check_round(2) else 0.7, quorum=0
    )
    results = there.execute(
        tmp_path / "run", there.method(name), there.clients(), federation=federation
    )
    found = rehearsed(there, there.method(name), there.clients(), federation=federation)
    ran, told = ledgers(tmp_path / "run", found)
    assert told == ran
    assert {
        way: sum(client["bytes"][way] for client in found["clients"].values())
        for way in ("up", "down")
    } == results["bytes"]


def test_with_privacy_the_audit_shows_what_does_not_leave(toys, tmp_path):
    given = {"privacy": Privacy(noise=0.5)}
    toys.execute(tmp_path / "run", toys.method("fedavg"), toys.clients(), **given)
    found = rehearsed(toys, toys.method("fedavg"), toys.clients(), **given)
    ran, told = ledgers(tmp_path / "run", found)
    (update,) = (
        each
        for each in found["clients"]["a"]["messages"]
        if each["operation"] == "update" and each["way"] == "up"
    )
    kinds = {part["name"]: part["kind"] for part in update["holds"]}
    assert told == ran and kinds["loss"] == "nothing" and kinds["samples"] == "int"
    assert {
        "name": "parameters.encoder.layers.1.weight",
        "kind": "float64",
        "shape": [8, 6],
    } in update["holds"]


def test_a_client_that_knows_no_other_is_told_too(toys):
    """Its own part is that of a federation of its like."""
    plan = RunPlan(toys.method("fedmuscle"), [toys.client("a")], toys.training(rounds=3))
    by_itself = audit_client(plan)
    together = rehearsed(toys, toys.method("fedmuscle"), [toys.client(c) for c in "abc"])
    assert list(by_itself["clients"]) == ["a"]
    assert by_itself["clients"]["a"]["messages"] == together["clients"]["a"]["messages"]


def test_a_client_that_is_not_there_is_named(toys):
    with pytest.raises(UserError, match=r'no client "z".*There are: a, b, c'):
        audit(RunPlan(toys.method("local"), toys.clients(), toys.training()), ["z"])
