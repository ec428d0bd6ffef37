"""Serves the live page of a run: read-only, to whoever has the address with its token."""

import asyncio
import ipaddress
import json
import secrets
import socket
import threading
import time
import traceback
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import IO, Any

from unalike.base.errors import UserError
from unalike.report.folder import read
from unalike.report.live_page import Section, render_live_page, render_sections, render_title
from unalike.report.live_run import LiveRun
from unalike.report.page import render_page

EVERY = 0.5  # seconds between looks at the run
BEAT = 15.0  # seconds after which a silent connection gets a sign of life
GRACE = 5.0  # seconds in which browsers get the end of a run before its server ends
FIRST_PORT, PORTS = 8600, 1000
# Only scripts of ours run, and a page reaches nobody but its server.
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; connect-src 'self'; "
    "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class Feed:
    """The page of one run, drawn again when the run goes on, and handed to all who look at it.

    While nobody looks, nothing is drawn: a run with a page costs little more than one without.
    """

    def __init__(self, live: LiveRun):
        self.live = live
        self.drawing = threading.Lock()
        self.state = ""
        self.title = ""
        self.sections: list[Section] = []
        self.drawn = 0  # times
        self.version = 0  # the drawing that readers were told of
        self.news = asyncio.Condition()
        self.ended = False
        self.readers = 0
        self.pause = EVERY

    def draw(self) -> None:
        """Read on, and draw the page where something is new."""
        with self.drawing:
            start = time.monotonic()
            if not self.live.update() and self.sections:
                return
            try:
                self.sections = render_sections(self.live)
            except Exception as error:  # the page of a run that has ended may fail on its files
                if self.live.run.results is None:
                    raise
                self.live.problem = f"The report cannot be shown: {error}"
                self.live.run.results = None
                self.sections = render_sections(self.live)
            self.state = self.live.state
            self.title = render_title(self.live)
            # A run of very many clients takes long to draw: a tenth of one core is enough.
            self.pause = max(EVERY, 10 * (time.monotonic() - start))
            self.drawn += 1

    @property
    def message(self) -> str:
        """What browsers are to show, as JSON."""
        return json.dumps({"state": self.state, "title": self.title, "sections": self.sections})

    def page(self) -> str:
        """The page as HTML, as of now."""
        self.draw()
        return render_live_page(self.title, self.state, self.sections)

    async def follow(self) -> None:
        """Look at the run again and again, until `end`."""
        while not self.ended:
            try:
                if self.readers:
                    await asyncio.to_thread(self.draw)
                    await self._announce()
            except Exception:  # what is shown stays; the next event is another chance
                traceback.print_exc()
            await asyncio.sleep(EVERY if self.state == "finished" else self.pause)

    async def end(self) -> None:
        """Draw the last state and let all readers go once they have it."""
        self.live.over = True
        if self.readers:
            with suppress(Exception):  # then the last state that could be drawn is the last
                await asyncio.to_thread(self.draw)
        self.ended = True
        await self._announce()
        deadline = time.monotonic() + GRACE
        while self.readers and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    async def _announce(self) -> None:
        async with self.news:
            self.version = self.drawn
            self.news.notify_all()

    async def read(self) -> AsyncIterator[str]:
        """Yield server-sent events: the page as it is now, then each new one."""
        self.readers += 1
        seen = 0  # version 0 is before the first drawing
        try:
            yield "retry: 1000\n\n"
            while True:
                if seen != self.version:
                    seen = self.version
                    yield f"id: {seen}\ndata: {self.message}\n\n"
                elif self.ended:
                    return
                elif not await self._wait_for_news(seen):
                    yield ": still here\n\n"
        finally:
            self.readers -= 1

    async def _wait_for_news(self, seen: int) -> bool:
        try:
            async with asyncio.timeout(BEAT), self.news:
                await self.news.wait_for(lambda: seen != self.version or self.ended)
        except TimeoutError:
            return False
        return True


class Guard:
    """Lets in whoever knows the token, which is the first part of every path.

    A part of the path reaches nobody else: browsers send cookies to every port of a host, where
    somebody else may listen, and a script of another page cannot read this one's address.

    Args:
        app: the ASGI application behind.
        token: what the path must begin with.
        hosts: names that a request may be for; a page of another name, which an attacker points
            here (DNS rebinding), gets nothing. None: any name.
    """

    def __init__(self, app: Any, token: str, hosts: set[str] | None):
        self.app = app
        self.token = token
        self.hosts = hosts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        from starlette.responses import PlainTextResponse, RedirectResponse

        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host", "").rpartition(":")[0] or headers.get(b"host", "")
        shown, slash, rest = scope["path"].removeprefix("/").partition("/")
        response: Any = None
        if self.hosts is not None and host not in self.hosts:
            response = PlainTextResponse("This page has another name.\n", 403)
        elif not secrets.compare_digest(shown.encode(), self.token.encode()):
            response = PlainTextResponse(
                "This page needs the token that `unalike` printed: open the whole address that it "
                "printed.\n",
                403,
            )
        elif not slash:
            response = RedirectResponse(f"/{self.token}/", 303)
        if response is not None:
            response.headers.update(HEADERS)
            await response(scope, receive, send)
            return
        await self.app({**scope, "path": f"/{rest}"}, receive, send)


