"""Who the gate of a Flower federation lets through to the SuperLink, and what SuperNodes run."""

import asyncio
import base64
import hashlib
import json
import socket
import threading
import time
from datetime import UTC, datetime, timedelta

import pytest

pytest.importorskip("flwr", reason="the extra flower is not installed")

import httpx
import uvicorn
import yaml
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.proto.fab_pb2 import Fab, GetFabResponse
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import Message, Metadata
from flwr.proto.node_pb2 import Node
from flwr.supercore.fab import Fab as Bundle
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.supernode.start_client_internal import _verify_fab
from starlette.testclient import TestClient

from unalike.base.errors import UserError
from unalike.cross_silo import flower
from unalike.cross_silo import flower_deploy as deploy
from unalike.cross_silo import gate as gates

PULL = "/v1/fleet/pull-messages"


def signed(path, age=0.0):
    """The headers that the SuperNode with this private key sends."""
    own = load_ssh_private_key(path.read_bytes(), None)
    timestamp = (datetime.now(UTC) - timedelta(seconds=age)).isoformat()
    encode = lambda data: base64.b64encode(data).decode()
    return {
        "flwr-public-key": encode(public_key_to_bytes(own.public_key())),
        "flwr-timestamp": timestamp,
        "flwr-signature": encode(sign_message(own, timestamp.encode())),
        "content-type": "application/x-protobuf",
    }


@pytest.fixture
def federation(tmp_path):
    deploy.deploy(tmp_path / "made", ["ada", "ben"], tmp_path / "none.yaml", "127.0.0.1:9092")
    deploy.make_key(tmp_path / "mallory")
    return tmp_path / "made"


@pytest.fixture
def gate(federation):
    """The gate before a SuperLink that answers "yes"; `heard` is what it was asked."""
    gate = gates.Gate(federation, "https://127.0.0.1:1")
    gate.requests = []

    async def answer(request):
        gate.requests.append(
            (request.url.raw_path.decode(), await request.aread(), request.headers)
        )
        return httpx.Response(
            200, stream=httpx.ByteStream(b"yes"), headers={"flwr-note": "kept", "server": "dropped"}
        )

    gate.client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    return gate


def test_a_member_gets_through_to_the_fleet_api(gate, federation):
    outside = TestClient(gate)
    for path in sorted(gates.PATHS - {"/v1/fleet/push-messages", "/v1/fleet/get-fab"}):
        reply = outside.post(
            path + "?a=b",
            content=b"asked",
            headers=signed(federation / "keys" / "ada") | {"cookie": "c"},
        )
        assert (reply.status_code, reply.content, reply.headers["flwr-note"]) == (
            200,
            b"yes",
            "kept",
        )
        assert "server" not in reply.headers
        where, what, headers = gate.requests[-1]
        assert (
            (where, what) == (path, b"asked")
            and "cookie" not in headers
            and "flwr-signature" in headers
        )


def test_when_a_member_was_last_heard_of_is_kept(gate, federation):
    outside = TestClient(gate)
    outside.post(PULL, content=b"", headers=signed(federation.parent / "mallory"))
    assert list((federation / "seen").iterdir()) == []
    outside.post(PULL, content=b"", headers=signed(federation / "keys" / "ada"))
    assert [path.name for path in (federation / "seen").iterdir()] == ["ada"]


def test_which_members_have_a_connection_is_kept(gate, federation, monkeypatch):
    """A SuperNode that works asks for nothing; that it was killed shows by its connections."""
    outside = TestClient(gate)
    peer = ("testclient", 50000)  # of every request of a TestClient
    outside.post(PULL, content=b"", headers=signed(federation.parent / "mallory"))
    assert gate.connections == {}
    outside.post(PULL, content=b"", headers=signed(federation / "keys" / "ada"))
    assert gate.connections == {peer: "ada"}

    class Enough(Exception):
        pass

    def stop(seconds):
        raise Enough

    monkeypatch.setattr(gates.time, "sleep", stop)
    with pytest.raises(Enough):
        gate.touch_connected()
    assert [path.name for path in (federation / "connected").iterdir()] == ["ada"]
    protocol = gates.watching_protocol(gate)
    assert issubclass(protocol, asyncio.Protocol)
    gate.disconnect(peer)
    gate.disconnect(None)
    assert gate.connections == {}


