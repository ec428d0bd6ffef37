"""Malformed and hostile messages: none crashes a server or a client, and none is accepted.

All of them with UNALIKE_FAULTS=1.
"""

import copy
import math
import os
import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unalike import FederationConfig, Privacy
from unalike.algorithms import ALGORITHMS
from unalike.base.message import MessageError, decode, encode, find_nonfinite
from unalike.core.engine import Arrival, Sent
from unalike.core.federation import Failure, Federation, QuorumError
from unalike.core.runtime import ClientRuntime
from unalike.core.signatures import tensor_spec
from unalike.engines.host import Host
from unalike.engines.realtime import parse_reply
from unalike.engines.store import Store
from unalike.runs import Run, RunPlan

MANY = bool(os.environ.get("UNALIKE_FAULTS"))
calm = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}
seeds = st.integers(0, 2**63)
RUBBISH = [
    None,
    True,
    -1,
    10**30,
    1e308,
    math.nan,
    math.inf,
    "",
    "x" * 5000,
    "__import__('os')",
    [],
    {},
    [[]] * 50,
    {"a": {"b": 1}},
    torch.zeros(0),
    torch.full((2, 3), math.nan),
    torch.zeros(3, dtype=torch.int64),
    torch.zeros(1, 1, 1),
    torch.tensor(True),
]


def spoilt(value, draw):
    """The value with one error: another shape, dtype, name or type, a missing or extra field, NaN."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        value, key = dict(value), draw.choice(sorted(value))
        how = draw.randrange(8)
        if how == 0:
            value[f"{key}'"] = value.pop(key)
        elif how == 1:
            del value[key]
        elif how == 2:
            value["more"] = draw.choice(RUBBISH)
        else:
            value[key] = spoilt(value[key], draw)
        return value
    if isinstance(value, list) and value and draw.random() < 0.7:
        at = draw.randrange(len(value))
        return draw.choice(
            [
                value[:at],
                value + value[:1],
                [*value[:at], spoilt(value[at], draw), *value[at + 1 :]],
            ]
        )
    if isinstance(value, torch.Tensor) and draw.random() < 0.8:
        real = value.double() if value.is_floating_point() else torch.zeros(value.shape)
        return draw.choice(
            [
                value.flatten()[:-1],
                value[None],
                torch.cat([value.reshape(1, -1)] * 2),
                real * math.nan,
                real + math.inf,
                value.bool(),
                value.reshape(-1, 1),
                value.to(torch.int8),
                torch.zeros(value.shape).to_dense()[..., None],
            ]
        )
    return draw.choice(RUBBISH)


def scrambled(data, draw):
    """Bytes with some of them changed, cut off or put elsewhere."""
    data = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at, how = draw.randrange(len(data)), draw.randrange(5)
        if how == 0:
            data[at] = draw.randrange(256)
        elif how == 1:
            del data[at : at + draw.choice([1, 8, 256])]
        elif how == 2:
            data[at:at] = draw.randbytes(draw.choice([1, 8, 256]))
        elif how == 3 and len(data) > 20:
            data[draw.randrange(8, 16)] = draw.choice([0, 1, 127, 255])
        else:
            data[at : at + 1] = bytes([draw.choice(b'0[]{}",:$-.')])
        data = data or bytearray(b"x")
    return bytes(data)


def at_the_door(toys, name, folder, privacy=None):
    """A method's server and, of each operation, one message, its reply and sizes of its axes."""
    plan = RunPlan(toys.method(name), toys.clients(), toys.training(rounds=1), privacy=privacy)
    run = Run(plan)
    engine = run.build_engine(folder / "clients", privacy=privacy)
    fed = Federation(
        engine,
        plan.training,
        plan.federation,
        0,
        algorithm=plan.algorithm,
        privacy=privacy,
        count_releases=run.releases.count if privacy else None,
    )
    replies, open_ = {}, fed.accept

    def listen(arrival, past=None, sizes=None):
        sent = fed.in_flight[arrival.reply["number"]]
        replies.setdefault(sent.operation, (sent, copy.deepcopy(arrival.reply), sizes))
        return open_(arrival, past, sizes)

    fed.accept = listen
    for _ in plan.algorithm.serve(fed):
        fed.evaluate()
    plan.algorithm.finish(fed)
    fed.accept = open_
    return fed, list(replies.values())


