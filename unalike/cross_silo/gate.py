"""The gate of a Flower federation: what the network reaches instead of the SuperLink.

Flower serves three APIs at one address: Fleet for SuperNodes, Control for whoever submits apps and
registers keys, Runtime for the processes of an app. Control and Runtime ask for no login. So the
SuperLink listens on loopback, and the gate passes on the Fleet API only, only for SuperNodes that
sign with a key from the folder `keys` of the deployment. It adds the signature that `deploy` made
to the app, which SuperNodes that were started with --trusted-entities check.

Usage: python -m unalike.cross_silo.gate FOLDER HOST:PORT COMMAND...

COMMAND starts the SuperLink, which ends with the gate, and the gate with it.
"""

import asyncio
import base64
import binascii
import json
import math
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.proto.fab_pb2 import GetFabResponse
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
from google.protobuf.message import DecodeError
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from unalike.base.events import append_event
from unalike.cross_silo import supervisor

FLEET = "/v1/fleet/"
PATHS = frozenset(
    FLEET + name
    for name in (
        "activate-node",
        "deactivate-node",
        "send-node-heartbeat",
        "pull-messages",
        "push-messages",
        "get-run",
        "get-fab",
        "push-object",
        "pull-object",
        "confirm-message-received",
    )
)
REFUSALS = "refused.jsonl"  # who was not let in, in the folder of a deployment
SEEN = "seen"  # folder there, with a file for each member, touched when it sends a request
SUPEREXEC = "flower-superexec"  # starts the processes of apps, of a SuperLink or SuperNode
CONNECTED = "connected"  # the same, touched every TOUCH_INTERVAL while a connection of it is open
TOUCH_INTERVAL = 2.0  # seconds
# Seconds until a connection without requests is closed. A SuperNode that works sends a heartbeat
# every 30 s at most, and nothing else.
KEEP_ALIVE = 40
NOTE_INTERVAL = 60.0  # seconds between two notes of the same refusal
MAX_REFUSALS_BYTES = 10 << 20
MAX_LIST_BYTES = 4 << 20  # of a list of replies; what is in them is sent as objects
SUPERLINK_TIMEOUT = 120.0  # seconds the SuperLink may take for an answer
PASSED_HEADERS = ("accept", "content-type", "content-length")


def public_keys(folder: Path) -> dict[str, bytes]:
    """The key of each member, as the SuperLink has it (PEM), by name: NAME.pub is that of NAME.

    A file that holds no public key counts for nothing.
    """
    keys = {}
    for path in sorted(folder.glob("*.pub")):
        try:
            keys[path.stem] = _read_key(path, path.stat().st_mtime_ns)
        except (OSError, ValueError, UnsupportedAlgorithm):
            continue
    return keys


@lru_cache(maxsize=10_000)
def _read_key(path: Path, _changed: int) -> bytes:
    return serialization.load_ssh_public_key(path.read_bytes()).public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def identify(headers: Mapping[str, str], keys: dict[str, bytes]) -> str | None:
    """The member that a request's headers were signed by, None where it was none of them."""
    try:
        key = base64.b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True)
        name = next((name for name, known in keys.items() if known == key), None)
        if name is None:
            return None
        timestamp = headers[TIMESTAMP_HEADER]
        age = (datetime.now(UTC) - datetime.fromisoformat(timestamp)).total_seconds()
        signature = base64.b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER], validate=True)
        if not -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE:
            return None
        genuine = verify_signature(bytes_to_public_key(key), timestamp.encode(), signature)
        return name if genuine else None
    except (KeyError, ValueError, TypeError, AttributeError, binascii.Error):
        return None


