"""On a real Ray cluster every method ends as it does locally, also where clients die or freeze.

Ray uses the machine's address, so all of it happens in a namespace where only loopback is up, in
one program: on_ray.py.
"""

import json
import os
import signal
import subprocess
import time

import pytest
from real import REAL, note_faults
from storms import ALONE, run_storm
from storms import begin_on_ray as program

pytest.importorskip("ray", reason="the extra ray is not installed")


def isolated():
    try:
        return subprocess.run([*ALONE, "true"], capture_output=True, timeout=20).returncode == 0
    except OSError:
        return False


pytestmark = pytest.mark.skipif(
    not isolated(),
    reason="unshare may not make a network namespace here, and tests use loopback only",
)
faults = pytest.mark.skipif(
    not os.environ.get("UNALIKE_FAULTS"), reason="takes minutes: make test-faults"
)


def run_steps(folder, *steps):
    process = program(folder, *steps)
    try:
        out, problems = process.communicate(timeout=1800)
    finally:
        process.kill()  # its cluster ends with it
    assert process.returncode == 0, problems[-3000:]
    assert not out or "severed" in steps, (
        "stdout is for results, and Ray is not to write on it, but for a node that died"
    )
    report = json.loads((folder / "report.json").read_text())
    note_faults("ray", report)
    return report


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run_steps(tmp_path_factory.mktemp("ray"), "methods", "killed", "frozen", "rubbish")


@pytest.mark.parametrize("name", REAL)
def test_every_method_ends_the_same_with_the_same_ledger(name, outcomes):
    outcome = outcomes["methods"][name]
    assert outcome["apart"] <= 1e-9 and outcome["same_ledger"]


def test_privacy_is_the_same_on_ray(outcomes):
    outcome = outcomes["methods"]["private"]
    assert outcome["apart"] <= 1e-9 and outcome["same_ledger"]
    assert outcome["spent"][0] == outcome["spent"][1] and outcome["spent"][0]["releases"] == 2


def test_an_actor_killed_in_the_middle_of_a_round_changes_nothing(outcomes):
    assert outcomes["killed"]["struck"] == 1 and outcomes["killed"]["same"]
    assert 0 < outcomes["killed"]["seconds"] < 60, (
        "5 s is the bar on a machine that has nothing else to do"
    )


def test_a_frozen_client_fails_in_time_and_keeps_its_state(outcomes):
    outcome = outcomes["frozen"]
    assert outcome["failure"] == "did not answer within 4 s" and 4 <= outcome["took"] < 6
    assert outcome["heard"] == 2 and outcome["other"] and outcome["same"]


def test_a_client_with_malformed_replies_is_excluded(outcomes):
    """It is asked again in a later round, and excluded again."""
    failures = outcomes["rubbish"]["failures"]
    assert failures and outcomes["rubbish"]["rounds"] == 2
    for failure in failures:
        assert failure["client"] == "b"
        assert failure["reason"].startswith(
            "its reply is no message: these bytes are no unalike message"
        )


@faults
def test_an_order_of_arrivals_on_ray_is_replayed_locally(tmp_path):
    outcome = run_steps(tmp_path, "order")["order"]
    assert outcome["apart"] <= 1e-9 and outcome["same_ledger"]


@faults
def test_a_spare_process_takes_over_within_5_s(tmp_path):
    outcome = run_steps(tmp_path, "relieved")["relieved"]
    assert outcome["struck"] == 1 and outcome["same"] and outcome["seconds"] < 5


@faults
def test_fifty_kills_of_clients_and_server_change_nothing(tmp_path):
    """Ten of the server, the rest of clients."""
    outcome = run_storm("ray", tmp_path, 50)
    assert outcome["same"]
    assert outcome["killed"]["server"] == 10 and outcome["killed"]["client"] >= 40


@faults
def test_a_network_cut_for_a_while_or_for_good_changes_nothing(tmp_path):
    outcome = run_steps(tmp_path, "severed")["severed"]
    assert (
        outcome["healed"]["same"]
        and outcome["healed"]["nodes"] == 2
        and outcome["healed"]["longest"] < 30
    )
    assert (
        outcome["cut"]["same"] and outcome["cut"]["nodes"] == 2 and outcome["cut"]["longest"] < 60
    )


@faults
def test_a_server_killed_and_resumed_ends_as_if_nothing_had_happened(tmp_path):
    for rounds in (1, 3):
        process = program(tmp_path, "server")
        events = tmp_path / "server" / "cut" / "events.jsonl"
        while process.poll() is None and not (
            events.exists() and events.read_text().count('"event": "round"') >= rounds
        ):
            time.sleep(0.05)
        time.sleep(0.3)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    outcome = run_steps(tmp_path, "server")["server"]
    assert outcome["same"] and outcome["resumed"] == 2
