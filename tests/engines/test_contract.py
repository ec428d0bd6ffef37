"""What every engine that hosts clients must do; `toy` shows that one list line adds an engine.

Ray keeps the same contract on a real cluster (test_ray.py), FLARE and Flower as launchers
(test_flare.py, test_flower.py).
"""

import inspect

import pytest
import torch

import unalike
from unalike.base.errors import UserError
from unalike.base.message import encoded_size
from unalike.core.engine import EngineSettings
from unalike.core.operations import operation, query
from unalike.core.runtime import ClientRuntime
from unalike.engines import ENGINES, engine_class, engine_options, has_slow_messages, hosts_clients

HOSTING = [("local", {}), ("local", {"workers": 2}), ("toy", {})]


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setitem(ENGINES, "toy", ("toy_engine:ToyEngine", None))


class Counter:
    """A client program that adds numbers up."""

    def __init__(self, client):
        self.client = client
        self.total = 0
        self.axis_lengths = {}
        self.work = 0.0
        self.round = 0
        self.seed = 0
        self.model = torch.nn.Identity()

    @operation
    def add(self, amount: int) -> int:
        self.total += amount
        return self.total

    @query
    def total_so_far(self) -> int:
        return self.total

    @operation
    def fail(self):
        raise ValueError("no data")

    def state(self):
        return {"total": self.total}

    def restore(self, state):
        self.total = state["total"]


def message(operation, number, **body):
    return {"operation": operation, "number": number, "round": 1, "turn": 0, "body": body}


@pytest.fixture(params=HOSTING, ids=lambda case: f"{case[0]} {case[1]}")
def engine(request, toys, tmp_path):
    name, options = request.param
    clients = toys.clients(3)
    engine = engine_class(name)(
        clients, build_counter, tmp_path / "clients", EngineSettings(), **options
    )
    engine.load(0, 0.0, [])
    yield engine
    engine.close()


def build_counter(client):
    return ClientRuntime(Counter(client))


def send(engine, **messages):
    engine.send(messages)
    return {m["number"] for m in messages.values()}


def receive_all(engine, numbers):
    """Arrivals by client, until all messages are answered."""
    arrivals = {}
    while len(arrivals) < len(numbers):
        batch = engine.receive(numbers)
        assert batch, "a message was not answered"
        arrivals |= {arrival.client: arrival for arrival in batch}
    return arrivals


def test_every_client_announces_itself(engine, toys):
    assert engine.infos() == {client.id: client.info() for client in toys.clients(3)}


def test_sizes_are_those_of_the_codec_both_ways(engine):
    messages = {"a": message("add", 1, amount=2), "b": message("add", 2, amount=3)}
    sizes = engine.send(messages)
    assert sizes == {client: encoded_size(sent) for client, sent in messages.items()}
    arrivals = receive_all(engine, {1, 2})
    assert {c: arrival.reply["body"] for c, arrival in arrivals.items()} == {"a": 2, "b": 3}
    assert all(arrival.size == encoded_size(arrival.reply) for arrival in arrivals.values())


def test_only_the_wanted_replies_are_delivered(engine):
    send(engine, a=message("add", 1, amount=1), b=message("add", 2, amount=1))
    assert [arrival.client for arrival in engine.receive({2})] == ["b"]
    assert [arrival.client for arrival in engine.receive({1})] == ["a"]
    assert engine.receive({1, 2}) == []


def test_a_client_that_fails_answers_with_the_reason_and_the_others_as_ever(engine):
    numbers = send(engine, a=message("fail", 1), b=message("add", 2, amount=1))
    arrivals = receive_all(engine, numbers)
    assert "no data" in arrivals["a"].reply["failure"] and arrivals["b"].reply["body"] == 1


def test_a_dropped_reply_is_not_delivered_and_its_client_goes_on(engine):
    send(engine, a=message("add", 1, amount=1))
    engine.pending()
    engine.drop({1})
    assert engine.receive({1}) == []
    numbers = send(engine, a=message("total_so_far", 2))
    assert receive_all(engine, numbers)["a"].reply["body"] == 1


def test_states_and_undelivered_replies_come_back_as_they_were_saved(engine):
    receive_all(engine, send(engine, a=message("add", 1, amount=5)))
    send(engine, b=message("add", 2, amount=7))
    now, pending = engine.now, engine.pending()
    engine.save(1)
    receive_all(engine, {2})
    receive_all(engine, send(engine, a=message("add", 3, amount=100)))
    engine.load(1, now, pending)
    assert receive_all(engine, {2})["b"].reply["body"] == 7
    numbers = send(engine, a=message("total_so_far", 4), b=message("total_so_far", 5))
    arrivals = receive_all(engine, numbers)
    assert {c: arrival.reply["body"] for c, arrival in arrivals.items()} == {"a": 5, "b": 7}


def test_a_run_on_an_added_engine_ends_like_the_local_one(toys, tmp_path):
    results = {}
    for name in ("local", "toy"):
        results[name] = unalike.run(
            unalike.FedAvg(),
            [toys.client(id) for id in "abc"],
            training=toys.training(rounds=2),
            engine={"name": name},
            out=tmp_path / name,
            alone=False,
        )
    hashes = {
        name: [client["hash"] for client in result["clients"].values()]
        for name, result in results.items()
    }
    ledgers = [(tmp_path / name / "ledger.csv").read_text() for name in ("local", "toy")]
    assert hashes["toy"] == hashes["local"] and ledgers[0] == ledgers[1]


def test_options_are_the_keyword_only_arguments():
    assert list(engine_options("toy")) == ["slow"] and list(engine_options("local")) == [
        "workers",
        "stack",
    ]
    with pytest.raises(UserError, match=r'There is no engine "tyo"\. Did you mean "toy"\?'):
        engine_options("tyo")


def test_engines_say_whether_they_host_clients(monkeypatch):
    assert hosts_clients("local") and hosts_clients("toy") and hosts_clients("no such engine")
    monkeypatch.setitem(ENGINES, "absent", ("absent:Engine", "no_such_package"))
    assert not hosts_clients("absent")
    with pytest.raises(UserError, match="needs the package no_such_package"):
        engine_class("absent")


@pytest.mark.parametrize("name, package", [(n, p) for n, (_, p) in ENGINES.items()])
def test_every_listed_engine_is_of_one_of_the_two_kinds(name, package):
    if package is not None:
        pytest.importorskip(package)
    engine = engine_class(name)
    arguments = inspect.signature(engine).parameters.values()
    positional = [p.name for p in arguments if p.kind is p.POSITIONAL_OR_KEYWORD]
    if engine.hosts_clients:
        assert positional == ["clients", "build_runtime", "folder", "settings"]
        methods = ["infos", "send", "receive", "drop", "pending", "save", "load", "close"]
        methods += ["rewind_clock", "shares_process"]
    else:
        assert positional == ["folder"]
        methods = ["launch"]
    assert all(callable(getattr(engine, method)) for method in methods)
    assert isinstance(engine.uses_this_machine, bool)
    assert has_slow_messages(name) == (name == "flower")
