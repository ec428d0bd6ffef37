"""How FLARE starts the processes of a job where they are nursed. Knows FLARE's launchers, and nothing of jobs."""

import os
import shlex
import sys
from typing import Any

from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher
from nvflare.app_common.job_launcher.server_process_launcher import ServerProcessJobLauncher

from unalike.cross_silo import prefork as nursery


def nursed(command: str) -> str:
    """The same, asked for where the environment says; what it runs is forked from a process that has made its imports."""
    _, *what = shlex.split(command)
    return shlex.join(
        [sys.executable, "-S", "-E", nursery.__file__, "ask", os.environ["UNALIKE_NURSERY"], *what]
    )


class Client(ClientProcessJobLauncher):
    def get_command(self, job_meta: Any, fl_ctx: Any) -> str:
        return nursed(super().get_command(job_meta, fl_ctx))


class Server(ServerProcessJobLauncher):
    def get_command(self, job_meta: Any, fl_ctx: Any) -> str:
        return nursed(super().get_command(job_meta, fl_ctx))
