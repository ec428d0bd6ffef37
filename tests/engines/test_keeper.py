"""Nothing outlives its keeper: neither what it runs nor what that started, in whichever session, however any of them ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from unalike.cross_silo import supervisor as keeper

# a command that starts another in a session of its own, as FLARE does its jobs, and says who both are
COMMAND = """
import os, subprocess, sys, time
job = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
open(sys.argv[1] + "~", "w").write(f"{os.getpid()} {job.pid}")
os.rename(sys.argv[1] + "~", sys.argv[1])
time.sleep(60)
"""
STARTER = "import os, subprocess, sys; from unalike.cross_silo import keeper; subprocess.run(keeper.command(sys.argv[1:], os.getpid()))"


def about(pid):
    """Its state and its parent."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]


def alive(pid):
    try:
        return about(pid)[0] != "Z"
    except OSError:
        return False


def until(true, seconds=20.0):
    begun = time.monotonic()
    while not true():
        assert time.monotonic() - begun < seconds
        time.sleep(0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="keepers know processes from /proc")
@pytest.mark.parametrize("who", ["starter", "keeper", "command", "job"])
def test_nobody_is_left(who, tmp_path):
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, sys.executable, "-c", COMMAND, str(tmp_path / "pids")]
    )
    try:
        until((tmp_path / "pids").exists)
        command, job = map(int, (tmp_path / "pids").read_text().split())
        kept = int(about(command)[1])
        assert {command, job} <= set(keeper.below(starter.pid))
        pids = {"starter": starter.pid, "keeper": kept, "command": command, "job": job}
        os.kill(pids[who], signal.SIGTERM if who == "keeper" else signal.SIGKILL)
        if who == "job":  # that is its command's to see
            until(lambda: not alive(job))
            assert alive(command)
            os.kill(starter.pid, signal.SIGKILL)
        until(lambda: not any(map(alive, (kept, command, job))))
    finally:
        starter.kill()
        starter.wait()
