"""A prefork server: starts Python programs by forking a process that has made their imports.

Usage:
    python prefork.py serve SOCKET MODULE...        imports the modules, then forks on request
    python prefork.py spawn SOCKET -m MODULE ...    asks for a process and stands for it

`spawn` ends with the exit code of the process it asked for; if either of the two dies, the other
is ended. SOCKET is a Unix socket in a folder that only its owner can enter. This program depends
on the standard library alone, so that `spawn` takes no time.
"""

import json
import os
import select
import signal
import socket
import struct
import sys
from contextlib import suppress

POLL = 0.1  # seconds between checks whether a process has ended
LENGTH = struct.Struct("<Q")  # bytes of the JSON that follows
EXIT_BITS = 255  # an exit code as one byte, as the shell has it


def spawn(address: str, words: list[str]) -> int:
    """Run a program in a forked process with this one's environment, folder and standard files.

    Where no server listens the program replaces this process instead.

    Returns: its exit code; 1 where the server died.
    """
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.connect(address)
        except OSError:
            os.execv(sys.executable, [sys.executable, *words])
        request = json.dumps([words, dict(os.environ), os.getcwd()]).encode()
        data = LENGTH.pack(len(request)) + request
        sent = socket.send_fds(server, [data], [0, 1, 2])
        server.sendall(data[sent:])
        code = server.recv(1)
    return code[0] if code else 1


def serve(address: str, modules: list[str]) -> list[str]:
    """Import modules and fork a process for each request.

    Returns: in each forked process, the words of its program. The server itself never returns.
    """
    from importlib import import_module

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)  # requests that come during the imports wait
    for name in modules:
        import_module(name)
    requesters: dict[int, socket.socket] = {}  # by the pid of the process they asked for
    while True:
        ready = select.select([listener, *requesters.values()], [], [], POLL)[0]
        reap(requesters, ready)
        if listener not in ready:
            continue
        requester = listener.accept()[0]
        try:
            (words, environment, folder), files = receive_request(requester)
        except OSError:  # the requester died
            requester.close()
            continue
        pid = os.fork()
        if pid == 0:
            os.setsid()
            for number, file in enumerate(files):
                os.dup2(file, number)
            for open_socket in (listener, requester, *requesters.values()):
                open_socket.close()
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(folder)
        else:
            requesters[pid] = requester
        for file in files:
            os.close(file)
        if pid == 0:
            return words


def reap(requesters: dict[int, socket.socket], ready: list[socket.socket]) -> None:
    """Report exit codes of processes that ended; kill those whose requester is gone.

    Args:
        requesters: by pid; entries of processes that ended are removed.
        ready: a requester sends nothing after its request, so one that can be read from is gone.
    """
    for pid, requester in list(requesters.items()):
        gone = requester in ready
        if gone:
            os.kill(pid, signal.SIGKILL)
        ended, status = os.waitpid(pid, 0 if gone else os.WNOHANG)
        if ended:
            with suppress(OSError), requester:
                requester.sendall(bytes([os.waitstatus_to_exitcode(status) & EXIT_BITS]))
            del requesters[pid]


def receive_request(requester: socket.socket) -> tuple[list, list[int]]:
    """Read `[words, environment, folder]` and the three standard files of a requester."""
    data, files, _, _ = socket.recv_fds(requester, 2**16, 3)
    while len(data) < LENGTH.size or len(data) < LENGTH.size + LENGTH.unpack_from(data)[0]:
        part = requester.recv(2**16)
        if not part:
            raise ConnectionError("the requester closed the connection")
        data += part
    return json.loads(data[LENGTH.size :]), files


if __name__ == "__main__":
    if sys.argv[1] == "spawn":
        sys.exit(spawn(sys.argv[2], sys.argv[3:]))
    import runpy

    sys.argv = serve(sys.argv[2], sys.argv[3:])[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
