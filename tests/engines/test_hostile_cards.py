"""What a hostile client announces, or does at `begin` and `save`: it is refused by name, and the run goes on without it."""

import json
import math
import random

import conftest as toys
import organisations
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_hostile import MANY, RUBBISH, scrambled, spoilt
from test_remote_run import ABOUT, Direct, away

from unalike.base.message import MessageError, decode, encode
from unalike.core.admission import find_misfits, parse_info
from unalike.core.client import VERSION
from unalike.cross_silo.remote_run import find_culprit, serve
from unalike.engines.remote import handshake
from unalike.methods.averaging import Averaging
from unalike.tasks import TASKS

HONEST = toys.client("b").info().as_dict()
# Of the security review, and more: what is changed in the card of b.
CARDS = {
    "labels a number": {"labels": 5},
    "labels null": {"labels": None},
    "labels not words": {"labels": [1, 2]},
    "too many labels": {"labels": ["x"] * 100_001},
    "a long label": {"labels": ["x" * 201]},
    "metric a dict": {"metric": {"a": 1}},
    "metric a list": {"metric": ["a"]},
    "modalities a number": {"modalities": 3},
    "no modalities": {"modalities": []},
    "public rows a word": {"public_rows": "x"},
    "public rows negative": {"public_rows": -1},
    "public rows huge": {"public_rows": 10**400},
    "public rows without a public set": {"public": None},
    "task a list": {"task": ["a"]},
    "task with traits of another": {"traits": ["labelled", "paired"]},
    "traits unknown": {"task": "nonsense", "traits": ["root"]},
    "another public set": {"public": "f00"},
    "another length": {"public_rows": 23},
    "another version": {"version": VERSION + 1},
    "version a word": {"version": "3"},
    "a task that the method does not serve": {
        "task": "retrieval",
        "traits": list(TASKS["retrieval"].traits()),
    },
    "samples 0": {"samples": 0},
    "samples 10**15": {"samples": 10**15},
    "samples a float": {"samples": 20.0},
    "samples true": {"samples": True},
    "capacity 2": {"capacity": 2.0},
    "capacity NaN": {"capacity": math.nan},
    "speed 0": {"speed": 0.0},
    "speed infinite": {"speed": math.inf},
    "speed 10**400": {"speed": 10**400},
    "latency negative": {"latency": -1.0},
    "tested on nothing": {"tested_on": "moon"},
    "higher is better a word": {"higher_is_better": "yes"},
    "unit a number": {"unit": 3},
    "a long id": {"id": "b" * 300},
    "no id": {"id": ""},
    "another's id": {"id": "a"},
    "id a list": {"id": ["b"]},
    "a tensor": {"model": torch.zeros(3)},
    "one field more": {"root": True},
    "a long model": {"model": "m" * 10_000},
}


def with_card(transport, card):
    """The line, with another card of b."""
    transport.sites["b"].hello = lambda **arguments: {"version": VERSION, "card": card}
    return transport


@pytest.mark.parametrize("change", CARDS.values(), ids=CARDS)
def test_a_hostile_card_refuses_its_client_only(tmp_path, change):
    transport = with_card(Direct(tmp_path), HONEST | change)
    infos, refused = handshake(transport, ABOUT, 5.0)
    misfits = find_misfits(infos, Averaging())
    (name,) = {**refused, **misfits}
    assert name == "b" and {"a", "c"} <= set(infos)
    (reason,) = {**refused, **misfits}.values()
    assert len(reason) < 500 and "\n" not in reason


def test_an_honest_card_is_read_as_it_was_sent():
    info = toys.client("b").info()
    assert parse_info(decode(encode(info.as_dict()))) == info


@pytest.mark.parametrize("missing", HONEST)
def test_a_card_without_a_field_is_refused(missing):
    card = {name: value for name, value in HONEST.items() if name != missing}
    with pytest.raises(ValueError, match=r"its card holds .* and must hold"):
        parse_info(card)


def test_the_odd_public_set_is_named_wherever_its_holder_stands():
    infos = {id: toys.client(id).info() for id in "abcd"}
    odd = parse_info(toys.client("a").info().as_dict() | {"public": "f00"})
    assert list(find_misfits(infos | {"a": odd})) == ["a"]


@settings(
    max_examples=20_000 if MANY else 300,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
)
@given(seed=st.integers(0, 2**63))
def test_any_card_gives_a_usable_client_or_one_refusal(seed):
    draw = random.Random(seed)
    card = dict(HONEST)
    for _ in range(draw.randint(1, 3)):
        name = draw.choice(sorted(HONEST))
        card[name] = draw.choice([*RUBBISH, spoilt(card[name], draw), [draw.choice(RUBBISH)]])
    try:
        data = bytes(encode(card)) if draw.random() < 0.8 else scrambled(encode(HONEST), draw)
        info = parse_info(decode(data))
    except (MessageError, ValueError) as error:
        assert len(str(error)) < 500
        return
    json.dumps(info.as_dict(), allow_nan=False)
    assert 0 < info.samples <= 10**12 and 0 <= info.public_rows <= 10**12
    others = {id: toys_info for id, toys_info in INFOS.items() if id != info.id}
    assert set(find_misfits({**others, info.id: info}, Averaging())) <= {info.id}