def test_the_gate_is_told_when_a_connection_ends(federation):
    """By uvicorn itself, on a real socket."""
    gate = gates.Gate(federation, "https://127.0.0.1:1")
    ended = []
    gate.disconnect = ended.append
    config = uvicorn.Config(
        gate, port=0, http=gates.watching_protocol(gate), lifespan="off", log_level="critical"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)) as line:
        peer = line.getsockname()
        line.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert line.recv(20).startswith(b"HTTP/1.1 404")
        assert not ended
    wait_until(lambda: ended)
    assert ended == [peer]
    server.should_exit = True
    thread.join(10)


def wait_until(true, seconds=10.0):
    start = time.monotonic()
    while not true():
        assert time.monotonic() - start < seconds
        time.sleep(0.01)


def test_no_other_api_is_reachable(gate, federation):
    outside = TestClient(gate)
    for path in (
        "/v1/control/start-run",
        "/v1/control/register-node",
        "/v1/runtime/acquire-task",
        "/v1/fleet/register-node",
        "/docs",
        "/v1/fleet/%2e%2e/control/start-run",
        "//v1/control/start-run",
        PULL + "/",
        "/v1/Fleet/pull-messages",
        "/",
    ):
        reply = outside.post(path, headers=signed(federation / "keys" / "ada"))
        assert (
            reply.status_code == 404 and reply.json()["detail"] == "only SuperNodes are served here"
        ), path
    assert outside.get(PULL, headers=signed(federation / "keys" / "ada")).status_code == 404
    assert not gate.requests


def test_requests_without_a_members_key_are_refused(gate, federation):
    outside, ada, mallory = (
        TestClient(gate),
        federation / "keys" / "ada",
        federation.parent / "mallory",
    )
    hers = signed(mallory)
    for headers in (
        {},
        hers,
        signed(ada) | {"flwr-signature": hers["flwr-signature"]},
        signed(ada, age=400),
        signed(ada, age=-60),
        signed(ada) | {"flwr-timestamp": "today"},
        signed(ada) | {"flwr-signature": "?"},
        {key: value for key, value in signed(ada).items() if key != "flwr-timestamp"},
    ):
        reply = outside.post(PULL, headers=headers)
        assert reply.status_code == 400 and "key is none of those" in reply.json()["detail"]
    assert not gate.requests


def test_only_the_key_in_the_folder_counts_for_a_name(gate, federation):
    outside, keys = TestClient(gate), federation / "keys"
    (keys / "rubbish.pub").write_text("no key")
    old = signed(keys / "ada")
    (keys / "ada").unlink()
    deploy.make_key(keys / "ada")
    assert outside.post(PULL, headers=old).status_code == 400
    assert outside.post(PULL, headers=signed(keys / "ada")).status_code == 200
    assert list(gates.public_keys(keys)) == ["ada", "ben"]


def test_replies_in_the_name_of_another_supernode_are_refused(gate, federation):
    outside, ada = TestClient(gate), federation / "keys" / "ada"

    def push(*sources):
        messages = [Message(metadata=Metadata(src_node_id=source)) for source in sources]
        body = PushMessagesRequest(node=Node(node_id=1), messages_list=messages).SerializeToString()
        return outside.post(
            "/v1/fleet/push-messages", content=body, headers=signed(ada)
        ).status_code

    assert [push(2), push(1, 2), push()] == [400] * 3 and not gate.requests
    assert push(1) == 200 and PushMessagesRequest.FromString(gate.requests[0][1]).node.node_id == 1
    for rubbish in (b"\xff\xff", b"x" * (gates.MAX_LIST_BYTES + 1)):
        assert (
            outside.post(
                "/v1/fleet/push-messages", content=rubbish, headers=signed(ada)
            ).status_code
            == 400
        )


