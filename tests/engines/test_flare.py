"""In a real FLARE federation every method ends as it does here, over mutual TLS, and a client that dies does no harm.

All of it happens in one program, on_flare.py, which ends with the processes it started.
"""

import json
import os
import random
import threading
import time
import weakref
from pathlib import Path

import organisations
import pytest
from organisations import told
from real import REAL

from unalike.base.errors import UserError
from unalike.engines.process import EngineError

pytest.importorskip("nvflare", reason="the extra flare is not installed")
faults = pytest.mark.skipif(
    not os.environ.get("UNALIKE_FAULTS"), reason="takes minutes: make test-faults"
)


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return told(tmp_path_factory.mktemp("flare"), "methods")["methods"]


@pytest.mark.parametrize("name", REAL)
def test_every_method_ends_the_same_with_the_same_ledger(name, seen):
    there = seen[name]
    assert "problem" not in there, there
    assert there["apart"] <= 1e-9 and there["same_ledger"]


def test_privacy_goes_with_the_terms(seen):
    there = seen["private"]
    assert (
        there["apart"] <= 1e-9 and there["same_ledger"] and there["spent"][0] == there["spent"][1]
    )


@faults
def test_a_client_killed_in_the_middle_of_a_round_changes_nothing(tmp_path):
    there = told(tmp_path, "killed")["killed"]
    assert (
        there["struck"] and there["rounds"] == 3 and there["apart"] <= 1e-9 and there["same_ledger"]
    )
    assert 0 < there["seconds"] < 90, "20 s is the bar on a machine that has nothing else to do"
    assert not there["left"], "processes outlived the federation"


@faults
def test_fifty_kills_of_clients_and_server_change_nothing(tmp_path):
    """Five of the program that submits the jobs, the rest at random: storm kills these itself."""
    deaths, events = tmp_path / "storm" / "kills", tmp_path / "storm" / "away" / "events.jsonl"
    rounds = lambda: events.read_text().count('"event": "round"') if events.exists() else 0
    for _ in range(5):
        process, before = organisations.begin(tmp_path, "storm"), rounds()
        while process.poll() is None and rounds() == before:
            time.sleep(0.1)
        time.sleep(random.uniform(0, 10))
        assert process.poll() is None, process.communicate()[1][-3000:]
        process.kill()
        process.communicate()
        with deaths.open("a") as file:
            file.write("kill program\n")
    there = told(tmp_path, "storm", seconds=3600)["storm"]
    assert sum(there["killed"].values()) >= 50 and there["killed"]["program"] == 5
    assert there["rounds"] == 140 and there["apart"] <= 1e-9 and there["same_ledger"]
    assert not there["left"], "processes outlived the federation"


@faults
def test_a_stranger_is_not_let_in(tmp_path):
    assert told(tmp_path, "stranger")["stranger"]["names"] in ([], ["a"])


class Proxy:
    """A site that is there, or is not any more, and then FLARE waits."""

    def __init__(self, name):
        self.name, self.gone, self.asked = name, threading.Event(), []

    def call_func(self, option, name, args, kwargs):
        self.asked.append(name)
        if self.gone.wait(0.3 if name == "answer" else 0.0):
            time.sleep(option.timeout)
            raise TimeoutError
        return b"answered"


def test_a_site_that_is_gone_has_failed_and_one_that_takes_long_has_not():
    from unalike.cross_silo.flare import FlareLine

    long, left = Proxy("long"), Proxy("left")
    line = FlareLine([long, left], lambda: False, reach=0.2)
    left.gone.set()
    answers = [line.ask(name, "call", b"", "run", "clients", 2.0) for name in ("long", "left")]
    begun = time.monotonic()
    assert (
        "could not be reached for 0.2 s: it left" in str(answers[1].exception(5))
        and time.monotonic() - begun < 1.5
    )
    assert line.ask("left", "save", b"", "run", "clients", 2.0).done(), "it is not waited for again"
    assert answers[0].result(5) == b"answered" and "present" in long.asked


def test_an_answer_that_was_taken_is_not_kept():
    """It may have 200 MB, and so may that of everyone else."""
    from unalike.cross_silo.flare import FlareLine

    line = FlareLine([Proxy("a")], lambda: False, reach=0.06)
    answer = line.ask("a", "call", b"", "run", "clients", 2.0)
    assert answer.result(5) == b"answered"
    kept = weakref.ref(answer)
    del answer
    until = time.monotonic() + 2
    while kept() is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert kept() is None


def test_a_startup_kit_that_is_none_is_told(tmp_path):
    from unalike.cross_silo.flare import Session
    from unalike.cross_silo.flare_kits import join

    with pytest.raises(UserError, match="no administrator's startup kit"):
        Session(tmp_path)._admin()
    with pytest.raises(UserError, match="no startup kit of a server or a client"):
        join(tmp_path, tmp_path / "client.yaml")


def test_jobs_carry_no_code_and_sites_allow_two_classes(tmp_path):
    from unalike.cross_silo import flare
    from unalike.cross_silo import flare_kits as kits

    flare.Job(kits.ALLOWED["server"][1], {"folders": [], "timeout": 1.0}, 1).write(tmp_path)
    assert sorted(path.suffix for path in tmp_path.rglob("*") if path.is_file()) == [".json"] * 3
    here = kits.Local(tmp_path / "flare", ["a"], tmp_path)
    default = json.loads((here.kits / "a" / "local" / "resources.json.default").read_text())[
        "class_allow_list"
    ]
    allowed = json.loads((here.kits / "a" / "local" / "resources.json").read_text())
    assert (
        set(allowed["class_allow_list"]) - set(default) == set(kits.ALLOWED["client"])
        and not allowed["allow_log_streaming"]
    )
    target = json.loads((here.kits / "localhost" / "startup" / "fed_server.json").read_text())[
        "servers"
    ][0]
    assert (
        target["service"]["target"].startswith("localhost:")
        and target["connection_security"] == "mtls"
    )


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

    monkeypatch.setattr(flare.Session, "_session", lambda self: Known())
    session = flare.Session(Path("kit"))
    job = flare.Job("p", {}, 3)
    assert session.submit(job) and len(tried) == 2 and session.number == "number" and job.least == 1
    monkeypatch.setattr(flare, "START", 0.0)
    tried.clear()
    with pytest.raises(EngineError, match="FLARE's server takes no job: cannot connect"):
        session.submit(job)


def test_the_bench_strikes_once_there_is_a_round_to_go_on_from(tmp_path, monkeypatch):
    """A round is told before it is saved: struck then, the run would begin anew, and nothing was measured."""
    from unalike.benches import flare as bench

    struck, killed, events = [], [], tmp_path / "events.jsonl"
    monkeypatch.setattr(bench.kits, "job_processes", lambda kit: [7])
    monkeypatch.setattr(
        bench.os, "kill", lambda pid, how: killed.append(events.read_text().count("\n"))
    )
    told = [
        '{"event": "round", "round": 1}\n',
        '{"event": "note", "round": 2, "values": {"a": 1}',
        "}\n",
    ]

    def ended():  # looked at before each look at the events
        with events.open("a") as file:
            file.write(told.pop(0))

    bench.strike(tmp_path, struck, ended)
    assert killed == [2] and len(struck) == 1
