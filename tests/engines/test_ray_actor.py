"""What a Ray actor keeps, without Ray: one that dies at any moment loses nothing that counts."""

import threading
import time
from functools import partial

import pytest

from unalike.base.message import decode, encode
from unalike.core.runtime import build_runtime
from unalike.engines import ray_actor
from unalike.engines.host import Host
from unalike.engines.process import EngineError
from unalike.engines.ray_actor import ClientActor, FencedStore, take_over, token_path
from unalike.engines.store import Store

LIMIT = 10**8


@pytest.fixture
def start(tmp_path, toys, monkeypatch):
    """Starts an actor of two clients, as a server or the replacement of a dead actor does."""
    monkeypatch.setattr(ray_actor, "STORE_EVERY", 0.0)  # clients are stored after each operation
    monkeypatch.setattr(ray_actor, "STORE_SHARE", 0)
    take_over(tmp_path / "clients", "server 1")
    build = partial(build_runtime, algorithm=toys.method("local"), training=toys.training(), seed=0)

    def start_actor(token="server 1"):
        actor = ClientActor(tmp_path / "clients", token, 8, LIMIT, 1)
        actor.store_after = 0.0
        actor.host = Host(toys.clients(2), build, actor.store, 8)
        return actor

    return start_actor


def ask(actor, client, operation, number, round=1):
    message = {"operation": operation, "number": number, "round": round, "turn": 0, "body": {}}
    reply, changed = actor.handle(client, operation, encode(message))
    return decode(memoryview(reply), LIMIT), changed


def describe(actor):
    return [ask(actor, client, "describe", 90 + i)[0]["body"] for i, client in enumerate("ab")]


def test_a_client_that_nobody_asked_since_its_actor_died_is_in_the_snapshot(start, tmp_path):
    """It was on disk, in the middle of a round; a resume from that round would have undone it."""
    first = start()
    for number, client in enumerate("ab", 1):
        assert ask(first, client, "train", number)[1] == "stored"
    expected = describe(first)
    second = start()  # the first died just before it was told to save
    second.save(1)
    store = Store(tmp_path / "clients", snapshots=3)
    assert len(store.manifest(1)) == 2 and not store.has_current("a")
    store.rewind(1)  # the server is killed and goes on from this round
    assert describe(start()) == expected


def test_an_actor_of_a_server_that_was_replaced_cannot_finish_what_it_was_writing(
    start, tmp_path, monkeypatch
):
    """It had looked at the token, and was then slow, as on a busy machine."""
    old = start()
    ask(old, "a", "train", 1)
    old.save(1)
    before = describe(start())
    ask(old, "a", "train", 2, round=2)
    writing, order = threading.Event(), []
    snapshot = Store.snapshot

    def slow_snapshot(self, *arguments):
        writing.set()
        time.sleep(0.5)
        snapshot(self, *arguments)
        order.append("old actor wrote")

    monkeypatch.setattr(Store, "snapshot", slow_snapshot)
    late = threading.Thread(target=old.save, args=(2,))
    late.start()
    assert writing.wait(10)
    take_over(tmp_path / "clients", "server 2")
    order.append("new server began")
    late.join()
    assert order == ["old actor wrote", "new server began"]
    Store(tmp_path / "clients", snapshots=3).rewind(1)
    assert describe(start("server 2")) == before
    with pytest.raises(EngineError, match="another server"):
        ask(old, "a", "train", 3, round=3)


def test_a_writer_that_does_not_end_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_actor, "TAKE_OVER_TIMEOUT", 0.2)
    (tmp_path / "clients").mkdir()
    take_over(tmp_path / "clients", "server 1")
    with (
        FencedStore(tmp_path / "clients", "server 1").writing(),
        pytest.raises(EngineError, match="still writes"),
    ):
        take_over(tmp_path / "clients", "server 2")
    assert token_path(tmp_path / "clients").read_text() == "server 1"