def test_supernodes_run_the_app_that_was_deployed_and_no_other(gate, federation):
    """Judged by Flower's own check of what the gate hands out."""
    trusted = yaml.safe_load((federation / "certificates" / "trusted.yaml").read_text())
    app = deploy.build_app(federation)
    runs = {}
    for content in (app, app + b"more"):
        served = GetFabResponse(
            fab=Fab(hash_str=hashlib.sha256(content).hexdigest(), content=content)
        ).SerializeToString()
        gate.client = httpx.AsyncClient(
            transport=httpx.MockTransport(
                lambda request, served=served: httpx.Response(200, content=served)
            )
        )
        reply = TestClient(gate).post(
            "/v1/fleet/get-fab", headers=signed(federation / "keys" / "ada")
        )
        fab = GetFabResponse.FromString(reply.content).fab
        runs[content] = _verify_fab(
            Bundle(fab.hash_str, fab.content, dict(fab.verifications)), trusted
        )
    assert list(runs) == [app, app + b"more"] and list(runs.values()) == [True, False]
    assert not any(
        b"PRIVATE KEY" in path.read_bytes()
        for path in (federation / "certificates").iterdir()
        if path.name != "server.key"
    )


def test_an_unreachable_superlink_is_answered_with_503(gate, federation):
    def gone(request):
        raise httpx.ConnectError("nobody")

    gate.client = httpx.AsyncClient(transport=httpx.MockTransport(gone))
    assert (
        TestClient(gate).post(PULL, headers=signed(federation / "keys" / "ada")).status_code == 503
    )  # Flower tries again


def test_an_app_that_was_changed_is_not_submitted(federation, monkeypatch):
    deploy.check_app(federation)
    submitted = []
    monkeypatch.setattr(flower, "run_flwr", lambda *command: submitted.append(command))
    (federation / "app" / "unalike_app.py").write_text("server = client = None")
    engine = object.__new__(flower.FlowerEngine)
    engine.place = federation
    with pytest.raises(UserError, match="is not the one that was signed"):
        engine.submit()
    assert not submitted


def test_the_superlink_is_on_loopback_whatever_the_address(tmp_path):
    deploy.deploy(tmp_path / "made", [], None, "fl.example.org:9092")
    superlink = deploy.commands(tmp_path / "made")["superlink"]
    at = superlink.index("flower-superlink")
    assert superlink[at - 1] == "0.0.0.0:9092" and superlink[at : at + 3] == [
        "flower-superlink",
        "--host",
        "127.0.0.1",
    ]
    inner = superlink[superlink.index("--port") + 1]
    assert (
        f'address = "127.0.0.1:{inner}"' in (tmp_path / "made" / "flwr" / "config.toml").read_text()
    )
    assert "--trusted-entities trusted.yaml" in (tmp_path / "made" / "README.md").read_text()
    assert json.loads((tmp_path / "made" / "certificates" / "app.json").read_text())["sha256"]


@pytest.mark.parametrize("change", ["paths", "trust"])
def test_deployment_is_refused_with_a_flower_that_cannot_be_closed(change, tmp_path, monkeypatch):
    if change == "paths":
        monkeypatch.setattr(gates, "PATHS", gates.PATHS | {"/v2/fleet/pull-messages"})
    else:
        monkeypatch.setattr(
            "flwr.supernode.start_client_internal.start_client_internal",
            lambda server_address: None,
        )
    with pytest.raises(UserError, match=r"fl\.example\.org:9092 could not be closed to strangers"):
        deploy.deploy(tmp_path / "made", [], None, "fl.example.org:9092")
    assert not (tmp_path / "made").exists()
