"""The prefork server: a forked program has its requester's environment and ends with it."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from unalike.cross_silo import prefork, supervisor

# sleeps for its first argument, then exits with 7
PROGRAM = """
import os, sys, time
imported = "imported before" if "wave" in sys.modules else "not imported"
print(sys.argv[1:], os.getcwd(), os.environ["WORD"], imported, os.getpid(), flush=True)
time.sleep(float(sys.argv[1]))
sys.exit(7)
"""


@pytest.fixture
def server(tmp_path):
    """A prefork server that has imported the module `wave`."""
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, prefork.__file__, "serve", str(tmp_path / "socket"), "wave"]
    server = subprocess.Popen(
        supervisor.command(command, os.getpid()),
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    while not (tmp_path / "socket").exists():
        time.sleep(0.01)
    yield server
    supervisor.stop([server])


@pytest.fixture
def address(server, tmp_path):
    return tmp_path / "socket"


def spawn(address, *arguments):
    """A requester of PROGRAM."""
    command = [sys.executable, "-S", "-E", prefork.__file__, "spawn", str(address)]
    return subprocess.Popen(
        [*command, "-m", "program", *arguments],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "WORD": "secret", "PYTHONPATH": str(address.parent)},
        cwd=address.parent,
    )


def read_pid(process):
    return int(process.stdout.readline().split()[-1])


def ends(pid, seconds=5.0):
    """Whether a process is gone, or a zombie, within so many seconds."""
    path, until = Path(f"/proc/{pid}/stat"), time.monotonic() + seconds
    with suppress(FileNotFoundError, ProcessLookupError):
        while path.read_text().rpartition(")")[2].split()[0] != "Z":
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
    return True


def test_a_program_has_the_requesters_environment_and_its_exit_code_comes_back(address):
    processes = {seconds: spawn(address, seconds, "a b") for seconds in ("0", "0.5")}
    for seconds, process in processes.items():
        output, errors = process.communicate(timeout=20)
        assert process.returncode == 7, errors
        expected = f"{[seconds, 'a b']} {address.parent} secret imported before "
        assert output.startswith(expected) and int(output.split()[-1]) != process.pid


def test_a_program_ends_with_its_requester(address):
    process = spawn(address, "60")
    pid = read_pid(process)
    process.kill()
    process.wait()
    assert ends(pid)


def test_a_requester_ends_with_its_program_and_everything_with_the_server(server, address):
    killed, process = spawn(address, "60"), spawn(address, "60")
    os.kill(read_pid(killed), signal.SIGKILL)
    assert killed.wait(5) == 256 - signal.SIGKILL
    pid = read_pid(process)
    os.kill(supervisor.descendants(server.pid)[0], signal.SIGKILL)
    assert process.wait(5) == 1 and server.wait(5) and ends(pid)


def test_a_requester_that_dies_during_its_request_does_no_harm(address):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(address))
        connection.sendall(b"\x05")
    process = spawn(address, "0")
    process.communicate(timeout=20)
    assert process.returncode == 7


def test_without_a_server_the_program_runs_in_the_requesters_process(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    process = spawn(tmp_path / "nobody", "0")
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 7 and " not imported " in output
    assert int(output.split()[-1]) == process.pid
