"""Life between organisations, as the people at a site and at the server meet it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import organisations
import pytest
import torch
import yaml
from test_remote_run import Breaking, Direct, away
from typer.testing import CliRunner

from unalike.base.errors import UserError
from unalike.cli.commands import app
from unalike.cross_silo.remote_run import RemoteRun, follow, is_wanted, serve, update_roster
from unalike.cross_silo.site_records import AUDIT_LOG, AuditLog
from unalike.engines.process import EngineError
from unalike.runs.audit import audit_client_file
from unalike.runs.export import export
from unalike.scenarios.client_config import load_client

RUNNER = CliRunner()


# who takes part


def test_a_site_that_was_away_is_in_again_after_a_resume(tmp_path):
    """It was out for good, even after `resume`."""
    folder = organisations.prepared(tmp_path / "away", "fedavg", rounds=4)

    class Two(Breaking):
        def over(self):
            return self.calls.count(("a", "save")) == self.saves and self.calls[-1][1] != "save"

    for saves, ids in ((1, "abc"), (2, "ab")):
        line = Two(tmp_path / "sites", ids=ids)
        line.saves = saves if ids == "abc" else 1
        with pytest.raises(EngineError):
            RemoteRun(folder, line, 30.0).execute()
    results = RemoteRun(folder, Direct(tmp_path / "sites"), 30.0).execute()
    assert set(results["clients"]) == set("abc") and "hash" in results["clients"]["c"]
    joined = [(event["client"], event["round"]) for event in folder.events("joined")]
    assert joined == [("c", 2)]


def test_only_a_client_that_left_is_let_in_again_by_coming_back():
    saved = {
        "finished": 2,
        "released": {"a": 0, "b": 0},
        "failures": [
            ["a", "update", 1, "could not be reached for 30 s", True],
            ["b", "update", 1, "poison", True],
        ],
        "pending": [],
        "flying": [],
        "waiting": [],
        "visits": {},
        "quarantined": ["a", "b"],
    }
    update_roster(saved, {"a", "b"}, lambda *a, **k: None)
    assert [failure[-1] for failure in saved["failures"]] == [False, True]
    assert saved["quarantined"] == ["b"]


def test_sites_are_told_why_the_run_ended_for_them(tmp_path):
    folder = organisations.prepared(tmp_path / "away", "fedavg")
    line = Direct(tmp_path / "sites")
    first = line.answered

    def spoil(site, client, do, data, *rest):
        reply = first(site, client, do, data, *rest)
        return b"rubbish" if (client, do) == ("b", "call") else reply

    line.answered = spoil
    serve(folder.path, line, 30.0)
    ends = {}
    for id in "abc":
        entries = line.sites[id].audit.entries()
        ends[id] = [(e["event"], e["reason"]) for e in entries if e["event"] in ("ended", "finish")]
    assert ends["a"] == [("finish", "")]
    assert ends["b"][0][0] == "ended" and "its reply is no message" in ends["b"][0][1]


def test_an_export_of_a_site_says_that_the_run_finished(tmp_path):
    away(tmp_path / "away", Direct(tmp_path / "sites"), "fedavg")
    (run,) = (tmp_path / "sites" / "a" / "unalike").glob("toy-*")
    export(run, "a", tmp_path / "model", onnx=False, trust=True)
    assert json.loads((tmp_path / "model" / "unalike.json").read_text())["finished"] is True


def test_versions_of_packages_are_recorded_and_compared(tmp_path, monkeypatch):
    folder = organisations.prepared(tmp_path / "away", "fedavg", rounds=1)
    line = Direct(tmp_path / "sites")
    hello = line.sites["b"].hello
    line.sites["b"].hello = lambda **a: {
        **(reply := hello(**a)),
        "versions": {**reply["versions"], "torch": "1.0"},
    }
    serve(folder.path, line, 30.0)
    (versions,) = folder.events("versions")
    assert versions["server"]["torch"] == versions["clients"]["a"]["torch"]
    (notice,) = folder.events("notice")
    assert notice["text"].startswith("b has torch 1.0 (here ")


def test_server_and_sites_write_down_the_same_digest_of_a_run(tmp_path):
    folder = organisations.prepared(tmp_path / "away", "fedavg", rounds=1)
    line = Direct(tmp_path / "sites")
    serve(folder.path, line, 30.0)
    (admitted,) = folder.events("admitted")
    assert admitted["clients"] == ["a", "b", "c"]
    for site in line.sites.values():
        begun = [e for e in AuditLog(site.folder / AUDIT_LOG).entries() if e["event"] == "begin"]
        assert {entry["digest"] for entry in begun} == {admitted["digest"]}


# runs that nobody wants


def test_a_job_that_starts_after_its_program_ended_does_nothing(tmp_path):
    """A queued FLARE job ran four minutes after its program had ended."""
    folder = organisations.prepared(tmp_path / "away", "fedavg")

    def submit():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        follow(folder, lambda event, **facts: None, submit)
    line = Direct(tmp_path / "sites")
    serve(folder.path, line, 30.0)
    assert not line.calls and folder.results is None and any(folder.events("unwanted"))


def test_a_job_whose_program_was_killed_ends_at_its_next_checkpoint(tmp_path):
    folder = organisations.prepared(tmp_path / "away", "fedavg", rounds=3)
    folder.write_json("follower.json", {"pid": 1, "ended": False})
    assert is_wanted(folder)
    line = Direct(tmp_path / "sites")
    run = RemoteRun(folder, line, 30.0)
    os.utime(folder.path / "follower.json", (1, 1))
    with pytest.raises(EngineError, match="the program that wanted this run has ended"):
        run.execute()


def test_flower_stops_the_run_it_submitted_when_it_is_interrupted(tmp_path, monkeypatch):
    """It stayed "running" after Ctrl-C."""
    pytest.importorskip("flwr", reason="the extra flower is not installed")
    from unalike.cross_silo import flower

    calls = []

    def run_flwr(place, *words):
        calls.append(words[0])
        return {"run-id": 7}

    engine = flower.FlowerEngine.__new__(flower.FlowerEngine)
    folder = organisations.prepared(tmp_path / "away", "fedavg")
    engine.folder, engine.place, engine.local = folder, tmp_path, None
    engine.min_clients, engine.timeout, engine.run = 1, 1.0, None
    monkeypatch.setattr(flower, "run_flwr", run_flwr)
    monkeypatch.setattr(flower, "check_certificate", lambda path: None)
    monkeypatch.setattr("unalike.cross_silo.flower_deploy.check_app", lambda path: None)

    def watch(event, **facts):
        if event == "folder":
            raise KeyboardInterrupt

    monkeypatch.setattr(
        "unalike.cross_silo.remote_run.follow",
        lambda folder, watch, submit: (submit(), watch("folder")),
    )
    with pytest.raises(KeyboardInterrupt):
        engine.launch(watch)
    assert calls == ["run", "stop"]


def test_sigterm_ends_a_run_as_ctrl_c_does(tmp_path):
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "unalike", "run", "digits", "--no-alone"),
            *("--algorithm", "fedavg", "--set", "rounds=200", "--out", str(tmp_path / "run")),
        ],
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    until = time.monotonic() + 60
    events = tmp_path / "run" / "events.jsonl"
    while time.monotonic() < until and process.poll() is None:
        if events.exists() and '"event": "round"' in events.read_text():
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors[-2000:]
    assert "unalike resume" in errors and "Traceback" not in errors


# certificates and second instances


@pytest.fixture(scope="module")
def startup_kit(tmp_path_factory):
    pytest.importorskip("nvflare", reason="the extra flare is not installed")
    from unalike.cross_silo import flare_kits

    folder = tmp_path_factory.mktemp("kits")
    flare_kits.provision(folder, ["a"])
    return folder / "unalike" / "prod_00" / "a"


@pytest.fixture
def kit(startup_kit, tmp_path):
    shutil.copytree(startup_kit, tmp_path / "a")
    return tmp_path / "a"


def expire(path, days=-1):
    """Replace a certificate by one that ended, or ends in so many days."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    name = x509.load_pem_x509_certificate(path.read_bytes()).subject
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=300))
        .not_valid_after(now + timedelta(days=days))
        .sign(key, hashes.SHA256())
    )
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


