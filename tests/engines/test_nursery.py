"""Programs that are forked from a process that has made their imports: they have what who asked has, and either ends with the other."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from unalike.cross_silo import prefork as nursery
from unalike.cross_silo import supervisor as keeper

PROGRAM = """
import os, sys, time
print(sys.argv[1:], os.getcwd(), os.environ["WORD"], "imported before" if "wave" in sys.modules else "not", os.getpid(), flush=True)
time.sleep(float(sys.argv[1]))
sys.exit(7)
"""


@pytest.fixture
def nurse(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    nurse = subprocess.Popen(
        keeper.command(
            [sys.executable, nursery.__file__, "nurse", str(tmp_path / "here"), "wave"], os.getpid()
        ),
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    while not (tmp_path / "here").exists():
        time.sleep(0.01)
    yield nurse
    keeper.stop([nurse])


@pytest.fixture
def place(nurse, tmp_path):
    return tmp_path / "here"


def ask(place, *what):
    environment = {**os.environ, "WORD": "told", "PYTHONPATH": str(place.parent)}
    return subprocess.Popen(
        [sys.executable, "-S", "-E", nursery.__file__, "ask", str(place), "-m", "program", *what],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        cwd=place.parent,
    )


def ends(pid, seconds=5.0):
    """Whether a process is gone, or waits only to be buried, within so long."""
    path, until = Path(f"/proc/{pid}/stat"), time.monotonic() + seconds
    with suppress(FileNotFoundError, ProcessLookupError):
        while path.read_text().rpartition(")")[2].split()[0] != "Z":
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
    return True


def test_a_program_has_what_who_asked_has_and_its_exit_code_comes_back(place):
    asked = [ask(place, str(seconds), "a b") for seconds in (0, 0.5)]
    for process, seconds in zip(asked, ("0", "0.5"), strict=True):
        said, problems = process.communicate(timeout=20)
        assert process.returncode == 7, problems
        assert (
            said.startswith(f"{[seconds, 'a b']} {place.parent} told imported before ")
            and int(said.split()[-1]) != process.pid
        )


def test_it_ends_with_who_asked(place):
    process = ask(place, "60")
    pid = int(process.stdout.readline().split()[-1])
    process.kill()
    process.wait()
    assert ends(pid)


def test_who_asked_ends_with_it_and_all_with_the_nursery(nurse, place):
    killed, process = ask(place, "60"), ask(place, "60")
    os.kill(int(killed.stdout.readline().split()[-1]), signal.SIGKILL)
    assert killed.wait(5) == 256 - signal.SIGKILL
    pid = int(process.stdout.readline().split()[-1])
    os.kill(keeper.below(nurse.pid)[0], signal.SIGKILL)
    assert process.wait(5) == 1 and nurse.wait(5) and ends(pid)


def test_who_dies_while_it_asks_does_no_harm(place):
    with socket.socket(socket.AF_UNIX) as to:
        to.connect(str(place))
        to.sendall(b"\x05")
    asked = ask(place, "0")
    asked.communicate(timeout=20)
    assert asked.returncode == 7


def test_where_nobody_nurses_it_is_run_as_it_would_be(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    process = ask(tmp_path / "nobody", "0")
    said, _ = process.communicate(timeout=20)
    assert process.returncode == 7 and " not " in said and int(said.split()[-1]) == process.pid