def build_app(feed: Feed, token: str, hosts: set[str] | None = None) -> Any:
    """Return the page of a run as an ASGI application.

    Args:
        feed: the run.
        token: what every path begins with.
        hosts: names that it is asked for by, None for any.
    """
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, Response, StreamingResponse
    from starlette.routing import Route

    script = files("unalike.report").joinpath("live.js").read_text()

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        task = asyncio.create_task(feed.follow())
        try:
            yield
        finally:
            task.cancel()

    async def page(request: Request) -> Response:
        return HTMLResponse(await asyncio.to_thread(feed.page), headers=HEADERS)

    async def events(request: Request) -> Response:
        return StreamingResponse(feed.read(), media_type="text/event-stream", headers=HEADERS)

    async def report(request: Request) -> Response:
        html = await asyncio.to_thread(lambda: render_page(read(feed.live.path)))
        return HTMLResponse(html, headers=HEADERS)

    async def send_script(request: Request) -> Response:
        return Response(script, media_type="text/javascript", headers=HEADERS)

    routes = [
        Route("/", page),
        Route("/events", events),
        Route("/report", report),
        Route("/live.js", send_script),
    ]
    return Guard(Starlette(routes=routes, lifespan=lifespan), token, hosts)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a host.

    >>> is_loopback("localhost"), is_loopback("127.0.0.1"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def usual_port(path: Path) -> int:
    """Return the port that the page of a run is at, if it is free: the same after a resume."""
    return FIRST_PORT + zlib.crc32(str(path.resolve()).encode()) % PORTS


def bind(host: str, port: int | None, path: Path) -> socket.socket:
    """Return a socket that listens; without a port at the run's usual one, or another.

    Raises: UserError where that is not possible.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    ports = [usual_port(path), 0] if port is None else [port]
    for place, wanted in enumerate(ports):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, wanted))
            listener.listen()
            return listener
        except OSError as error:
            listener.close()
            if place == len(ports) - 1:
                reason = error.strerror or error
                raise UserError(f"nothing can be served at {host}:{wanted}: {reason}") from None
    raise AssertionError


def serve(
    live: LiveRun,
    host: str = "127.0.0.1",
    port: int | None = None,
    tell: Callable[[str], None] = print,
    leash: IO[bytes] | None = None,
    token: str | None = None,
) -> None:
    """Serve the page of a run until Ctrl-C.

    Args:
        live: the run.
        host: address to listen at.
        port: by default one that follows from the run's folder.
        tell: takes the address to open.
        leash: when this ends, so does the server, after all browsers got the last state.
        token: that the address has, and whoever looks must know; by default a new one.
    Raises: UserError where the packages are missing, or the address cannot be used.
    """
    try:
        import uvicorn
        from starlette.applications import Starlette  # noqa: F401
    except ImportError:
        raise UserError(
            "the live page needs Starlette and uvicorn: pip install 'unalike[watch]'"
        ) from None
    listener = bind(host, port, live.path)
    token = token or secrets.token_urlsafe(24)
    hosts = {"localhost", "127.0.0.1", "[::1]", host} if is_loopback(host) else None
    feed = Feed(live)
    app = build_app(feed, token, hosts)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1, access_log=False)
    server = uvicorn.Server(config)

    async def end_with_leash() -> None:
        assert leash is not None
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()

        def wait() -> None:
            while leash.read(1):
                pass
            loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=wait, daemon=True).start()
        await ended.wait()
        await feed.end()
        server.should_exit = True

    async def main() -> None:
        task = asyncio.create_task(end_with_leash()) if leash is not None else None
        await server.serve(sockets=[listener])
        if task is not None:
            task.cancel()

    tell(address(host, listener.getsockname()[1], token))
    with suppress(KeyboardInterrupt):
        asyncio.run(main())


def address(host: str, port: int, token: str) -> str:
    """Return what to open in a browser."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    name = f"[{name}]" if ":" in name else name
    return f"http://{name}:{port}/{token}/"
