"""`unalike run --watch`: the live page of a run, served by a process of its own.

A page in a process of its own takes no time from the run, and a bug in it cannot end the run.
"""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from unalike.base.errors import UserError


@contextmanager
def live_page(show: Callable[..., None], wanted: bool) -> Iterator[Callable[..., None]]:
    """Serve the page of the run that is started inside.

    Yields a function to watch the run with; it calls `show`, too. Its address goes to stderr.

    Args:
        show: gets all events of the run.
        wanted: without it nothing is served.
    Raises: UserError where the packages for it are missing.
    """
    if not wanted:
        yield show
        return
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise UserError("--watch needs Starlette and uvicorn: pip install 'unalike[watch]'")
    servers: list[subprocess.Popen[str]] = []

    def show_and_serve(event: str, **facts: Any) -> None:
        show(event, **facts)
        if event == "folder" and not servers:
            servers.append(start_server(facts["path"]))

    try:
        yield show_and_serve
    finally:
        for server in servers:
            assert server.stdin is not None
            server.stdin.close()  # it ends when all browsers have the end of the run


def start_server(path: Path) -> subprocess.Popen[str]:
    """Start `unalike watch` for a run's folder; it ends with this process, Ctrl-C or not."""
    server = subprocess.Popen(
        [sys.executable, "-m", "unalike", "watch", str(path), "--leash"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )

    def tell() -> None:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        if url:
            sys.stderr.write(f"The run is shown at {url}\n")

    threading.Thread(target=tell, daemon=True).start()
    return server
