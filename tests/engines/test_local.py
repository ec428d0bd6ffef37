"""The local engine: the same replies, bytes and times in this process and in worker processes."""

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
        self.axis_lengths = {}

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
    engines = []

    def make(clients="abcde", workers=0, **settings):
        clients = [person(c) if isinstance(c, str) else c for c in clients]
        folder = tmp_path / f"{len(engines)}"
        engines.append(
            LocalEngine(clients, build, folder, EngineSettings(**settings), workers=workers)
        )
        return engines[-1]

    yield make
    for engine_made in engines:
        engine_made.close()


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
def test_replies_sizes_and_times_are_the_same_with_and_without_workers(engine, workers):
    assert conversation(engine(workers=workers)) == conversation(engine(workers=0))


def test_results_do_not_depend_on_how_many_clients_are_in_memory(engine):
    expected = conversation(engine())
    assert (
        conversation(engine(max_loaded_clients=1))
        == expected
        == conversation(engine(workers=2, max_loaded_clients=2))
    )


def test_a_client_shares_no_memory_with_the_server(engine):
    for workers in (0, 1):
        local_engine = engine("a", workers)
        x = torch.ones(3)
        local_engine.send({"a": message("spoil", 1, x=x)})
        (arrival,) = local_engine.receive()
        assert x.tolist() == [1, 1, 1] and arrival.reply["body"].tolist() == [-1, -1, -1]
        local_engine.send({"a": message("ask", 2)})
        local_engine.receive()[0].reply["body"].fill_(9)
        local_engine.send({"a": message("ask", 3)})
        assert local_engine.receive()[0].reply["body"].tolist() == [0, 0]


def test_the_ledger_holds_what_was_encoded_to_the_byte(engine, monkeypatch):
    """Counts the bytes in the pipes and compares them with the ledger, without workers, too."""
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


def test_a_call_lasts_by_latency_link_and_work(engine):
    """a: 2 * 0.5 s latency + (down + up) / 1000 bytes/s + 100 samples / 50 per s.

    b: no latency, a fast link, no work.
    """
    for workers in (0, 2):
        local_engine = engine(
            [
                person("a", latency=0.5, link=1000.0, speed=50.0),
                person("b", latency=0.0, link=1e6, speed=1.0),
            ],
            workers,
        )
        down = local_engine.send(
            {"a": message("add", 1, x=torch.zeros(4), work=100.0), "b": message("ask", 2)}
        )
        (first,) = local_engine.receive()
        assert first.client == "b" and first.size == 2 * BLOCK and down["b"] == BLOCK
        assert first.at == local_engine.now == pytest.approx(3 * BLOCK / 1e6, rel=1e-12)
        (second,) = local_engine.receive()
        assert down["a"] == 2 * BLOCK and second.size == 2 * BLOCK
        assert (
            second.at == local_engine.now == pytest.approx(1.0 + 4 * BLOCK / 1000 + 2.0, rel=1e-12)
        )
        local_engine.send({"b": message("ask", 3)})
        (third,) = local_engine.receive()
        assert third.at == pytest.approx(second.at + 3 * BLOCK / 1e6, rel=1e-12)
        assert local_engine.receive() == [] and local_engine.now == third.at


def test_work_is_counted_once(engine):
    local_engine = engine([person("a", latency=0.0, link=1e18, speed=10.0)])
    for number, work, at in ((1, 20.0, 2.0), (2, 0.0, 2.0), (3, 5.0, 2.5)):
        local_engine.send({"a": message("add", number, x=torch.zeros(1), work=work)})
        assert local_engine.receive()[0].at == pytest.approx(at)


def test_replies_of_one_instant_come_together_in_the_order_sent(engine):
    local_engine = engine("abcd")
    local_engine.send({c: message("ask", i) for i, c in enumerate("cabd")})
    assert [a.client for a in local_engine.receive()] == list("cabd")


def test_messages_in_flight_stay_while_others_are_received(engine):
    """b's answer comes first on the clock, but only a's was asked for."""
    for workers in (0, 2):
        local_engine = engine([person("a", latency=9.0), person("b", latency=1.0)], workers)
        local_engine.send(
            {"a": message("add", 1, x=torch.ones(1)), "b": message("add", 2, x=torch.ones(1))}
        )
        local_engine.send({"a": message("ask", 3), "b": message("ask", 4)})
        (late,) = local_engine.receive({3})
        assert late.client == "a" and late.reply["number"] == 3 and late.at > 18
        assert [a.reply["number"] for a in local_engine.receive()] == [
            4
        ] and local_engine.now == late.at
        assert [a.reply["number"] for a in local_engine.receive()] == [2]
        assert [a.reply["number"] for a in local_engine.receive()] == [1]
        assert local_engine.receive() == []


