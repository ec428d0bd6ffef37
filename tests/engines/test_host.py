"""A host runs only marked operations, once per message, and restores spilled clients exactly."""

from types import SimpleNamespace

import pytest
import torch

from unalike.algorithms import Local
from unalike.base.message import decode, encode
from unalike.core.operations import list_operations, operation, query
from unalike.core.runtime import ClientRuntime
from unalike.engines.host import Host, counted_bytes, without_traceback
from unalike.engines.store import Store
from unalike.training.loop import Training


class Counter:
    """A program that counts; what must survive is in `memory`."""

    def __init__(self, client):
        self.client = client
        self.memory = {"n": 0}
        self.work = 0.0
        self.round = 0
        self.seed = 0
        self.axis_lengths = {}
        self.secret = "not for the server"

    @operation
    def add(self, by=1):
        self.memory["n"] += by
        self.work += 10 * by
        return self.memory["n"]

    @query
    def ask(self):
        return [self.memory["n"], self.round]

    @query
    def draw(self):
        return torch.rand(3)

    @operation
    def fail(self, how):
        raise {
            "value": ValueError("its labels are gone"),
            "key": KeyError("labels"),
            "type": RuntimeError("a bug"),
        }[how]

    def hidden(self):
        return "never"

    def state(self):
        return {"memory": self.memory}

    def restore(self, state):
        self.memory = state["memory"]


@pytest.fixture
def made():
    """Clients whose programs were built, in order."""
    return []


def build_host(folder, made=None, clients="abc", alive=256):
    def build(client):
        if made is not None:
            made.append(client.id)
        return ClientRuntime(Counter(client))

    return Host(
        [SimpleNamespace(id=c, info=lambda c=c: c) for c in clients], build, Store(folder), alive
    )


def message(operation, number, round=1, turn=0, **body):
    return {"operation": operation, "number": number, "round": round, "turn": turn, "body": body}


def test_programs_are_built_at_the_first_request(tmp_path, made):
    host = build_host(tmp_path, made)
    assert host.infos() == {"a": "a", "b": "b", "c": "c"} and made == []
    assert host.handle("b", message("add", 1, by=3)) == {"number": 1, "body": 3, "work": 30.0}
    assert host.handle("b", message("ask", 2, round=4)) == {
        "number": 2,
        "body": [3, 4],
        "work": 0.0,
    }
    assert made == ["b"]


def test_a_repeated_message_gets_the_same_answer_and_changes_nothing(tmp_path):
    host = build_host(tmp_path)
    first = host.handle("a", message("add", 7))
    assert host.handle("a", message("add", 7)) == first == {"number": 7, "body": 1, "work": 10.0}
    assert host.handle("a", message("ask", 8))["body"][0] == 1
    assert (
        host.handle("b", message("add", 7))["body"] == 1
    )  # another client's message of that number is another message


def test_a_repeated_message_is_harmless_after_a_snapshot_and_a_failure_too(tmp_path):
    host = build_host(tmp_path)
    host.handle("a", message("add", 1))
    host.save(1)
    assert host.handle("a", message("add", 1))["body"] == 1
    failed = host.handle("a", message("fail", 2, how="value"))
    assert host.handle("a", message("fail", 2, how="key")) == failed


def test_a_repeated_message_is_harmless_though_its_client_was_spilled(tmp_path):
    host = build_host(tmp_path, alive=1)
    first = host.handle("a", message("add", 1))
    host.handle("b", message("add", 2))
    assert "a" not in host.programs and host.handle("a", message("add", 1)) == first
    assert host.handle("a", message("ask", 3))["body"][0] == 1


