"""Nothing outlives its supervisor: neither the command nor what that started, in any session."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from unalike.cross_silo import supervisor

# a command that starts a job in a session of its own, as FLARE does, and writes both pids
COMMAND = """
import os, subprocess, sys, time
job = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
open(sys.argv[1] + "~", "w").write(f"{os.getpid()} {job.pid}")
os.rename(sys.argv[1] + "~", sys.argv[1])
time.sleep(60)
"""
STARTER = """
import os, subprocess, sys
from unalike.cross_silo import supervisor
subprocess.run(supervisor.command(sys.argv[1:], os.getpid()))
"""


def state_and_parent(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]


def alive(pid):
    try:
        return state_and_parent(pid)[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds=20.0):
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds
        time.sleep(0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="supervisors find processes in /proc")
@pytest.mark.parametrize("killed", ["starter", "supervisor", "command", "job"])
def test_no_process_is_left_whichever_is_killed(killed, tmp_path):
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, sys.executable, "-c", COMMAND, str(tmp_path / "pids")]
    )
    try:
        wait_until((tmp_path / "pids").exists)
        command, job = map(int, (tmp_path / "pids").read_text().split())
        middle = int(state_and_parent(command)[1])
        assert {command, job} <= set(supervisor.descendants(starter.pid))
        pids = {"starter": starter.pid, "supervisor": middle, "command": command, "job": job}
        os.kill(pids[killed], signal.SIGTERM if killed == "supervisor" else signal.SIGKILL)
        if killed == "job":  # its command may go on without it
            wait_until(lambda: not alive(job))
            assert alive(command)
            os.kill(starter.pid, signal.SIGKILL)
        wait_until(lambda: not any(map(alive, (middle, command, job))))
    finally:
        starter.kill()
        starter.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="supervisors find processes in /proc")
def test_a_command_ends_with_a_process_that_it_cannot_do_without(tmp_path):
    """As Flower's SuperLink, which starts no app without its SuperExec, and no other SuperExec."""
    words = [sys.executable, "-c", COMMAND, str(tmp_path / "pids")]
    process = subprocess.Popen(supervisor.command(words, os.getpid(), essential="while True"))
    try:
        wait_until((tmp_path / "pids").exists)
        command, job = map(int, (tmp_path / "pids").read_text().split())
        time.sleep(supervisor.ESSENTIAL_POLL + 1.0)
        assert alive(command) and alive(job)
        os.kill(job, signal.SIGKILL)
        assert process.wait(20) == 1
        assert not alive(command)
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="supervisors find processes in /proc")
def test_processes_that_end_while_they_are_listed_are_left_out(monkeypatch):
    """Not an error, which would end the supervisor and all that it runs."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    gone = subprocess.Popen(["true"])
    gone.wait()
    everyone = [*supervisor.all_processes(), gone.pid, 2**22 + 1]
    monkeypatch.setattr(supervisor, "all_processes", lambda: everyone)
    assert process.pid in supervisor.descendants(os.getpid())
    read = Path.read_text

    def ended(path):
        if path.name == "stat":
            raise ProcessLookupError("it ended between opening and reading")
        return read(path)

    monkeypatch.setattr(Path, "read_text", ended)
    assert supervisor.descendants(os.getpid()) == []
    process.kill()
    process.wait()