class Gate:
    """An ASGI application in front of the SuperLink at `superlink`, an https:// address."""

    def __init__(self, folder: Path, superlink: str):
        self.keys = folder / "keys"
        self.superlink = superlink
        app = json.loads((folder / "certificates" / "app.json").read_text())
        self.verifications: dict[str, str] = app["verifications"]
        trust = ssl.create_default_context(cafile=str(folder / "certificates" / "ca.pem"))
        limits = httpx.Limits(max_connections=None)
        self.refusals = folder / REFUSALS
        self.seen = folder / SEEN
        self.seen.mkdir(exist_ok=True)
        self.connected = folder / CONNECTED
        self.connected.mkdir(exist_ok=True)
        # the member at the other end of each open connection, by host and port
        self.connections: dict[tuple[str, int], str] = {}
        self.noted: dict[tuple[str, str], float] = {}  # when each refusal was last written down
        self.client = httpx.AsyncClient(
            verify=trust, timeout=SUPERLINK_TIMEOUT, limits=limits, trust_env=False
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            response = await self.answer(Request(scope, receive))
            await response(scope, receive, send)

    async def answer(self, request: Request) -> Response:
        """What the SuperLink answers, or why it was not asked."""
        path = request.scope["path"]
        if request.method != "POST" or path not in PATHS:
            return refuse(404, "only SuperNodes are served here")
        member = identify(request.headers, public_keys(self.keys))
        if member is None:
            reason = (
                "this SuperNode's key is none of those that were let into the federation "
                "under a name, or its clock is wrong"
            )
            self.note(request.client.host if request.client else "", reason)
            return refuse(400, reason)
        (self.seen / member).touch()
        if request.client:
            self.connections[request.client.host, request.client.port] = member
        headers = passed_headers(request.headers)
        try:
            content: Any = request.stream()
            if path == FLEET + "push-messages":
                content = await read(request)
                headers["content-length"] = str(len(content))
                if not is_own(content):
                    return refuse(
                        400, "these replies are not those of the SuperNode that sends them"
                    )
            forwarded = self.client.build_request(
                "POST",
                self.superlink + path,
                content=content,
                headers={**headers, "accept-encoding": "identity"},
            )
            answer = await self.client.send(forwarded, stream=True)
        except ClientDisconnect:
            return Response(status_code=400)
        except httpx.HTTPError as error:
            return refuse(503, f"the SuperLink cannot be reached: {type(error).__name__}")
        headers = passed_headers(answer.headers)
        if path == FLEET + "get-fab" and answer.status_code == 200:
            reply = GetFabResponse.FromString(await answer.aread())
            await answer.aclose()
            reply.fab.verifications.update(self.verifications)
            headers.pop("content-length", None)
            return Response(reply.SerializeToString(), headers=headers)
        close = BackgroundTask(answer.aclose)
        return StreamingResponse(answer.aiter_raw(), answer.status_code, headers, background=close)

    def disconnect(self, peer: tuple[str, int] | None) -> None:
        """Forget a connection that was closed; that of a process that is killed is, at once."""
        if peer is not None:
            self.connections.pop(peer, None)

    def touch_connected(self) -> None:
        """Write down, again and again, which members have a connection."""
        while True:
            for member in set(self.connections.copy().values()):
                (self.connected / member).touch()
            time.sleep(TOUCH_INTERVAL)

    def note(self, peer: str, reason: str) -> None:
        """Write down that somebody was not let in, once a minute for each address."""
        now = time.monotonic()
        if now - self.noted.get((peer, reason), -math.inf) < NOTE_INTERVAL:
            return
        if len(self.noted) > 1000:
            self.noted.clear()
        self.noted[peer, reason] = now
        if not self.refusals.exists() or self.refusals.stat().st_size < MAX_REFUSALS_BYTES:
            append_event(self.refusals, "refused", peer=peer, reason=reason)


def passed_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers that the gate passes on: a few of HTTP's, and Flower's own."""
    return {
        name: value
        for name, value in headers.items()
        if name in PASSED_HEADERS or name.startswith("flwr-")
    }


async def read(request: Request) -> bytes:
    """A request's body; empty where it is too long to be one of replies."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_LIST_BYTES:
            return b""
    return bytes(body)


def is_own(body: bytes) -> bool:
    """Whether replies come from the SuperNode that sends them; the SuperLink does not check."""
    try:
        request = PushMessagesRequest.FromString(body)
    except DecodeError:
        return False
    sources = {message.metadata.src_node_id for message in request.messages_list}
    return sources == {request.node.node_id}


def refuse(status: int, why: str) -> Response:
    """As Flower tells errors, so that its SuperNodes show them."""
    return JSONResponse({"code": status, "detail": why}, status)


def watching_protocol(gate: Gate) -> type[asyncio.Protocol]:
    """uvicorn's protocol, which tells the gate of each connection that ends."""

    class Watching(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        def connection_lost(self, exc: Exception | None) -> None:
            gate.disconnect(self.client)
            super().connection_lost(exc)

    return Watching


def main(folder: Path, address: str, command: list[str]) -> int:
    """Start the SuperLink and stand in front of it until either ends."""
    host, _, port = address.rpartition(":")
    inner = command[command.index("--port") + 1]
    gate = Gate(folder, f"https://127.0.0.1:{inner}")
    certificates = folder / "certificates"
    server = uvicorn.Server(
        uvicorn.Config(
            gate,
            host=host,
            port=int(port),
            ssl_certfile=str(certificates / "server.pem"),
            ssl_keyfile=str(certificates / "server.key"),
            lifespan="off",
            http=watching_protocol(gate),
            timeout_keep_alive=KEEP_ALIVE,
            ws="none",
            access_log=False,
            server_header=False,
            log_level="warning",
            timeout_graceful_shutdown=5,
        )
    )
    signal.signal(
        signal.SIGTERM, supervisor.exit_on_signal
    )  # uvicorn raises it again when it is done
    # without its SuperExec a SuperLink starts no app, says nothing, and starts no other
    words = supervisor.command(command, os.getpid(), essential=SUPEREXEC)
    superlink = subprocess.Popen(words)

    def watch() -> None:
        superlink.wait()
        server.should_exit = True

    threading.Thread(target=watch, daemon=True).start()
    threading.Thread(target=gate.touch_connected, daemon=True).start()
    try:
        server.run()
    finally:
        supervisor.stop([superlink])
    return superlink.returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