def test_a_repeated_message_is_harmless_in_another_process(tmp_path):
    """The first process dies after it stored the client and before the server has the reply.

    The stored state holds what earlier messages changed, too.
    """
    host = build_host(tmp_path)
    for number in (1, 2):
        reply = host.handle("a", message("add", number))
    host.store_client("a")
    heir = build_host(tmp_path)
    assert heir.handle("a", message("add", 1)) == {
        "number": 1,
        "failure": "message 1 was answered before",
    }
    assert heir.handle("a", message("add", 2)) == reply
    assert heir.handle("a", message("add", 3))["body"] == 3
    heir.save(1)
    last = build_host(tmp_path)
    assert (
        "was answered before" in last.handle("a", message("add", 3))["failure"]
        and last.handle("a", message("ask", 4))["body"][0] == 3
    )


def test_a_reply_that_cannot_be_sent_does_not_keep_its_client_from_being_kept(tmp_path):
    host = build_host(tmp_path, alive=1)
    host.handle("a", message("add", 1, by=1))
    host.answered["a"] = (1, {"number": 1, "body": object()})
    host.handle("b", message("add", 2))
    assert host.handle("a", message("ask", 3))["body"][0] == 1


@pytest.mark.parametrize(
    "name",
    ["hidden", "state", "restore", "perform", "secret", "__init__", "__class__", "nothing", ""],
)
def test_only_operations_can_be_called(tmp_path, name):
    reply = build_host(tmp_path).handle("a", message(name, 1))
    assert reply == {
        "number": 1,
        "failure": f"this client has no operation {name!r}; it has: add, ask, draw, fail",
    }
    assert list_operations(Counter) == ["add", "ask", "draw", "fail"]


@pytest.mark.parametrize(
    "changed",
    [
        {"operation": 3},
        {"operation": None},
        {"number": "1"},
        {"number": None},
        {"round": 1.5},
        {"turn": True},
        {"body": []},
        {"body": None},
        {"more": 1},
    ],
)
def test_what_is_no_request_touches_nothing(tmp_path, made, changed):
    host = build_host(tmp_path, made)
    assert host.handle("a", message("add", 1) | changed)["failure"].startswith(
        "it refuses what it was sent: the message"
    )
    for bytes_ in (
        b"",
        b"noise" * 80,
        bytes(encode([1, 2])),
        bytes(encode(message("add", 1) | changed)),
    ):
        assert "failure" in decode(host.answer("a", bytes_))
    assert made == []


@pytest.mark.parametrize(
    "how, says",
    [
        ("value", "its labels are gone"),
        ("key", "KeyError: 'labels'"),
        ("type", "RuntimeError: a bug"),
    ],
)
def test_an_exception_becomes_a_failure(tmp_path, how, says):
    host = build_host(tmp_path)
    answer = host.handle("a", message("fail", 1, how=how))
    assert answer["failure"] == says
    assert "test_host.py" in answer["traceback"] and "in fail" in answer["traceback"]
    assert host.handle("b", message("add", 2))["body"] == 1


def test_a_recognised_mistake_has_no_traceback(tmp_path):
    host = build_host(tmp_path)
    assert host.handle("a", message("add", 1, to=3)).keys() == {"number", "failure"}
    assert host.handle("a", message("nothing", 2)).keys() == {"number", "failure"}


def test_no_traceback_leaves_where_the_server_is_another_organisations(tmp_path):
    reported = []
    host = build_host(tmp_path)
    host.report = reported.append
    answer = host.handle("a", message("fail", 1, how="type"))
    assert answer.keys() == {"number", "failure"} and "a bug" not in answer["failure"]
    assert "in fail" in reported[0].traceback


def test_a_traceback_is_not_counted_and_gives_way_to_a_limit(tmp_path):
    host = build_host(tmp_path)
    answer = host.handle("a", message("fail", 1, how="type"))
    plain = {"number": 1, "failure": "RuntimeError: a bug"}
    assert without_traceback(answer) == plain
    assert counted_bytes(answer, len(encode(answer))) == len(encode(plain))
    assert decode(host.answer("a", encode(message("fail", 2, how="type")), limit=400)) == {
        **plain,
        "number": 2,
    }


def test_wrong_arguments_become_a_failure(tmp_path):
    host = build_host(tmp_path)
    assert "add holds to, and must hold by" in host.handle("a", message("add", 1, to=3))["failure"]
    assert "failure" in host.handle("nobody", message("add", 3))


