"""FLARE's job launchers, with processes forked by a prefork server (`prefork.py`)."""

import os
import shlex
import sys
from typing import Any

from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher
from nvflare.app_common.job_launcher.server_process_launcher import ServerProcessJobLauncher

from unalike.cross_silo import prefork

SOCKET = "UNALIKE_PREFORK"  # environment variable: the prefork server's socket


def prefork_command(command: str) -> str:
    """The same Python program, started by the prefork server."""
    _, *words = shlex.split(command)
    spawn = [sys.executable, "-S", "-E", prefork.__file__, "spawn", os.environ[SOCKET]]
    return shlex.join([*spawn, *words])


class Client(ClientProcessJobLauncher):
    """Starts a client's job process."""

    def get_command(self, job_meta: Any, fl_ctx: Any) -> str:
        """FLARE's command line, run by the prefork server."""
        return prefork_command(super().get_command(job_meta, fl_ctx))


class Server(ServerProcessJobLauncher):
    """Starts the server's job process."""

    def get_command(self, job_meta: Any, fl_ctx: Any) -> str:
        """FLARE's command line, run by the prefork server."""
        return prefork_command(super().get_command(job_meta, fl_ctx))
