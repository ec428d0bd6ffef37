"""In a real FLARE federation every method ends as it does locally, also where a client dies.

All of it happens in one program, on_flare.py, which ends with the processes it started.
"""

import json
import os
import re
import socket
import sys
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import organisations
import pytest
from organisations import run_steps
from real import REAL
from storms import run_storm

from unalike.base.errors import UserError
from unalike.engines.process import EngineError

pytest.importorskip("nvflare", reason="the extra flare is not installed")
faults = pytest.mark.skipif(
    not os.environ.get("UNALIKE_FAULTS"), reason="takes minutes: make test-faults"
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run_steps(tmp_path_factory.mktemp("flare"), "methods")["methods"]


@pytest.mark.parametrize("name", REAL)
def test_every_method_ends_the_same_with_the_same_ledger(name, outcomes):
    outcome = outcomes[name]
    assert "problem" not in outcome, outcome
    assert outcome["apart"] <= 1e-9 and outcome["same_ledger"]


def test_logs_of_sites_are_not_read(outcomes):
    assert outcomes["read"] == []


def test_privacy_is_part_of_the_plan_that_clients_get(outcomes):
    outcome = outcomes["private"]
    assert (
        outcome["apart"] <= 1e-9
        and outcome["same_ledger"]
        and outcome["spent"][0] == outcome["spent"][1]
    )


@faults
def test_a_client_killed_in_the_middle_of_a_round_changes_nothing(tmp_path):
    outcome = run_steps(tmp_path, "killed")["killed"]
    assert (
        outcome["struck"]
        and outcome["rounds"] == 3
        and outcome["apart"] <= 1e-9
        and outcome["same_ledger"]
    )
    assert 0 < outcome["seconds"] < 90, "20 s is the bar on a machine that has nothing else to do"
    assert not outcome["left"], "processes outlived the federation"


@faults
def test_fifty_kills_of_clients_and_server_change_nothing(tmp_path):
    """Five of the program that submits the jobs, the rest of sites, clients and servers."""
    outcome = run_storm("flare", tmp_path, 50)
    assert sum(outcome["killed"].values()) >= 50 and outcome["killed"]["program"] == 5
    assert outcome["rounds"] == outcome["planned_rounds"] and outcome["same"]
    assert not outcome["left"], "processes outlived the federation"


@faults
def test_an_administrator_cannot_run_code_or_read_logs_at_a_site(tmp_path):
    """Site a has our authorization, b our guards; c has neither, and there the attacks succeed."""
    outcome = run_steps(tmp_path, "administrator")["administrator"]
    assert outcome["read"] == outcome["custom"] == outcome["installed"] == ["c"]
    assert outcome["apart"] <= 1e-9 and outcome["same_ledger"], "our run"


@faults
def test_intruders_are_not_let_in_and_the_honest_run_ends(tmp_path):
    """No key, another's name, an old certificate, another authority's, bytes of a member again."""
    outcome = run_steps(tmp_path, "intruders")["intruders"]
    assert outcome["c"] and outcome["with a certificate"], "a member is let in by the same means"
    assert not outcome["no certificate"]
    assert not outcome["another's name"]
    assert not outcome["old certificate"]
    assert not outcome["other authority"]
    assert outcome["recorded"] > 1000 and not outcome["replay"]
    assert outcome["sites"] == ["a", "b", "c"]
    assert outcome["apart"] <= 1e-9 and outcome["same_ledger"]


class Proxy:
    """A site that is there, or is not any more, and then FLARE waits."""

    def __init__(self, name):
        self.name, self.gone, self.calls = name, threading.Event(), []

    def call_func(self, option, name, args, kwargs):
        self.calls.append(name)
        if self.gone.wait(0.3 if name == "answer" else 0.0):
            time.sleep(option.timeout)
            raise TimeoutError
        return b"answered"


def test_a_site_that_is_gone_has_failed_and_one_that_takes_long_has_not():
    from unalike.cross_silo.flare import FlareTransport

    long, gone_site = Proxy("long"), Proxy("left")
    transport = FlareTransport([long, gone_site], lambda: False, reach=0.2)
    gone_site.gone.set()
    answers = [
        transport.request(name, "call", b"", "run", "clients", 2.0) for name in ("long", "left")
    ]
    start = time.monotonic()
    assert (
        "could not be reached for 0.2 s: it left" in str(answers[1].exception(5))
        and time.monotonic() - start < 1.5
    )
    assert transport.request("left", "save", b"", "run", "clients", 2.0).done(), (
        "it is not waited for again"
    )
    assert answers[0].result(5) == b"answered" and "ping" in long.calls


def test_that_there_is_no_sign_of_a_site_is_said_long_before_it_is_left_out():
    from unalike.cross_silo.flare import FlareTransport

    class Silent(Proxy):
        def call_func(self, option, name, args, kwargs):
            if self.gone.is_set() or name == "answer":
                time.sleep(min(option.timeout, 0.05))
                raise TimeoutError
            return True

    silent = Silent("a")
    transport = FlareTransport([silent], lambda: False, reach=2.0)
    said = []
    transport.say = said.append
    transport.in_flight["a"] = None  # a request that is being answered
    transport.last_sign["a"] = time.monotonic()
    silent.gone.set()
    wait_until(lambda: said)
    assert re.fullmatch(r"no sign of a for \S+ s; without one it is left out after 2 s", said[0])
    silent.gone.clear()
    wait_until(lambda: len(said) > 1)
    assert said[1] == "a is there again" and "a" not in transport.unreachable


def wait_until(true, seconds=20.0):
    start = time.monotonic()
    while not true():
        assert time.monotonic() - start < seconds
        time.sleep(0.01)


def test_an_answer_is_freed_once_it_was_taken():
    """It may have 200 MB, and so may that of everyone else."""
    from unalike.cross_silo.flare import FlareTransport

    transport = FlareTransport([Proxy("a")], lambda: False, reach=0.06)
    answer = transport.request("a", "call", b"", "run", "clients", 2.0)
    assert answer.result(5) == b"answered"
    reference = weakref.ref(answer)
    del answer
    until = time.monotonic() + 2
    while reference() is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert reference() is None


def test_a_folder_that_is_no_startup_kit_is_reported(tmp_path):
    from unalike.cross_silo.flare import Session
    from unalike.cross_silo.flare_kits import join

    with pytest.raises(UserError, match="no administrator's startup kit"):
        Session(tmp_path)._admin()
    with pytest.raises(UserError, match="no startup kit of a server or a client"):
        join(tmp_path, tmp_path / "client.yaml")


@pytest.fixture
def here(tmp_path):
    """A federation on this machine that was not started."""
    from unalike.cross_silo import flare_kits as kits

    here = kits.LocalFlareFederation(tmp_path / "flare", ["a"], tmp_path)
    yield here
    here.stop()


def test_jobs_carry_no_code_and_sites_allow_two_classes(tmp_path, here):
    from unalike.cross_silo import flare, policy

    job = tmp_path / "job"
    flare.Job(policy.ALLOWED_CLASSES["server"][1], {"folders": [], "timeout": 1.0}, 1).write(job)
    assert sorted(path.suffix for path in job.rglob("*") if path.is_file()) == [".json"] * 3
    for kit, which in (("a", "client"), ("localhost", "server")):
        allowed = json.loads((here.kits / kit / "local" / "resources.json").read_text())
        assert (
            allowed["class_allow_list"] == policy.ALLOWED_CLASSES[which]
            and not allowed["allow_log_streaming"]
        )
        assert allowed["class_list_enforcement_mode"] == "enforce"
    target = json.loads((here.kits / "localhost" / "startup" / "fed_server.json").read_text())[
        "servers"
    ][0]
    assert (
        target["service"]["target"].startswith("localhost:")
        and target["connection_security"] == "mtls"
    )


def permits(kit, role, right):
    """What FLARE makes of a kit's authorization, for a person of another organisation."""
    from nvflare.fuel.sec.authz import AuthzContext, Person
    from nvflare.security.security import FLAuthorizer

    authorizer = FLAuthorizer(
        "hospital", json.loads((kit / "local" / "authorization.json").read_text())
    )
    return authorizer.authorize(
        AuthzContext(right, Person("eve", "network", role), Person("eve", "network", role))
    )[0]


def test_an_administrator_may_run_our_job_and_nothing_else(here):
    commands = [
        "cat",
        "ls",
        "tail",
        "head",
        "grep",
        "pwd",
        "get_job_log",
        "download_job",
        "configure_site_log",
        "configure_job_log",
        "shutdown",
        "restart",
        "sys_info",
        "report_env",
        "call",
        "app_command",
        "show_errors",
        "clone_job",
        "byoc",
    ]
    for kit in (here.kits / "a", here.kits / "localhost"):
        assert all(
            permits(kit, "project_admin", right)
            for right in ("submit_job", "abort_job", "get_job_meta", "check_status")
        )
        assert permits(kit, "lead", "submit_job") and not permits(kit, "member", "submit_job")
        for role in ("project_admin", "org_admin", "lead", "member", "stranger"):
            assert not [right for right in commands if permits(kit, role, right)], role


def test_a_site_deletes_jobs_that_are_not_ours(tmp_path):
    from unalike.cross_silo import flare, guard, policy

    flare.Job(policy.ALLOWED_CLASSES["server"][1], {"folders": [], "timeout": 1.0}, 1).write(
        tmp_path
    )
    app, check = tmp_path / "app", guard.JobGuard().validate
    (app / ".__nvfl_sig.json").write_text("{}")  # as it comes from the server
    assert check(str(app)) == ("", {})
    more = app / "custom" / "code.py"
    more.parent.mkdir()
    more.symlink_to("elsewhere")
    assert "has no file custom/code.py" in check(str(app))[0]
    more.unlink()
    config = app / "config" / "config_fed_client.json"
    default = json.loads(config.read_text())
    config.write_text(
        json.dumps(
            default
            | {"components": [*default["components"], {"id": "b", "path": "os.system", "args": {}}]}
        )
    )
    assert "is of another" in check(str(app))[0]
    config.unlink()
    assert "can be read" in check(str(app))[0]


def joined(kit, monkeypatch):
    """`unalike join` with a client's kit, until it would become FLARE's process."""
    from unalike.cross_silo import flare_kits as kits

    started = []
    monkeypatch.setattr(kits.os, "execve", lambda *command: started.append(command))
    monkeypatch.setattr(kits, "hold_kit", lambda kit: None)  # held until this process ends
    file = organisations.describe(kit.parent, "a", alike=True)
    kits.join(kit, file)
    _, _, environment = started[0]
    assert environment[kits.CLIENT_FILE] == str(file)
    assert kits.CLIENT_FILE not in os.environ, "federations that this process starts have others"


def test_join_replaces_an_authorization_that_allows_more_and_says_so(
    tmp_path, here, monkeypatch, capsys
):
    monkeypatch.setattr("unalike.scenarios.client_config.load_client", lambda file: None)
    kit = here.kits / "a"
    path = kit / "local" / "authorization.json"
    default = path.read_text()
    joined(kit, monkeypatch)
    assert path.read_text() == default and not capsys.readouterr().err, (
        "its own file is not worth a word"
    )
    loose = json.dumps({"format_version": "1.0", "permissions": {"project_admin": "any"}})
    for text in (
        loose,
        default.replace('"byoc": "none"', '"byoc": "o:network"'),
        default.replace('"member"', '"guest"'),
        "not JSON",
    ):
        path.write_text(text)
        joined(kit, monkeypatch)
        assert "allowed others more than unalike's jobs and was replaced" in capsys.readouterr().err
        assert (
            path.read_text() == default
            and path.with_name("authorization.json.replaced").read_text() == text
        )
    strict = json.dumps(
        {
            "format_version": "1.0",
            "permissions": {"project_admin": {"submit_job": "n:ada@clinic.org", "byoc": "none"}},
        }
    )
    path.write_text(strict)
    joined(kit, monkeypatch)
    assert path.read_text() == strict and not capsys.readouterr().err, "a site may allow less"


def test_sites_started_here_do_not_inherit_the_client_of_this_process(tmp_path, monkeypatch):
    """They all read one client.yaml, and all but one were refused."""
    from unalike.cross_silo import flare_kits as kits

    monkeypatch.setenv(kits.CLIENT_FILE, "elsewhere.yaml")
    log = tmp_path / "log"
    show = "import os; print(sorted(os.environ))"
    process = kits.start_process([sys.executable, "-c", show], log, MARK="1")
    assert process.wait(timeout=20) == 0
    names = log.read_text()
    assert "'MARK'" in names and kits.CLIENT_FILE not in names


def test_join_lets_only_its_owner_read_a_key(tmp_path, monkeypatch):
    from unalike.cross_silo import flare_kits as kits

    monkeypatch.setattr("unalike.scenarios.client_config.load_client", lambda file: None)
    kits.provision(tmp_path, ["a"])
    kit = tmp_path / "unalike" / "prod_00" / "a"
    (kit / "startup" / "client.key").chmod(0o644)
    joined(kit, monkeypatch)
    assert (kit / "startup" / "client.key").stat().st_mode & 0o777 == 0o600 and (
        kit / "startup"
    ).stat().st_mode & 0o777 == 0o700


def secrets(folder):
    """Files below a folder that hold a private key; links are not followed."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return [
        path
        for path in files
        if b"PRIVATE KEY" in path.read_bytes() or b"pri_key" in path.read_bytes()
    ]


def test_a_run_folder_has_no_private_key(tmp_path):
    from unalike.cross_silo import flare_kits as kits

    old = tmp_path / "flare" / "unalike"  # as earlier versions left it
    for path in (old / "state" / "cert.json", old / "prod_00" / "a" / "startup" / "client.key"):
        path.parent.mkdir(parents=True)
        path.write_text("root_pri_key: PRIVATE KEY")
    here = kits.LocalFlareFederation(tmp_path / "flare", ["a", "b"], tmp_path)
    place = Path(here.private_folder.name)
    assert not secrets(tmp_path) and place.stat().st_mode & 0o777 == 0o700
    keys = secrets(place)
    assert {path.relative_to(place / "unalike" / "prod_00").as_posix() for path in keys} == {
        "a/startup/client.key",
        "b/startup/client.key",
        "localhost/startup/server.key",
        f"{kits.ADMIN}/startup/client.key",
    }
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in keys)
    assert (here.kits / "a" / "startup" / "client.key").read_bytes() == keys[0].parents[2].joinpath(
        "a/startup/client.key"
    ).read_bytes()
    here.stop()
    assert not place.exists() and not list(tmp_path.rglob("*.key"))


def test_a_federation_that_is_started_again_has_new_keys_and_its_clients_files(tmp_path):
    from unalike.cross_silo import flare_kits as kits

    authorities = []
    for content in ("first", "second"):
        here = kits.LocalFlareFederation(tmp_path / "flare", ["a"], tmp_path)
        file = here.kits / "a" / "local" / "client.yaml"
        assert content == "first" or file.read_text() == "first"
        file.write_text(content)
        authorities.append((here.kits / "a" / "startup" / "rootCA.pem").read_bytes())
        here.stop()
    assert authorities[0] != authorities[1]


def test_a_job_is_submitted_to_a_server_that_was_just_started_again(monkeypatch):
    from unalike.cross_silo import flare

    tried = []

    class Known:
        def submit_job(self, place):
            tried.append(place)
            if len(tried) == 1:
                raise ConnectionError("cannot connect to server")
            return "number"

        def close(self):
            pass

    monkeypatch.setattr(flare.Session, "_connect", lambda self: Known())
    session = flare.Session(Path("kit"))
    job = flare.Job("p", {}, 3)
    assert (
        session.submit(job)
        and len(tried) == 2
        and session.job_id == "number"
        and job.min_clients == 3
    )
    monkeypatch.setattr(flare, "START_TIMEOUT", 0.0)
    tried.clear()
    with pytest.raises(EngineError, match="FLARE's server takes no job: cannot connect"):
        session.submit(job)


def system(start, sites):
    """What FLARE's server says of itself."""
    heard = [SimpleNamespace(name=name, last_connect_time=time.time()) for name in sites]
    server_info = SimpleNamespace(start_time=start)
    return SimpleNamespace(server_info=server_info, client_info=heard)


@pytest.fixture
def admin(tmp_path):
    """A session with an administrator's kit as `unalike deploy flare` leaves it; no server."""
    from unalike.cross_silo import flare

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    (tmp_path / "admin" / "startup").mkdir(parents=True)
    config = {"admin": {"username": "admin", "host": "127.0.0.1", "port": port}}
    (tmp_path / "admin" / "startup" / "fed_admin.json").write_text(json.dumps(config))
    for site in "abc":
        (tmp_path / "sites" / site).mkdir(parents=True)
    session = flare.Session(tmp_path / "admin")
    session.port, session.said = port, []
    session.watch = lambda event, **facts: session.said.append(facts["text"])
    return session


def test_a_run_goes_on_when_flares_server_was_started_again(admin, monkeypatch):
    """It says of a job before that it is running, which nobody does any more."""
    from unalike.cross_silo import flare

    monkeypatch.setattr(flare, "WAITING_POLL", 0.0)
    look = flare.Waiting(admin, 3)
    start = 1.0
    monkeypatch.setattr(admin, "system_info", lambda: start and system(start, "abc"))
    assert look.report("SUBMITTED") is None
    start = 2.0  # started again before the job began: the job is its own
    assert look.report("SUBMITTED") is look.report("RUNNING") is None
    start = None  # starting
    assert look.report("RUNNING") is None
    start = 3.0
    assert look.report("RUNNING") == "FLARE's server was started again"
    start, admin.lost = 2.0, {"b"}
    assert look.report("RUNNING") == "b came back"


def test_sites_that_are_awaited_are_named(admin, monkeypatch):
    from unalike.cross_silo import flare

    monkeypatch.setattr(flare, "WAITING_POLL", 0.0)
    monkeypatch.setattr(admin, "system_info", lambda: system(1.0, "ca"))
    look = flare.Waiting(admin, 3)
    look.report("SUBMITTED")
    look.report("SUBMITTED")
    assert admin.said == ["waiting for sites: 2 of 3 are connected (a, c); not connected: b"]


def test_that_flares_server_is_away_is_said_before_a_command_hangs(admin, monkeypatch):
    from unalike.cross_silo import flare

    monkeypatch.setattr(flare, "START_TIMEOUT", 0.5)
    monkeypatch.setattr(flare, "check_certificate", lambda path: None)
    where = f"FLARE's server at 127.0.0.1:{admin.port}"
    start = time.monotonic()
    with pytest.raises(EngineError, match=f"{where} cannot be reached"):
        admin._connect()
    assert time.monotonic() - start < 5.0
    assert admin.said == [f"{where} cannot be reached: waiting up to 0.5 s for it"]
    admin.abort()  # which cannot reach it either, and does not try
    with socket.create_server(("127.0.0.1", admin.port)):
        admin._await_server()
    assert admin.said[1:] == [f"{where} is there again"]


def test_the_benchmark_kills_after_a_round_was_saved(tmp_path, monkeypatch):
    """A round is logged before it is saved: a kill in between would measure a new start."""
    from unalike.cli.benchmarks import benchmark_module
    from unalike.cross_silo import flare_kits

    bench = benchmark_module("flare")

    struck, killed, events = [], [], tmp_path / "events.jsonl"
    monkeypatch.setattr(flare_kits, "job_processes", lambda kit: [7])
    monkeypatch.setattr(
        bench.os, "kill", lambda pid, how: killed.append(events.read_text().count("\n"))
    )
    lines = [
        '{"event": "round", "round": 1}\n',
        '{"event": "note", "round": 2, "values": {"a": 1}',
        "}\n",
    ]

    def ended():  # looked at before each look at the events
        with events.open("a") as file:
            file.write(lines.pop(0))

    bench.strike(tmp_path, struck, ended)
    assert killed == [2] and len(struck) == 1