def test_a_failed_client_is_not_saved_half_changed_over_others(tmp_path):
    host = build_host(tmp_path)
    host.handle("a", message("add", 1))
    host.handle("b", message("fail", 2, how="key"))
    host.save(1)
    assert host.store.read_latest("a")["memory"]["n"] == 1


def test_an_exception_shows_itself_to_those_who_debug(tmp_path, monkeypatch):
    monkeypatch.setenv("UNALIKE_DEBUG", "1")
    with pytest.raises(KeyError):
        build_host(tmp_path).handle("a", message("fail", 1, how="key"))


def test_randomness_belongs_to_the_message_not_to_the_process(tmp_path):
    host, other = build_host(tmp_path / "1"), build_host(tmp_path / "2", clients="a")
    host.handle("b", message("draw", 1))
    torch.rand(5)
    state = torch.get_rng_state()
    drawn = host.handle("a", message("draw", 2))["body"]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(
        drawn, other.handle("a", message("draw", 9))["body"]
    )  # whatever else was sent before
    assert not torch.equal(drawn, other.handle("a", message("draw", 10, turn=1))["body"])


# spilling


def test_the_idlest_are_spilled_and_come_back(tmp_path, made):
    host = build_host(tmp_path, made, "abcd", alive=2)
    for number, client in enumerate("abcabcd" * 3):
        host.handle(client, message("add", number))
        assert len(host.programs) <= 2
    assert [host.handle(c, message("ask", 100 + i))["body"][0] for i, c in enumerate("abcd")] == [
        6,
        6,
        6,
        3,
    ]
    assert len(made) > 8
    host.save(1)
    assert [host.store.read_latest(c)["memory"]["n"] for c in "abcd"] == [6, 6, 6, 3]
    assert not list(tmp_path.rglob("current.safetensors"))


def test_who_was_only_asked_leaves_nothing_on_disk(tmp_path):
    host = build_host(tmp_path, alive=1)
    for number, client in enumerate("abcabc"):
        host.handle(client, message("ask", number))
    host.save(1)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_client_spilled_asked_and_changed_again_is_saved_as_it_is(tmp_path):
    host = build_host(tmp_path, alive=1)
    turns = [
        ("a", "add"),
        ("b", "ask"),
        ("a", "ask"),
        ("b", "ask"),
        ("a", "add"),
        ("b", "add"),
        ("a", "ask"),
    ]
    for number, (client, what) in enumerate(turns):
        host.handle(client, message(what, number))
    host.save(1)
    assert (
        host.store.read_latest("a")["memory"]["n"] == 2
        and host.store.read_latest("b")["memory"]["n"] == 1
    )
    host.handle("a", message("add", 10))
    host.handle("b", message("ask", 11))
    host.forget()
    host.store.rewind(1)
    assert host.handle("a", message("ask", 12))["body"][0] == 2


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_real_clients_end_the_same_however_many_fit(tmp_path, toys, optimizer):
    """Weights, buffers and optimizer states, float64, exactly; sgd has momentum."""
    ends = {}
    for alive in (1, 256):
        training = Training(rounds=3, batch_size=8, lr=0.02, optimizer=optimizer, momentum=0.9)
        method, clients = Local(), toys.clients(3)
        host = Host(
            clients,
            lambda c, m=method, t=training: ClientRuntime(m.Program(c, m, t, 0)),
            Store(tmp_path / str(alive)),
            alive,
        )
        number = 0
        for round in (1, 2, 3):
            for _ in range(2):
                for client in clients:
                    number += 1
                    assert "failure" not in host.handle(client.id, message("train", number, round))
            host.save(round)
        ends[alive] = {
            c.id: host.handle(c.id, message("describe", 100 + i))["body"]["hash"]
            for i, c in enumerate(clients)
        }
        assert len(host.programs) == min(alive, 3)
    assert ends[1] == ends[256]
