"""What a client's owner allows holds at the client, whatever a server asks for, and is recorded."""

import json
import time

import conftest as toys
import organisations
import pytest
import torch
import yaml
from test_leaks import EndpointProbe, described_by, plan
from test_remote_run import ABOUT, Direct
from torch import nn

from unalike.base.errors import UserError
from unalike.base.message import decode, encode
from unalike.core.privacy import epsilon
from unalike.cross_silo.client_endpoint import ClientEndpoint
from unalike.cross_silo.remote_run import serve
from unalike.cross_silo.site_records import AuditLog, PrivacyAccount
from unalike.runs.plan import plan_to_dict
from unalike.scenarios.site_policy import AcceptedRun, run_digest

SECRET = {"noise": 4.0, "bound": 1.0, "delta": 1e-5, "entropy": "secret"}


def small(run, id):
    return toys.client(id)


def probe(folder, function=small, **rules):
    """A client with these rules in its client.yaml, that said hello."""
    file = described_by(folder / "a", function, id="a")
    file.write_text(json.dumps(json.loads(file.read_text()) | rules))
    probe = EndpointProbe(file)
    assert "card" in probe.hello()
    return probe


def begin(probe, round=0, about=ABOUT, **terms):
    return probe.request("begin", about=about, terms=plan() | terms, round=round)


# the law


@pytest.mark.parametrize(
    "rules, terms, reason",
    [
        ({}, {"training": {"epochs": 10**9}}, "at most 100 epochs, and training has 1000000000"),
        ({}, {"training": {"rounds": 10**9}}, "at most 10000 rounds"),
        ({"policy": {"epochs": 2}}, {"training": {"epochs": 3}}, "at most 2 epochs"),
        ({"policy": {"methods": ["fedmuscle"]}}, {}, "allows the methods fedmuscle, and this is"),
        ({"accept": [{"algorithm": "fedmuscle"}]}, {}, "its algorithm.name is fedavg, not"),
        ({"accept": [{"training": {"epochs": 1}}]}, {"training": {"epochs": 2}}, "epochs is 2"),
        ({"accept": [{"run_by": ["eve"]}]}, {}, "somebody whose name the engine does not say"),
        ({"accept": [{"digest": "0" * 16}]}, {}, "its digest is "),
        ({"accept": []}, {}, "it accepts none"),
        ({"privacy": {"epsilon": 8}}, {}, "takes part only with privacy"),
        ({"privacy": {"epsilon": 8}}, {"privacy": SECRET | {"noise": 0.1}}, "epsilon 8 over all"),
        ({"privacy": {"noise": 1}}, {"privacy": SECRET | {"entropy": "seed"}}, "secret"),
    ],
)
def test_a_run_that_the_owner_does_not_allow_is_refused_with_the_reason(
    tmp_path, rules, terms, reason
):
    client = probe(tmp_path, **rules)
    assert reason in begin(client, **terms)["failure"]
    assert "knows nothing of the run" in client.call("begin")["failure"]
    last = client.site.audit.entries()[-2]
    assert last["event"] == "refused" and reason in last["reason"]


def test_the_run_that_was_audited_is_accepted_by_its_digest(tmp_path):
    terms = plan_to_dict(
        toys.method("fedavg"), "fedavg", toys.training(), seed=0, guarded=False, privacy=None
    )
    client = probe(tmp_path, accept=[{"digest": run_digest(terms)[:16]}])
    assert begin(client, **decode(encode(terms))) == {}
    other = {**terms, "training": toys.training(lr=0.5).model_dump()}
    assert "its digest is" in begin(client, **other)["failure"]


def test_runs_are_accepted_by_method_settings_and_who_runs_them():
    accepted = AcceptedRun(
        algorithm={"name": "fedprox", "mu": 0.1}, training={"epochs": 2}, run_by=["ann@x.org"]
    )
    terms = {"algorithm": {"name": "fedprox", "mu": 0.1}, "training": {"epochs": 1}, "seed": 0}
    assert accepted.mismatch(terms, "ann@x.org") is None
    assert accepted.mismatch(terms, "eve@x.org") == "it is run by eve@x.org"
    other = {**terms, "algorithm": {"name": "fedprox", "mu": 1.0}}
    assert accepted.mismatch(other, "ann@x.org") == "its algorithm.mu is 1.0, not 0.1"


def test_a_method_that_there_is_not_is_found_in_the_file(tmp_path):
    file = described_by(tmp_path, small, id="a")
    for rules in ({"policy": {"methods": ["fedmusle"]}}, {"accept": [{"algorithm": "fedmusle"}]}):
        file.write_text(json.dumps(json.loads(file.read_text()) | rules))
        with pytest.raises(UserError, match='Did you mean "fedmuscle"'):
            _ = ClientEndpoint(file).law
        file.write_text(json.dumps({"factory": "organisations:small", "options": {"id": "a"}}))


