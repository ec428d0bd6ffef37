"""`unalike conditions` with a fake server that records requests, and with servers that fail."""

import json
import socket
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import yaml
from typer.testing import CliRunner

from unalike.base.errors import UserError
from unalike.cli import app
from unalike.models.conditions import SHIPPED, parse_list, query_conditions, read_conditions


class FakeServer(BaseHTTPRequestHandler):
    """Records requests and answers with `server.answers(question)`.

    An answer is a text, raw bytes, or the number of an HTTP error.
    """

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, self.headers.get("Authorization"), body))
        answer = self.server.answers(body["messages"][-1]["content"])
        body = (
            answer
            if isinstance(answer, bytes)
            else json.dumps({"choices": [{"message": {"content": answer}}]}).encode()
        )
        self.send_response(answer if isinstance(answer, int) else 200)
        self.end_headers()
        self.wfile.write(b"try later" if isinstance(answer, int) else body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = HTTPServer(("127.0.0.1", 0), FakeServer)
    server.requests = []
    server.answers = lambda query: (
        "1. Spatial layout\n2. Object pose" if "summarize" in query else "cat-dog: Both sleep."
    )
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    server.url = f"http://127.0.0.1:{server.server_port}/v1"
    yield server
    server.shutdown()
    server.server_close()


def test_two_queries_give_conditions_and_a_file_with_their_provenance(
    server, tmp_path, monkeypatch
):
    monkeypatch.setenv("UNALIKE_API_KEY", "secret")
    words = [
        "--classes",
        "cat, dog,sofa",
        "--endpoint",
        server.url,
        "--model",
        "small",
        "--count",
        "2",
        "--out",
        str(tmp_path / "c.yaml"),
    ]
    result = CliRunner().invoke(app, ["conditions", *words])
    assert result.exit_code == 0 and result.stdout.splitlines() == ["spatial layout", "object pose"]
    first, second, last = (body["messages"][0]["content"] for _, _, body in server.requests)
    assert (
        "each possible combination" in first
        and "cat with each of: dog, sofa" in first
        and "dog with each of: sofa" in second
    )
    assert (
        "summarize 2 distinct and general conditions" in last
        and last.count("cat-dog: Both sleep.") == 2
    )
    assert {(path, key, body["model"]) for path, key, body in server.requests} == {
        ("/v1/chat/completions", "Bearer secret", "small")
    }
    written = yaml.safe_load((tmp_path / "c.yaml").read_text())
    assert (
        read_conditions(tmp_path / "c.yaml") == ("spatial layout", "object pose")
        and written["provenance"]["model"] == "small"
    )
    assert (
        written["provenance"]["classes"] == ["cat", "dog", "sofa"]
        and "secret" not in (tmp_path / "c.yaml").read_text()
    )


@pytest.mark.parametrize(
    ("answers", "sentence"),
    [
        (lambda query: b"<html>hello", "gave no chat completion but '<html>hello'"),
        (lambda query: b'{"choices": []}', "gave no chat completion"),
        (lambda query: 401, "answered 401 .* put its key in UNALIKE_API_KEY: try later"),
        (lambda query: "" if "summarize" not in query else "1. pose", "described nothing"),
        (
            lambda query: "1. pose\n2. Pose",
            "asked for 2 conditions and gave 1 that can be read .pose.",
        ),
        (
            lambda query: "I am sorry, but as a language model I really cannot answer this.",
            "gave 0|gave 1",
        ),
        (lambda query: time.sleep(1) or "late", "did not answer within 0.2 s"),
    ],
)
def test_invalid_and_missing_answers_are_reported(server, answers, sentence):
    server.answers = answers
    with pytest.raises(UserError, match=sentence):
        query_conditions(["cat", "dog"], server.url, "small", 2, timeout=0.2)


def test_a_busy_server_is_queried_again(server, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    fine = server.answers
    server.answers = lambda query: 503 if len(server.requests) == 1 else fine(query)
    assert (
        query_conditions(["cat", "dog"], server.url, "small", 1)["conditions"] == ["spatial layout"]
        and len(server.requests) == 3
    )


def test_invalid_arguments_are_rejected(tmp_path):
    with pytest.raises(UserError, match="two or more, got cat"):
        query_conditions(["cat"], "http://x/v1", "small")
    for endpoint in ("localhost", "http://x:99999/v1", "http://[::1/v1"):
        with pytest.raises(UserError, match="is a URL such as"):
            query_conditions(["a", "b"], endpoint, "small")
    with pytest.raises(UserError, match="cannot be reached"):
        query_conditions(["a", "b"], "http://127.0.0.1:9/v1", "small", timeout=2)
    (tmp_path / "c.yaml").write_text("conditions: []")
    with pytest.raises(UserError, match="one or more names"):
        read_conditions(tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ([b"SSH-2.0-OpenSSH\r\n"], r"does not speak HTTP as it should \(BadStatusLine\)"),
        (
            [b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{"],
            r"does not speak HTTP as it should \(IncompleteRead\)",
        ),
        # Sends its headers one byte at a time.
        ([b"HTTP/1.1 200 OK\r\nX: ", *[b"a"] * 40], "did not answer within 0.3 s"),
    ],
)
def test_a_server_that_does_not_speak_http_is_reported_in_time(parts, sentence):
    with socket.create_server(("127.0.0.1", 0)) as door:

        def serve():
            line, _ = door.accept()
            with line, suppress(OSError):
                while not line.recv(1 << 16).endswith(b"}"):  # the whole question
                    pass
                for part in parts:
                    line.sendall(part)
                    time.sleep(0.05)

        threading.Thread(target=serve, daemon=True).start()
        start = time.monotonic()
        with pytest.raises(UserError, match=sentence):
            query_conditions(
                ["cat", "dog"],
                f"http://127.0.0.1:{door.getsockname()[1]}/v1",
                "small",
                2,
                timeout=0.3,
            )
        assert time.monotonic() - start < 1


def test_invalid_condition_files_are_reported(tmp_path):
    with pytest.raises(
        UserError,
        match=r"there is no file background; a single condition is a list of one, \[background\]",
    ):
        read_conditions("background")
    (tmp_path / "c.yaml").write_bytes(b"\x85\xff")
    with pytest.raises(UserError, match="cannot be read as YAML"):
        read_conditions(tmp_path / "c.yaml")
    words = [
        "--classes",
        "cat,dog",
        "--endpoint",
        "http://127.0.0.1:9/v1",
        "--model",
        "m",
        "--out",
        str(tmp_path / "gone" / "c.yaml"),
    ]
    assert "there is no folder" in str(CliRunner().invoke(app, ["conditions", *words]).exception)


def test_lists_in_several_formats_are_parsed():
    assert parse_list("- **Background** (where)\n* Scene type – indoors", 2, "m") == [
        "background",
        "scene type",
    ]
    assert parse_list("Spatial layout, object pose, lighting/weather.", 3, "m") == [
        "spatial layout",
        "object pose",
        "lighting/weather",
    ]
    assert len(SHIPPED) == 5
