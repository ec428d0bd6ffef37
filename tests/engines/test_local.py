"""The local engine: the same replies, bytes and times in this process and in others, and what is broken told in a sentence."""

import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch

from unalike.base.message import BLOCK, MessageError, encode, encoded_size
from unalike.core.client import ClientInfo
from unalike.core.engine import EngineSettings
from unalike.core.federation import Federation, FederationConfig
from unalike.core.operations import operation, query
from unalike.core.runtime import ClientRuntime
from unalike.engines import local
from unalike.engines import process as worker
from unalike.engines.local import LocalEngine
from unalike.engines.process import EngineError
from unalike.training.loop import Training


class Program:
    """Keeps a sum; work and replies of any size on demand."""

    def __init__(self, client):
        self.client = client
        self.total = torch.zeros(2, dtype=torch.float64)
        self.work = 0.0
        self.round = 0
        self.seed = 0

    @operation
    def add(self, x, work=0.0):
        self.total += x.sum() + torch.rand((), dtype=torch.float64)
        self.work += work
        return {"total": self.total, "from": self.client.id, "round": self.round}

    @query
    def ask(self):
        return self.total

    @query
    def big(self, numbers):
        return torch.zeros(numbers)

    @query
    def odd(self):
        return object()

    @query
    def spoil(self, x):
        x.fill_(-1)
        return x

    @operation
    def fail(self):
        raise ValueError("its labels are gone")

    @operation
    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    @query
    def sleep(self):
        time.sleep(60)

    def state(self):
        return {"total": self.total}

    def restore(self, state):
        self.total = state["total"]


def person(id, **about):
    info = ClientInfo(
        id=id, model="m", task="t", metric="accuracy", labels=("x",), samples=1, **about
    )
    return SimpleNamespace(id=id, device="cpu", info=lambda: info)


def build(client):
    return ClientRuntime(Program(client))


@pytest.fixture
def engine(tmp_path):
    """Makes engines and closes them."""
    made = []

    def make(clients="abcde", workers=0, **settings):
        clients = [person(c) if isinstance(c, str) else c for c in clients]
        folder = tmp_path / f"{len(made)}"
        made.append(
            LocalEngine(clients, build, folder, EngineSettings(**settings), workers=workers)
        )
        return made[-1]

    yield make
    for each in made:
        each.close()


def message(operation, number, round=1, **body):
    return {"operation": operation, "number": number, "round": round, "turn": 0, "body": body}


def everything(engine):
    """All arrivals, as what they are to the byte."""
    out = []
    while arrivals := engine.receive():
        out += [(a.at, a.client, a.size, bytes(encode(a.reply))) for a in arrivals]
    return out


def conversation(engine):
    """Several calls with all sorts of answers, a snapshot in between; every arrival."""
    out, number = [], 0
    for round in (1, 2, 3):
        for what, body in (
            ("add", {"x": torch.full((round * 50,), 0.5), "work": 100.0 * round}),
            ("ask", {}),
            ("big", {"numbers": 1000}),
            ("odd", {}),
            ("nothing", {}),
        ):
            messages = {}
            for client in engine.infos():
                number += 1
                messages[client] = message(what, number, round, **body)
            sizes = engine.send(messages)
            assert sizes == {client: len(encode(m)) for client, m in messages.items()}
            out += everything(engine)
        engine.save(round)
    return out


@pytest.mark.parametrize("workers", [1, 2, 9])
def test_processes_and_this_process_give_the_same_replies_sizes_and_times(engine, workers):
    assert conversation(engine(workers=workers)) == conversation(engine(workers=0))


def test_alive_makes_no_difference(engine):
    expected = conversation(engine())
    assert (
        conversation(engine(max_loaded_clients=1))
        == expected
        == conversation(engine(workers=2, max_loaded_clients=2))
    )


def test_a_client_shares_no_memory_with_the_server(engine):
    for workers in (0, 1):
        there = engine("a", workers)
        x = torch.ones(3)
        there.send({"a": message("spoil", 1, x=x)})
        (arrival,) = there.receive()
        assert x.tolist() == [1, 1, 1] and arrival.reply["body"].tolist() == [-1, -1, -1]
        there.send({"a": message("ask", 2)})
        there.receive()[0].reply["body"].fill_(9)
        there.send({"a": message("ask", 3)})
        assert there.receive()[0].reply["body"].tolist() == [0, 0]