def test_a_servers_terms_override_no_path_of_the_client(tmp_path):
    client = probe(tmp_path)
    terms = plan() | {"client_file": "/evil.yaml", "name": "evil", "about": {"x": 1}}
    assert client.request("begin", about=ABOUT, terms=terms, round=0) == {}
    config = yaml.safe_load((client.site.folder / "run" / "config.yaml").read_text())
    assert config["client_file"] == str(client.site.file)
    assert config["name"] == "run" and config["about"] == ABOUT


def test_an_operation_that_is_not_allowed_is_refused(tmp_path):
    client = probe(tmp_path, policy={"operations": ["begin", "update"]})
    begin(client)
    first = client.call("begin")["body"]
    assert "failure" not in client.call("update", parameters=first)
    assert (
        "does not allow the operation receive"
        in client.call("receive", parameters=first)["failure"]
    )


def trained(client, rounds):
    """Have a client train and save so many rounds; returns its weights."""
    first = client.call("begin")["body"]
    for round in range(1, rounds + 1):
        client.call("receive", parameters={k: t + round for k, t in first.items()})
        client.request("save", round=round)
    return client.call("begin")["body"]


def test_a_server_cannot_delete_the_clients_checkpoints(tmp_path):
    """`begin` with round 0 deleted all of them."""
    client = probe(tmp_path)
    begin(client)
    trained(client, rounds=3)
    assert "does not let a server go back to round 0" in begin(client, round=0)["failure"]
    states = client.site.folder / "run" / "checkpoints" / "clients" / "a"
    assert len(list(states.glob("0*.safetensors"))) == 3
    assert begin(client, round=2) == {}, "a server that died before it saved round 3 itself"
    assert [path.stem for path in (client.site.folder / "run" / "rewound").rglob("*.s*")] == [
        "000003"
    ]


def test_rewinding_can_be_forbidden_altogether(tmp_path):
    client = probe(tmp_path, policy={"rewind": 0})
    begin(client)
    trained(client, rounds=1)
    assert "policy.rewind" in begin(client, round=0)["failure"]
    assert begin(client, round=1) == {}


class Sleeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = toys.mlp()

    def forward(self, x):
        if self.training:
            time.sleep(0.02)
        return self.layer(x)


def sleepy(run, id):
    return toys.client(id, model=Sleeping)


@pytest.mark.parametrize("resident", [True, False])
def test_a_round_has_so_much_time_and_no_more(tmp_path, resident):
    client = probe(tmp_path, sleepy, policy={"round_seconds": 0.5})
    client.site.resident = resident
    begin(client, training={"epochs": 100, "batch_size": 2})
    first = client.call("begin")["body"]
    start = time.monotonic()
    assert "incident" in client.call("update", parameters=first)["failure"]
    assert time.monotonic() - start < 5.0, "it would take 20 s"
    assert "policy.round_seconds" in (client.site.folder / "incidents.log").read_text()
    if not resident:
        client.site = ClientEndpoint(client.site.file, "a", resident=False)
    assert "0.5 s a round, which are over" in client.call("train")["failure"]


class Hungry(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = toys.mlp()

    def forward(self, x):
        if self.training:
            torch.zeros(2**28, dtype=torch.float64)
        return self.layer(x)


def hungry(run, id):
    return toys.client(id, model=Hungry)


def test_an_operation_has_so_much_memory_and_no_more(tmp_path):
    client = probe(tmp_path, hungry, policy={"memory_bytes": 2**28})
    begin(client)
    first = client.call("begin")["body"]
    assert "incident" in client.call("update", parameters=first)["failure"]
    assert torch.zeros(2**26).sum() == 0, "the limit is over with the operation"


# measuring


def clusters(run, id):
    return next(c for c in organisations.toys_of("afmcc").clients(3) if c.id == id)


@pytest.mark.parametrize("measuring", ["own", "none"])
def test_a_server_gets_no_features_and_no_labels(tmp_path, measuring):
    """Two calls of `appraise` gave all rows and labels of a clustering client."""
    client = probe(tmp_path, clusters, policy={"measuring": measuring})
    method = {"name": "afmcc", **vars(organisations.toys_of("afmcc").method("afmcc"))}
    assert begin(client, algorithm=method) == {}
    model = client.site.host("run", "clients").wake("a").program.model
    replies = {
        "embed": client.call("embed"),
        "appraise": client.call("appraise", parameters=dict(model.state_dict())),
        "evaluate": client.call("evaluate"),
    }
    for name, reply in replies.items():
        if measuring == "none":
            assert "measuring: none" in reply["failure"]
        elif name == "embed":
            assert "would send features or labels" in reply["failure"]
        else:
            assert set(reply["body"]) == {"acc", "nmi", "ari"}
    assert "body" in client.call("describe")


def test_a_run_of_clustering_clients_is_scored_at_home(tmp_path):
    folder = organisations.prepared(tmp_path / "away", "afmcc", rounds=1)
    line = Direct(tmp_path / "sites")
    serve(folder.path, line, 30.0)
    results = folder.results
    assert all(entry["metrics"]["acc"] > 0 for entry in results["clients"].values())
    assert not results["failures"]


def test_a_client_that_is_not_measured_takes_part(tmp_path):
    folder = organisations.prepared(tmp_path / "away", "fedavg")
    line = Direct(tmp_path / "sites")
    file = line.files["b"]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"policy": {"measuring": "none"}}))
    serve(folder.path, line, 30.0)
    clients = folder.results["clients"]
    assert "parameters" in clients["b"] and clients["a"]["hash"]
    assert {f["client"] for f in folder.results["failures"]} <= {"b"}


