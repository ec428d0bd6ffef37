"""Forks Python programs from a process that has made their imports. A program of its own, which knows nothing of what it starts.

Usage: python nursery.py nurse PLACE MODULE... waits there for those who ask; python nursery.py ask PLACE -m MODULE ARGUMENT... stands for
the process it is given: either ends with the other, this with its exit code. PLACE is a socket in a folder that only its owner enters.
"""

import json
import os
import select
import signal
import socket
import struct
import sys
from contextlib import suppress

EVERY = 0.1  # seconds between looks whether a process is over
LENGTH = struct.Struct("<Q")


def ask(place: str, what: list[str]) -> int:
    """Exit code of a program that is run elsewhere, with what this process has: environment, folder and files. Where nobody nurses it is
    run here."""
    with socket.socket(socket.AF_UNIX) as to:
        try:
            to.connect(place)
        except OSError:
            os.execv(sys.executable, [sys.executable, *what])
        told = json.dumps([what, dict(os.environ), os.getcwd()]).encode()
        data = LENGTH.pack(len(told)) + told
        to.sendall(data[socket.send_fds(to, [data], [0, 1, 2]) :])
        code = to.recv(1)
    return code[0] if code else 1


def nurse(place: str, modules: list[str]) -> list[str]:
    """Returns in each process that was asked for, with the words of its program; the process that nurses them goes on for ever."""
    from importlib import import_module

    listening = socket.socket(socket.AF_UNIX)
    listening.bind(place)
    listening.listen(64)  # who asks meanwhile waits
    for name in modules:
        import_module(name)
    given: dict[int, socket.socket] = {}  # to whom each process was
    while True:
        ready = select.select([listening, *given.values()], [], [], EVERY)[0]
        for pid, to in list(given.items()):
            if to in ready:  # who asked is gone
                os.kill(pid, signal.SIGKILL)
            over, status = os.waitpid(pid, 0 if to in ready else os.WNOHANG)
            if over:
                with suppress(OSError), to:
                    to.sendall(bytes([os.waitstatus_to_exitcode(status) & 255]))
                del given[pid]
        if listening not in ready:
            continue
        asked = listening.accept()[0]
        try:
            (what, environment, folder), files = received(asked)
        except OSError:  # it died over it
            asked.close()
            continue
        if (pid := os.fork()) == 0:
            os.setsid()
            for own, file in enumerate(files):
                os.dup2(file, own)
            for each in (listening, asked, *given.values()):
                each.close()
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(folder)
        else:
            given[pid] = asked
        for file in files:
            os.close(file)
        if pid == 0:
            return what


def received(asked: socket.socket) -> tuple[list, list[int]]:
    data, files, _, _ = socket.recv_fds(asked, 2**16, 3)
    while len(data) < LENGTH.size or len(data) < LENGTH.size + LENGTH.unpack_from(data)[0]:
        if not (more := asked.recv(2**16)):
            raise ConnectionError("who asked is gone")
        data += more
    return json.loads(data[LENGTH.size :]), files


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        sys.exit(ask(sys.argv[2], sys.argv[3:]))
    import runpy

    sys.argv = nurse(sys.argv[2], sys.argv[3:])[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