def test_the_ledger_holds_what_was_encoded_to_the_byte(engine, monkeypatch):
    """Counts the bytes that really pass the pipes, and compares with the ledger of both kinds of engine."""
    passed = {"down": 0, "up": 0}
    send, receive = worker.Worker._send, worker.Worker._receive
    monkeypatch.setattr(
        worker.Worker,
        "_send",
        lambda self, order, data=None: (
            passed.update(down=passed["down"] + len(data or b"")),
            send(self, order, data),
        )[1],
    )

    def counted(self):
        data = receive(self)
        passed["up"] += len(data)
        return data

    monkeypatch.setattr(worker.Worker, "_receive", counted)
    totals = []
    for workers in (0, 2):
        fed = Federation(engine(workers=workers), Training(rounds=1), FederationConfig())
        fed.start_round(1)
        fed.call(
            "add",
            x=torch.randn(100),
            per_client={"a": {"work": 5.0}, "c": {"x": torch.zeros(2, 2, dtype=torch.bool)}},
        )
        fed.call("big", numbers=777)
        totals.append({way: fed.ledger.total(way) for way in ("down", "up")})
    assert totals[0] == totals[1] == passed


# the clock


def test_a_call_lasts_as_long_as_links_and_work_say(engine):
    """a: 2 * 0.5 latency + (down + up) / 1000 bytes a second + 100 samples / 50 a second; b: no latency, a fast link, no work."""
    for workers in (0, 2):
        there = engine(
            [
                person("a", latency=0.5, link=1000.0, speed=50.0),
                person("b", latency=0.0, link=1e6, speed=1.0),
            ],
            workers,
        )
        down = there.send(
            {"a": message("add", 1, x=torch.zeros(4), work=100.0), "b": message("ask", 2)}
        )
        (first,) = there.receive()
        assert first.client == "b" and first.size == 2 * BLOCK and down["b"] == BLOCK
        assert first.at == there.now == pytest.approx(3 * BLOCK / 1e6, rel=1e-12)
        (second,) = there.receive()
        assert down["a"] == 2 * BLOCK and second.size == 2 * BLOCK
        assert second.at == there.now == pytest.approx(1.0 + 4 * BLOCK / 1000 + 2.0, rel=1e-12)
        there.send({"b": message("ask", 3)})
        (third,) = there.receive()
        assert third.at == pytest.approx(second.at + 3 * BLOCK / 1e6, rel=1e-12)
        assert there.receive() == [] and there.now == third.at


def test_work_is_counted_once(engine):
    there = engine([person("a", latency=0.0, link=1e18, speed=10.0)])
    for number, work, at in ((1, 20.0, 2.0), (2, 0.0, 2.0), (3, 5.0, 2.5)):
        there.send({"a": message("add", number, x=torch.zeros(1), work=work)})
        assert there.receive()[0].at == pytest.approx(at)


def test_replies_of_one_instant_come_together_in_the_order_sent(engine):
    there = engine("abcd")
    there.send({c: message("ask", i) for i, c in enumerate("cabd")})
    assert [a.client for a in there.receive()] == list("cabd")


def test_messages_under_way_wait_while_others_are_asked(engine):
    """b's answer comes first on the clock, but only a's was asked for."""
    for workers in (0, 2):
        there = engine([person("a", latency=9.0), person("b", latency=1.0)], workers)
        there.send(
            {"a": message("add", 1, x=torch.ones(1)), "b": message("add", 2, x=torch.ones(1))}
        )
        there.send({"a": message("ask", 3), "b": message("ask", 4)})
        (late,) = there.receive({3})
        assert late.client == "a" and late.reply["number"] == 3 and late.at > 18
        assert [a.reply["number"] for a in there.receive()] == [4] and there.now == late.at
        assert [a.reply["number"] for a in there.receive()] == [2]
        assert [a.reply["number"] for a in there.receive()] == [1]
        assert there.receive() == []


# going back


def test_going_back_to_a_round_gives_the_same_again(engine):
    for workers in (0, 2):
        there = engine(workers=workers)
        there.load(0, 0.0, [])

        def add(number, round, there=there):
            there.send(
                {
                    c: message("add", number + i, round, x=torch.ones(3))
                    for i, c in enumerate("abcde")
                }
            )

        add(1, 1)
        everything(there)
        there.save(1)
        now = there.now
        add(11, 2)
        pending, saved_at = there.pending(), there.now
        there.save(2)
        expected = everything(there)
        add(21, 3)
        everything(there)
        there.load(2, saved_at, pending)
        assert everything(there) == expected
        add(21, 3)
        again = everything(there)
        there.load(1, now, [])
        add(11, 2)
        assert everything(there) == expected
        add(21, 3)
        assert everything(there) == again