# the privacy account


def test_epsilon_is_limited_over_all_runs_and_processes(tmp_path):
    """It was counted by the server alone, from 0 in each run."""
    limit = epsilon(4.0, 5, 1e-5) + 1e-9
    answered = 0
    for run in range(3):
        client = probe(tmp_path, privacy={"epsilon": limit})
        client.site.answer("begin", b"", f"run{run}")
        reply = begin(client, privacy=SECRET)
        if "failure" in reply:
            assert "would be exceeded" in reply["failure"] and run == 2
            break
        client.number = 100 * run
        first = client.call("begin")["body"]
        for _ in range(3):
            reply = client.call("update", parameters=first)
            if "failure" in reply:
                assert f"epsilon {limit:g} over all runs, would be exceeded" in reply["failure"]
            else:
                answered += 1
    assert answered == 5
    assert PrivacyAccount(client.site.folder, limit, 1e-5).epsilon() == pytest.approx(limit)


def test_a_release_is_on_disk_before_the_reply_leaves(tmp_path, monkeypatch):
    client = probe(tmp_path, privacy={"epsilon": 100})
    begin(client, privacy=SECRET)
    first = client.call("begin")["body"]
    synced = []
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append(descriptor))
    file = client.site.folder / "privacy.jsonl"
    monkeypatch.setattr(
        "unalike.engines.host.encode",
        lambda answer, *a: (counted.append(read()), encode(answer))[1],
    )
    counted, read = [], lambda: file.read_text().count("\n") if file.exists() else 0
    client.call("update", parameters=first)
    assert counted == [1] and synced


def test_an_account_that_was_cut_short_stops_everything(tmp_path):
    account = PrivacyAccount(tmp_path, 8.0, 1e-5)
    assert account.spend(8.0, 1)
    account.path.write_text("rubbish\n")
    with pytest.raises(UserError, match="restore the file"):
        PrivacyAccount(tmp_path, 8.0, 1e-5).spend(8.0, 1)


def test_half_a_line_of_a_killed_process_is_cut_off(tmp_path):
    account = PrivacyAccount(tmp_path, 8.0, 1e-5)
    account.spend(8.0, 2)
    with account.path.open("a") as file:
        file.write('{"time": 1, "noi')
    again = PrivacyAccount(tmp_path, 8.0, 1e-5)
    assert again.spend(8.0, 1) and again.releases() == {8.0: 3}


# records


def test_the_site_has_a_ledger_of_every_byte_that_left(tmp_path):
    """`unalike report` there said "Sent 0 B"."""
    from unalike.report import write
    from unalike.report.folder import read
    from unalike.report.history import total_bytes

    folder = organisations.prepared(tmp_path / "away", "fedavg", alone=True)
    line = Direct(tmp_path / "sites")
    serve(folder.path, line, 30.0)
    (site,) = (tmp_path / "sites" / "a" / "unalike").glob("toy-*")
    for way in ("up", "down"):
        passed = sum(
            size
            for (client, do, _, going), size in line.passed.items()
            if (client, do, going) == ("a", "call", way)
        )
        assert total_bytes(read(site))[way] == passed > 0
    page = write(site).read_text()
    assert "0 B" not in page.split("Sent")[1][:80]


def test_the_audit_log_says_who_ran_what_and_shows_changes(tmp_path):
    client = probe(tmp_path)
    client.site.submitter = "ann@x.org"
    begin(client)
    client.call("begin")
    client.request("finish", finished=True, reason="")
    log = AuditLog(client.site.folder / "audit.jsonl")
    entries = log.entries()
    assert [entry["event"] for entry in entries] == ["hello", "begin", "call", "finish"]
    assert entries[1]["submitter"] == "ann@x.org" and entries[1]["digest"] == run_digest(plan())
    assert entries[2]["operation"] == "begin" and entries[2]["sent"] == len(client.sent_bytes[-2])
    assert log.broken_line() is None and log.path.stat().st_mode & 0o077 == 0
    lines = log.path.read_text().splitlines(keepends=True)
    log.path.write_text("".join([lines[0], *lines[2:]]))
    assert log.broken_line() == 2
