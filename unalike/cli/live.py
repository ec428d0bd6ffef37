"""`unalike run --watch`: the live page of a run, served by a process of its own.

A page in a process of its own takes no time from the run, and a bug in it cannot end the run.
"""

import base64
import hmac
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from unalike.base.cache import cache_folder
from unalike.base.errors import UserError

KEY_BYTES = 32


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


def page_token(path: Path) -> str:
    """Return the token of a run's page on this machine, the same after a stop and a resume.

    It follows from the run's folder and a key of this user's in the cache: a browser's tab that was
    opened goes on, the folder holds no secret, and other users of the machine cannot know it.
    """
    try:
        key = _read_key(cache_folder() / "watch.key")
    except OSError:  # a cache that cannot be written, or not trusted, is done without
        return secrets.token_urlsafe(24)
    digest = hmac.digest(key, os.fsencode(path.resolve()), "sha256")
    return base64.urlsafe_b64encode(digest[:24]).decode()


def _read_key(file: Path) -> bytes:
    """Return the key in a file that only this user can read; write it where there is none.

    Raises: OSError where that is not possible, or somebody else could have read or written it.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        new = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(new, "wb") as stream:
            stream.write(secrets.token_bytes(KEY_BYTES))
    with file.open("rb") as stream:
        about = os.fstat(stream.fileno())
        key = stream.read()
    if os.name == "posix" and (about.st_uid != os.getuid() or about.st_mode & 0o077):
        raise PermissionError(f"{file} is not this user's alone")
    if len(key) != KEY_BYTES:
        raise OSError(f"{file} was cut short")
    return key


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