def test_clients_can_follow_the_server_to_either_of_its_snapshots(engine):
    """Clients are saved first: with the server at rounds 2 and 3 they may already be at 4, and going back to 2 must still find round 2."""
    there = engine("a")
    ends = {}
    for round in (1, 2, 3, 4):
        there.send({"a": message("add", round, round, x=torch.ones(1))})
        ends[round] = there.receive()[0].reply["body"]["total"]
        there.save(round)
    for round in (3, 2):
        there.load(round, 0.0, [])
        there.send({"a": message("ask", 10 + round)})
        assert torch.equal(there.receive()[0].reply["body"], ends[round])


# what goes wrong


@pytest.mark.parametrize("workers", [0, 2])
def test_a_reply_over_the_limit_is_that_clients_failure(engine, workers):
    fed = Federation(
        engine(workers=workers, max_message_bytes=2048), Training(rounds=1), FederationConfig()
    )
    fed.start_round(1)
    replies = fed.call("big", per_client={c: {"numbers": 5000 if c == "b" else 5} for c in "abcde"})
    assert list(replies) == list("acde")
    assert replies.failures["b"].reason == "the message has 20,480 bytes, over the limit of 2,048"
    assert len(fed.call("ask")) == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_a_message_over_the_limit_is_refused_by_name(engine, workers):
    fed = Federation(
        engine(workers=workers, max_message_bytes=2048), Training(rounds=1), FederationConfig()
    )
    with pytest.raises(MessageError, match="over the limit of 2,048"):
        fed.call("add", x=torch.zeros(5000))


@pytest.mark.parametrize("workers", [0, 2])
def test_failures_of_a_client_are_its_own(engine, workers):
    fed = Federation(engine(workers=workers), Training(rounds=1), FederationConfig(quorum=0))
    failed = fed.call("fail", clients=["a"]).failures
    assert failed["a"].reason == "its labels are gone"
    assert (
        fed.call("odd", clients=["b"])
        .failures["b"]
        .reason.startswith("body is a object; a message carries")
    )
    assert (
        fed.call("nothing", clients=["c"])
        .failures["c"]
        .reason.startswith("this client has no operation 'nothing'")
    )
    assert list(fed.call("ask")) == ["d", "e"]


def test_a_worker_that_dies_is_told_in_a_sentence(engine):
    there = engine(workers=2)
    there.send({c: message("add", i, x=torch.ones(1)) for i, c in enumerate("abcde")})
    everything(there)
    there.save(1)
    says = r"^a worker process died \(exit code -9\); resume the run from its last round$"
    with pytest.raises(EngineError, match=says):
        there.send({"a": message("die", 10), "b": message("ask", 11)})
        everything(there)
    with pytest.raises(EngineError, match=says):
        there.save(2)
    started = time.monotonic()
    there.close()
    assert time.monotonic() - started < 3
    assert there.store.read_latest("a") is not None


def test_a_worker_killed_from_outside_is_noticed_while_waiting(engine):
    there = engine(workers=2)
    there.send({"a": message("sleep", 1)})
    os.kill(there.workers[0].process.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="a worker process died"):
        there.receive()


def test_workers_end_with_the_engine(engine):
    there = engine(workers=2)
    there.close()
    assert not any(w.process.is_alive() for w in there.workers)


def test_a_save_that_fails_is_told(engine, tmp_path):
    for workers in (0, 1):
        there = engine("a", workers)
        there.send({"a": message("add", 1, x=torch.ones(1))})
        everything(there)
        there.store.folder.parent.mkdir(exist_ok=True)
        there.store.folder.write_text("in the way")
        with pytest.raises((EngineError, OSError), match=r"File exists|Not a directory"):
            there.save(1)


def test_large_messages_do_not_wait_for_each_other(engine):
    """Far larger than a pipe holds, both ways and to several clients of one process."""
    fed = Federation(engine(workers=1), Training(rounds=1), FederationConfig())
    replies = fed.call("spoil", x=torch.ones(300_000))
    assert len(replies) == 5 and all(float(x.sum()) == -300_000 for x in replies.values())
    assert fed.ledger.total("up") > 5 * encoded_size(torch.ones(300_000)) - 5 * BLOCK


def test_the_door_is_the_only_way(engine, monkeypatch):
    """In this process nothing is encoded: sizes are computed."""
    monkeypatch.setattr(local, "encode", None)
    monkeypatch.setattr(local, "decode", None)
    there = engine("a")
    there.send({"a": message("ask", 1)})
    assert there.receive()[0].size == 2 * BLOCK