@pytest.fixture(scope="module")
def doors(toys, tmp_path_factory):
    names = ALGORITHMS if MANY else ("fedavg", "heterofl", "fedmuscle", "afmcc")
    method_toys = lambda name: SimpleNamespace(**(vars(toys) | toys.toys_for(ALGORITHMS[name])))
    noisy = [(name, Privacy(noise=0.1)) for name in ("fedavg", "fedmuscle")]
    return [
        at_the_door(method_toys(name), name, tmp_path_factory.mktemp("door"), how)
        for name, how in [*((n, None) for n in names), *noisy]
    ]


@settings(max_examples=10_000 if MANY else 300, **calm)
@given(seed=seeds)
def test_only_replies_as_the_method_declares_are_accepted(doors, seed):
    """As bytes or as a value; what is let in has the form of an honest reply, and is finite."""
    draw = random.Random(seed)
    fed, replies = draw.choice(doors)
    sent, honest, sizes = draw.choice(replies)
    reply = (
        {**honest, "body": spoilt(honest["body"], draw)}
        if draw.random() < 0.7
        else spoilt(honest, draw)
    )
    try:
        data = bytes(encode(reply)) if draw.random() < 0.7 else scrambled(encode(honest), draw)
    except MessageError:
        return  # nobody could send it
    read_ = parse_reply(data, honest["number"], 2**20)
    fed.in_flight[honest["number"]] = Sent(
        sent.client, sent.operation, sent.round, sent.at, sent.like
    )
    got = fed.accept(Arrival(sent.client, 0.0, len(data), read_), sizes=sizes)
    if isinstance(got, Failure):
        assert got.client == sent.client and len(got.reason) <= 500 and "\n" not in got.reason
        return
    assert find_nonfinite(got) is None
    if fed.count_releases is not None:
        return  # a client may say less
    if tensor_spec(honest["body"]) is not None and sent.operation not in (
        "begin",
        "pretrain",
        "excited",
        "embed",
        "appraise",
        "explain",
    ):
        value, wanted = (
            tensor_spec(got),
            tensor_spec(honest["body"]),
        )  # of the others the program looks on: names are the client's to say
        if sent.operation in ("represent", "represent_all", "align"):
            value, wanted = value[1:], wanted[1:]  # the method refuses rows of another dtype
        assert (
            {**wanted, **(value or {})} if isinstance(wanted, dict) else value
        ) == wanted  # a part may be left out


@settings(max_examples=10_000 if MANY else 300, **calm)
@given(seed=seeds)
def test_only_requests_as_the_operation_declares_reach_a_client(doors, requests, seed):
    draw = random.Random(seed)
    host, honest, before = requests
    message = draw.choice(honest)
    content = (
        spoilt(message, draw)
        if draw.random() < 0.5
        else {**message, "body": spoilt(message["body"], draw)}
    )
    try:
        data = bytes(encode(content)) if draw.random() < 0.7 else scrambled(encode(message), draw)
    except MessageError:
        return
    reply = decode(host.answer("a", data, 2**20))
    assert isinstance(reply["number"], int) and ("failure" in reply) != ("body" in reply)
    if "failure" in reply:
        assert {
            name: tensor.tolist() for name, tensor in host.programs["a"].model.state_dict().items()
        } == before
    else:
        host.forget()
        host.handle("a", message_of("describe", 1))
    host.answered.clear()


def message_of(operation, number, **body):
    return {"operation": operation, "number": number, "round": 1, "turn": 0, "body": body}


@pytest.fixture(scope="module")
def requests(toys, tmp_path_factory):
    """A client of FedAvg in a host, some things it may be asked, and its parameters."""
    method, training = toys.method("fedavg"), toys.training()
    host = Host(
        toys.clients(1),
        lambda client: ClientRuntime(method.Program(client, method, training, 0)),
        Store(tmp_path_factory.mktemp("asked")),
    )
    host.handle("a", message_of("describe", 1))
    parameters = {
        name: tensor.clone() for name, tensor in host.programs["a"].model.state_dict().items()
    }
    honest = [
        message_of("receive", 2, parameters=parameters),
        message_of("shape", 3),
        message_of("begin", 4),
        message_of("evaluate", 5, common=False),
    ]
    return host, honest, {name: tensor.tolist() for name, tensor in parameters.items()}


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=20 if MANY else 2, **calm)
@given(seed=seeds)
def test_a_run_with_a_hostile_client_goes_on_without_it(toys, tmp_path_factory, name, seed):
    """It ends, or says who is missing; whoever was let in has learnt something finite."""
    method_toys, draw = (
        SimpleNamespace(**(vars(toys) | toys.toys_for(ALGORITHMS[name]))),
        random.Random(seed),
    )
    handle, counts, at = Host.handle, Counter(), draw.randrange(6)

    def spoils(self, client, message):
        reply = handle(self, client, message)
        counts[client] += 1
        if client == "b" and counts["b"] > at and "body" in reply:
            reply = {**reply, "body": spoilt(reply["body"], draw)}
        return reply

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Host, "handle", spoils)
        patch.setattr(Host, "_groups", lambda self, messages: [])
        try:
            results = method_toys.execute(
                tmp_path_factory.mktemp("run") / "run",
                method_toys.method(name),
                method_toys.clients(),
                rounds=2,
            )
        except QuorumError as short:
            assert "b" in str(short)
            return
    assert {failure["client"] for failure in results["failures"]} <= {"b"}, results["failures"]
    assert all(
        math.isfinite(entry["value"]) for id, entry in results["clients"].items() if id != "b"
    )