# going back


def test_loading_a_round_repeats_the_same_replies(engine):
    for workers in (0, 2):
        local_engine = engine(workers=workers)
        local_engine.load(0, 0.0, [])

        def add(number, round, local_engine=local_engine):
            local_engine.send(
                {
                    c: message("add", number + i, round, x=torch.ones(3))
                    for i, c in enumerate("abcde")
                }
            )

        add(1, 1)
        everything(local_engine)
        local_engine.save(1)
        now = local_engine.now
        add(11, 2)
        pending, saved_at = local_engine.pending(), local_engine.now
        local_engine.save(2)
        expected = everything(local_engine)
        add(21, 3)
        everything(local_engine)
        local_engine.load(2, saved_at, pending)
        assert everything(local_engine) == expected
        add(21, 3)
        again = everything(local_engine)
        local_engine.load(1, now, [])
        add(11, 2)
        assert everything(local_engine) == expected
        add(21, 3)
        assert everything(local_engine) == again


def test_clients_can_follow_the_server_to_either_of_its_snapshots(engine):
    """Clients are saved first: with the server at rounds 2 and 3 they may already be at 4.

    Going back to 2 must still find round 2.
    """
    local_engine = engine("a")
    ends = {}
    for round in (1, 2, 3, 4):
        local_engine.send({"a": message("add", round, round, x=torch.ones(1))})
        ends[round] = local_engine.receive()[0].reply["body"]["total"]
        local_engine.save(round)
    for round in (3, 2):
        local_engine.load(round, 0.0, [])
        local_engine.send({"a": message("ask", 10 + round)})
        assert torch.equal(local_engine.receive()[0].reply["body"], ends[round])


# what goes wrong


@pytest.mark.parametrize("workers", [0, 2])
def test_a_reply_over_the_limit_fails_its_client(engine, workers):
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
def test_a_failure_affects_no_other_client(engine, workers):
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


def test_a_worker_that_dies_is_reported_in_one_sentence(engine):
    local_engine = engine(workers=2)
    local_engine.send({c: message("add", i, x=torch.ones(1)) for i, c in enumerate("abcde")})
    everything(local_engine)
    local_engine.save(1)
    says = r"^a worker process died \(exit code -9\); resume the run from its last round$"
    with pytest.raises(EngineError, match=says):
        local_engine.send({"a": message("die", 10), "b": message("ask", 11)})
        everything(local_engine)
    with pytest.raises(EngineError, match=says):
        local_engine.save(2)
    started = time.monotonic()
    local_engine.close()
    assert time.monotonic() - started < 3
    assert local_engine.store.read_latest("a") is not None


def test_a_worker_killed_from_outside_is_noticed_while_waiting(engine):
    local_engine = engine(workers=2)
    local_engine.send({"a": message("sleep", 1)})
    os.kill(local_engine.workers[0].process.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="a worker process died"):
        local_engine.receive()


def test_workers_end_with_the_engine(engine):
    local_engine = engine(workers=2)
    local_engine.close()
    assert not any(w.process.is_alive() for w in local_engine.workers)


def test_a_save_that_fails_is_reported(engine, tmp_path):
    for workers in (0, 1):
        local_engine = engine("a", workers)
        local_engine.send({"a": message("add", 1, x=torch.ones(1))})
        everything(local_engine)
        local_engine.store.folder.parent.mkdir(exist_ok=True)
        local_engine.store.folder.write_text("in the way")
        with pytest.raises((EngineError, OSError), match=r"File exists|Not a directory"):
            local_engine.save(1)


def test_large_messages_do_not_wait_for_each_other(engine):
    """Far larger than a pipe holds, both ways and to several clients of one process."""
    fed = Federation(engine(workers=1), Training(rounds=1), FederationConfig())
    replies = fed.call("spoil", x=torch.ones(300_000))
    assert len(replies) == 5 and all(float(x.sum()) == -300_000 for x in replies.values())
    assert fed.ledger.total("up") > 5 * encoded_size(torch.ones(300_000)) - 5 * BLOCK


def test_without_workers_nothing_is_encoded(engine, monkeypatch):
    """In this process nothing is encoded: sizes are computed."""
    monkeypatch.setattr(local, "encode", None)
    monkeypatch.setattr(local, "decode", None)
    local_engine = engine("a")
    local_engine.send({"a": message("ask", 1)})
    assert local_engine.receive()[0].size == 2 * BLOCK