@pytest.mark.parametrize("file", ["client.crt", "rootCA.pem"])
def test_an_expired_certificate_is_named_when_one_joins(kit, file, monkeypatch):
    """There were 100 s of silence."""
    from unalike.cross_silo import flare_kits

    monkeypatch.setattr(os, "execve", lambda *a: pytest.fail("it joined"))
    expire(kit / "startup" / file)
    with pytest.raises(UserError, match=f"{file} expired on 20"):
        flare_kits.join(kit, organisations.describe(kit.parent, "a", alike=True))


def test_a_second_instance_of_a_site_does_not_lock_the_first_out(kit, monkeypatch):
    from unalike.cross_silo import flare_kits

    monkeypatch.setattr(os, "execve", lambda *a: None)
    file = organisations.describe(kit.parent, "a", alike=True)
    flare_kits.join(kit, file)
    with pytest.raises(UserError, match=rf"has joined already \(process {os.getpid()}\)"):
        flare_kits.join(kit, file)


# before the run


def data_files(folder):
    x = np.random.default_rng(0).normal(size=(12, 6)).astype("float32")
    np.savez(folder / "train.npz", x=x, y=np.arange(12) % 3)
    np.savez(folder / "public.npz", x=x)


def client_file(folder, **fields):
    data_files(folder)
    config = {
        "id": "a",
        "model": {"name": "mlp", "width": 8},
        "task": {"name": "classification", "labels": ["x", "y", "z"]},
        "data": {"train": "train.npz", "test": "train.npz", "public": "public.npz"},
    }
    (folder / "client.yaml").write_text(yaml.safe_dump(config | fields))
    return folder / "client.yaml"