def test_clients_with_infinite_gains_do_not_end_the_run(toys, tmp_path, monkeypatch):
    """Each value is in range, but its ratio to the local baseline is not a number."""
    handle = Host.handle
    ends = {"b": 1e15, "c": -1e15}

    def claim(self, client, message):
        reply = handle(self, client, message)
        operation = message["operation"]
        if operation in ("evaluate", "appraise") and client in ends:
            value = ends[client] if operation == "appraise" else 5e-324  # alone
            reply["body"] = {**reply["body"], "accuracy": value}
        return reply

    monkeypatch.setattr(Host, "handle", claim)
    monkeypatch.setattr(Host, "_groups", lambda self, messages: [])
    results = toys.execute(
        tmp_path / "run", toys.method("fedavg"), toys.clients(3), rounds=2, alone=True
    )
    assert not results["failures"]
    assert {results["clients"][id]["value"] for id in ends} == set(ends.values())
    assert [results["clients"][id]["gain"] for id in ends] == [None, None]
    assert math.isfinite(results["delta"])


@pytest.mark.parametrize(
    "quota, says",
    [
        ({"message_bytes": 12_000}, "the limit of 12,000"),
        ({"round_bytes": 30_000}, "may send 30,000"),
    ],
)
def test_a_client_over_its_quota_is_named(toys, tmp_path, quota, says):
    """`c` is the largest."""
    names = lambda: [
        toys.client("a"),
        toys.client("b"),
        toys.client("c", model=lambda: torch.nn.Linear(6, 300)),
    ]
    results = toys.execute(
        tmp_path / "run",
        toys.method("fedavg"),
        names(),
        rounds=2,
        federation=FederationConfig(**quota),
    )
    assert {failure["client"] for failure in results["failures"]} == {"c"}
    assert says in results["failures"][-1]["reason"] and results["failures"][-1]["lasting"]
    assert results["clients"]["a"]["value"] is not None


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_run_without_remaining_clients_fails(toys, tmp_path, rounds):
    with pytest.raises(
        QuorumError, match=r"0 of 3 clients replied, the quorum is 1.*over the limit of 1,000"
    ):
        toys.execute(
            tmp_path / "run",
            toys.method("fedavg"),
            toys.clients(),
            rounds=rounds,
            federation=FederationConfig(message_bytes=1000),
        )


@pytest.mark.parametrize(
    "name, operation",
    [
        ("fedmuscle", "represent"),
        ("fedmuscle", "align"),
        ("fedavg", "update"),
        ("fedavg", "appraise"),
        ("creamfl", "update"),
    ],
)
def test_a_client_that_sends_nothing_where_privacy_allows_it_is_named(
    toys, tmp_path, name, operation, monkeypatch
):
    """With privacy a client may keep back what is not declared to leave, and nothing else."""
    method_toys, handle = (
        SimpleNamespace(**(vars(toys) | toys.toys_for(ALGORITHMS[name]))),
        Host.handle,
    )

    def silent(self, client, message):
        reply = handle(self, client, message)
        return (
            {**reply, "body": None}
            if client == "b" and message["operation"] == operation
            else reply
        )

    monkeypatch.setattr(Host, "handle", silent)
    monkeypatch.setattr(Host, "_groups", lambda self, messages: [])
    results = method_toys.execute(
        tmp_path / "run",
        method_toys.method(name),
        method_toys.clients(),
        rounds=1,
        privacy=Privacy(noise=0.5),
    )
    assert [(f["client"], f["operation"]) for f in results["failures"]] == [("b", operation)]