INFOS = {id: toys.client(id).info() for id in "acde"}


@pytest.mark.parametrize("change", ["labels null", "metric a dict", "another public set"])
def test_a_run_with_a_hostile_card_goes_on_without_its_client(tmp_path, change):
    transport = with_card(Direct(tmp_path / "sites"), HONEST | CARDS[change])
    method = "feddf" if change == "another public set" else "fedavg"  # which needs no public set
    results = away(tmp_path / "away", transport, method, rounds=1)
    assert set(results["clients"]) == {"a", "c"}
    events = (tmp_path / "away" / "events.jsonl").read_text().splitlines()
    refused = [e for e in map(json.loads, events) if e["event"] == "refused"]
    assert [e["client"] for e in refused] == ["b"]


class Spoiling(Direct):
    """A line on which b answers one action with something else."""

    def __init__(self, folder, action, reply):
        super().__init__(folder)
        self.action, self.reply = action, reply

    def answered(self, site, client, do, *what):
        answer = super().answered(site, client, do, *what)
        return self.reply if (client, do) == ("b", self.action) else answer


REPLIES = {
    "rubbish": b"rubbish",
    "nothing": b"",
    "a failure": bytes(encode({"failure": "\x1b]0;owned\x07 no\nroom " + "x" * 5000})),
    "a failure that is no text": bytes(encode({"failure": [torch.zeros(3)]})),
    "a list": bytes(encode([1])),
    "a traceback": bytes(encode({"failure": "no", "traceback": "evil"})),
}


@pytest.mark.parametrize("action", ["begin", "save"])
@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES)
def test_a_client_that_cannot_begin_or_save_is_left_out(tmp_path, action, reply):
    results = away(tmp_path / "away", Spoiling(tmp_path / "sites", action, reply), "fedavg")
    assert {f["client"] for f in results["failures"]} <= {"b"}
    if action == "begin" or reply != b"":
        assert "b" in {f["client"] for f in results["failures"]}
    for failure in results["failures"]:
        assert failure["reason"].isprintable() and len(failure["reason"]) <= 500
    assert all(results["clients"][id]["value"] is not None for id in "ac")


def test_a_client_whose_disk_was_full_takes_part_again(tmp_path):
    class Full(Direct):
        def answered(self, site, client, do, *what):
            answer = super().answered(site, client, do, *what)
            if (client, do) == ("b", "save") and self.calls.count(("b", "save")) == 1:
                return bytes(encode({"failure": "no space left"}))
            return answer

    results = away(tmp_path / "away", Full(tmp_path / "sites"), "fedavg", rounds=4)
    assert [(f["client"], f["round"], f["lasting"]) for f in results["failures"]] == [
        ("b", 2, False)
    ]
    assert results["clients"]["b"]["value"] is not None


def test_a_run_that_all_clients_refuse_is_over(tmp_path):
    class Refusing(Direct):
        def answered(self, site, client, do, *what):
            return (
                bytes(encode({"failure": "no"}))
                if do == "begin"
                else super().answered(site, client, do, *what)
            )

    folder = organisations.prepared(tmp_path / "away", "fedavg")
    serve(folder.path, Refusing(tmp_path / "sites"), 30.0)
    assert folder.read_json("problem.json")["problem"] == "client a: no; client b: no; client c: no"


@pytest.mark.parametrize("where", ["drop_false_counts", "evaluate", "figures"])
def test_an_exception_at_one_clients_reply_drops_that_client(tmp_path, monkeypatch, where):
    """As if a check were missing: the server's program breaks whenever b is among the replies."""
    honest = getattr(Averaging, where)

    def breaks(self, fed, *arguments):
        for client in fed.clients:
            if client == "b" and fed.round == 2:
                {}["what b sent"]
        return honest(self, fed, *arguments)

    organisations.here(tmp_path / "here", "fedavg", rounds=3)
    monkeypatch.setattr(Averaging, where, breaks)
    results = away(tmp_path / "away", Direct(tmp_path / "sites"), "fedavg", rounds=3)
    (failure,) = results["failures"]
    assert failure["client"] == "b" and "what b sent" in failure["reason"]
    assert results["rounds"] == 3 and results["clients"]["a"]["value"] is not None


def test_a_bug_that_no_client_caused_is_raised(tmp_path, monkeypatch):
    monkeypatch.setattr(Averaging, "drop_false_counts", lambda self, fed, replies: {}["x"])
    organisations.prepared(tmp_path / "away", "fedavg")
    with pytest.raises(KeyError):
        serve(tmp_path / "away", Direct(tmp_path / "sites"), 30.0)


def test_the_culprit_is_in_the_innermost_function_that_knows_one_client():
    def inner(client):
        raise KeyError(client)

    def outer():
        for other in ("a", "b"):
            inner(other)

    try:
        outer()
    except KeyError as error:
        assert find_culprit(error, ["a", "b"]) == "a" and find_culprit(error, ["c"]) is None