def server_file(folder, **fields):
    config = {
        "name": "hospitals",
        "algorithm": {"name": "fedavg"},
        "training": {"rounds": 2, "epochs": 1},
    }
    (folder / "hospitals.yaml").write_text(yaml.safe_dump(config | fields))
    return folder / "hospitals.yaml"


def findings(kit, file, run=None):
    from unalike.cross_silo.preflight import preflight

    found = preflight(kit, file, run and str(run))
    return {finding.subject: finding for finding in found}


def test_a_preflight_finds_what_is_not_ready(kit, tmp_path):
    found = findings(kit, client_file(tmp_path), server_file(tmp_path))
    assert found.keys() == {
        *("certificate", "server", "version", "name", "public set", "labels"),
        *("disk", "accept", "noise", "run"),
    }
    assert {name for name, finding in found.items() if not finding.fine} == {"server"}
    assert "cannot be reached" in found["server"].text and "torch" in found["version"].text
    expire(kit / "startup" / "rootCA.pem")
    certificate = findings(kit, tmp_path / "client.yaml")["certificate"]
    assert not certificate.fine and "expired on" in certificate.text


@pytest.mark.parametrize(
    "client, server, subject, reason",
    [
        ({"id": "b"}, {}, "name", 'the certificate is of "a" and client.yaml has the id "b"'),
        ({"policy": {"methods": ["fedprox"]}}, {}, "run", "allows the methods fedprox"),
        ({"privacy": {"noise": 4}}, {}, "run", "takes part only with privacy"),
        ({"data": {"train": "nowhere.npz"}}, {}, "client.yaml", "nowhere.npz cannot be read"),
        ({}, {"algorithm": {"name": "afmcc"}}, "run", "wants classification"),
    ],
)
def test_a_preflight_names_each_problem(kit, tmp_path, client, server, subject, reason):
    found = findings(kit, client_file(tmp_path, **client), server_file(tmp_path, **server))
    assert not found[subject].fine and reason in found[subject].text


def test_the_command_prints_the_findings(kit, tmp_path):
    result = RUNNER.invoke(app, ["join", str(kit), str(client_file(tmp_path)), "--check"])
    assert result.exit_code == 1 and "PROBLEM server" in result.output.replace("  ", " ")
    assert "ok      labels" in result.output


def test_labels_are_matched_by_name(tmp_path):
    """Sites that write them in another order were not averaged with the others."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one = load_client(client_file(tmp_path / "one"))
    task = {"name": "classification", "labels": ["z", "x", "y"]}
    two = load_client(client_file(tmp_path / "two", task=task))
    assert one.info().labels == two.info().labels == ("x", "y", "z")
    rows = torch.arange(12)
    named = lambda client: [client.task.labels[i] for i in client.train.rows(rows)[1].tolist()]
    assert named(one)[:3] == ["x", "y", "z"] and named(two)[:3] == ["z", "x", "y"]
    many = {"name": "classification", "labels": [str(i) for i in range(12)]}
    assert load_client(client_file(tmp_path / "one", task=many)).task.labels[-1] == "11"


def test_the_documented_file_of_a_server_is_fine(tmp_path):
    result = RUNNER.invoke(app, ["check", str(server_file(tmp_path))])
    assert result.exit_code == 0 and "clients bring themselves" in result.output, result.output


def test_an_audit_knows_the_engine_and_shows_the_digest(tmp_path):
    file, run = (
        client_file(tmp_path),
        server_file(tmp_path, algorithm={"name": "fedmuscle", "batch": 4, "peers": 1}),
    )
    messages = {}
    for engine in ("flare", "flower"):
        report = audit_client_file(file, str(run), None, None, engine)
        assert report["engine"] == engine and len(report["digest"]) == 64
        rounds = [sum(m["rounds"].values()) for m in report["clients"]["a"]["messages"]]
        messages[engine] = sum(rounds)
    assert messages["flower"] != messages["flare"], "sync: epoch is Flower's default"


def test_paths_of_an_engine_hold_in_any_folder(tmp_path, monkeypatch):
    from unalike.runs.api import with_absolute_paths

    pytest.importorskip("nvflare", reason="the extra flare is not installed")
    monkeypatch.chdir(tmp_path)
    engine = with_absolute_paths({"name": "flare", "kit": "admin"})
    assert engine == {"name": "flare", "kit": str(tmp_path / "admin")}


def test_the_gate_writes_down_who_was_not_let_in(tmp_path):
    pytest.importorskip("flwr", reason="the extra flower is not installed")
    from unalike.base.events import read_events
    from unalike.cross_silo.gate import REFUSALS, Gate

    gate = Gate.__new__(Gate)
    gate.refusals, gate.noted = tmp_path / REFUSALS, {}
    for _ in range(3):
        gate.note("10.0.0.1", "its key is none of those")
    (entry,) = read_events(tmp_path / REFUSALS)
    assert entry["peer"] == "10.0.0.1" and "key" in entry["reason"]
