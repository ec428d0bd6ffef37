"""The server's view of its clients: who is called, what comes back, who is left out and why. The engine is a fake in memory."""

import copy
import heapq
import itertools
import math
from dataclasses import replace

import pytest
import torch

from unalike.algorithms import FedAvg
from unalike.base.errors import UserError
from unalike.base.message import copy_value, encoded_size
from unalike.core.client import VERSION, ClientInfo
from unalike.core.federation import Arrival, Failure, Federation, QuorumError
from unalike.core.participation import FederationConfig
from unalike.methods.averaging import mean_states
from unalike.training.loop import Training


class FakeEngine:
    """Answers at once by `answer(client, operation, body)`; a reply takes `takes(client)` seconds. A string "!why" is a failure."""

    def __init__(
        self,
        clients="abcd",
        answer=lambda client, operation, body: client,
        takes=lambda client: 1.0,
        **about,
    ):
        self.told = {
            c: ClientInfo(
                id=c, model="m", task="t", metric="accuracy", labels=("x",), samples=1, **about
            )
            for c in clients
        }
        self.answer, self.takes = answer, takes
        self.now, self.queue, self.count, self.log = 0.0, [], itertools.count(), []

    def infos(self):
        return self.told

    def send(self, messages):
        for client, message in messages.items():
            self.log.append((client, message))
            got = self.answer(client, message["operation"], message["body"])
            failed = isinstance(got, str) and got.startswith("!")
            reply = {
                "number": message["number"],
                **({"failure": got[1:]} if failed else {"body": got, "work": 0.0}),
            }
            heapq.heappush(
                self.queue,
                (
                    self.now + self.takes(client),
                    next(self.count),
                    client,
                    encoded_size(reply),
                    copy_value(reply),
                ),
            )
        return {client: encoded_size(message) for client, message in messages.items()}

    def drop(self, numbers): ...

    def rewind_clock(self, at):
        self.now = min(self.now, at)

    def receive(self, numbers=None, until=math.inf):
        wanted = [entry for entry in self.queue if numbers is None or entry[4]["number"] in numbers]
        if not wanted:
            return []
        at = min(wanted)[0]
        now = sorted(entry for entry in wanted if entry[0] == at)
        self.queue = [entry for entry in self.queue if entry not in now]
        heapq.heapify(self.queue)
        self.now = max(self.now, at)
        return [Arrival(client, at, up, reply) for at, _, client, up, reply in now]

    def pending(self):
        return [
            {"at": at, "order": order, "client": c, "size": up, "reply": reply}
            for at, order, c, up, reply in sorted(self.queue)
        ]

    def save(self, round): ...

    def load(self, round, now, pending):
        self.now, self.queue = (
            now,
            [(p["at"], p["order"], p["client"], p["size"], p["reply"]) for p in pending],
        )
        self.count = itertools.count(100)

    def close(self): ...

    @property
    def called(self):
        return [(client, message["operation"], message["body"]) for client, message in self.log]


def federation(engine=None, **federation):
    return Federation(engine or FakeEngine(), Training(rounds=50), FederationConfig(**federation))


# at the door


def test_a_client_of_another_version_is_refused():
    engine = FakeEngine()
    engine.told["c"] = replace(engine.told["c"], version=VERSION + 1)
    with pytest.raises(
        ValueError,
        match=f"client c speaks version {VERSION + 1} of the protocol, this server {VERSION}",
    ):
        federation(engine)


def test_public_sets_of_different_length_are_refused():
    engine = FakeEngine(public="f00", public_rows=80)
    assert federation(engine).public_rows == 80
    engine.told["d"] = replace(
        engine.told["d"], public=None, public_rows=0
    )  # who holds none may look on
    assert federation(engine).public_rows == 80
    engine.told["b"] = replace(engine.told["b"], public_rows=81)
    with pytest.raises(
        ValueError, match="client b holds a public set of 81 rows, most others of 80"
    ):
        federation(engine)


def test_public_batches_are_the_same_for_everyone_and_new_every_round():
    one, other = (federation(FakeEngine(public="f00", public_rows=50)).public(16) for _ in range(2))
    first = [rows.tolist() for rows in one.batches(1)]
    assert first == [rows.tolist() for rows in other.batches(1)] and first != [
        rows.tolist() for rows in one.batches(2)
    ]
    assert sorted(itertools.chain(*first)) == list(range(50)) and len(one) == len(first)
    with pytest.raises(ValueError, match="the public set has 0 rows, fewer than a batch of 16"):
        federation().public(16)


class Clock(FakeEngine):
    """As on a real clock: who is not there at `until` is not waited for, and comes too late."""

    def __init__(self, *given, **about):
        super().__init__(*given, **about)
        self.dropped = set()

    def receive(self, numbers=None, until=math.inf):
        if (next_ := [entry[0] for entry in self.queue if entry[4]["number"] in numbers]) and min(
            next_
        ) <= until:
            return super().receive(numbers)
        self.now = max(self.now, min(until, 1e9))
        return []

    def drop(self, numbers):
        self.dropped |= numbers

    def rewind_clock(self, at): ...


def test_a_real_clock_ends_a_call_at_the_deadline():
    fed = federation(Clock(takes=lambda client: 9.0 if client == "c" else 1.0), deadline=3.0)
    replies = fed.call("train")
    assert list(replies) == ["a", "b", "d"] and not fed.in_flight
    assert (
        str(replies.failures["c"]) == "c failed in train, round 0: late: the deadline is 3 s"
        and not replies.failures["c"].lasting
    )
    assert fed.clock == 3.0 and list(fed.call("train", clients=["a"])) == ["a"]


def test_what_comes_after_a_real_deadline_was_sent_and_counts():
    fed = federation(Clock(takes=lambda client: 9.0 if client == "c" else 1.0), deadline=3.0)
    fed.count_releases = lambda operation, reply: 1
    fed.call("train")
    before = fed.ledger.total("up")
    assert fed.released == {"a": 1, "b": 1, "c": 0, "d": 1}
    assert fed.checkpoint()["pending"] == [] and fed.engine.dropped == {3}
    assert fed.released["c"] == 1 and 4 * before == 3 * fed.ledger.total("up")
    fed.engine.queue.clear()
    assert fed.checkpoint()["pending"] == [] and fed.released["c"] == 1


def test_a_lost_message_is_no_endless_wait():
    fed = federation(Clock("ab"))
    fed.engine.send = lambda messages: {client: 256 for client in messages}
    assert "lost" in fed.call("train", quorum=0).failures["a"].reason
    with pytest.raises(RuntimeError, match="the engine lost what a, b were asked"):
        list(fed.run_async(lambda client: ("visit", {}), lambda replies: {}))


@pytest.mark.parametrize(
    "spoil",
    [lambda reply: reply.pop("body"), lambda reply: reply.update(failure=["no", "sentence"])],
)
def test_a_reply_that_is_none_does_not_come_in(spoil):
    fed = federation()
    receive = fed.engine.receive

    def spoilt(*given):
        arrivals = receive(*given)
        for arrival in arrivals:
            if arrival.client == "b":
                spoil(arrival.reply)
        return arrivals

    fed.engine.receive = spoilt
    assert list(fed.call("train")) == ["a", "c", "d"] and "b" in fed.quarantined


def test_a_client_cannot_answer_for_another():
    fed = federation()
    receive = fed.engine.receive
    fed.engine.receive = lambda *given: [
        replace(a, client="a" if a.client == "b" else a.client) for a in receive(*given)
    ]
    assert list(fed.call("train")) == ["a", "c", "d"] and list(fed.quarantined) == ["b"]


# calling


def test_a_call_reaches_everyone_and_replies_keep_the_order_of_the_cards():
    takes = {"a": 3.0, "b": 1.0, "c": 2.0, "d": 1.0}.get
    fed = federation(FakeEngine(takes=takes))
    replies = fed.call("train", rate=0.5)
    assert list(replies.items()) == [(c, c) for c in "abcd"] and not replies.failures
    assert fed.engine.called == [(c, "train", {"rate": 0.5}) for c in "abcd"]
    assert fed.clock == 3.0


def test_what_differs_comes_before_what_is_the_same():
    fed = federation()
    fed.call("align", per_client={"c": {"x": 1}, "a": {"x": 2, "y": 5}}, y=0)
    assert fed.engine.called == [("c", "align", {"y": 0, "x": 1}), ("a", "align", {"y": 5, "x": 2})]


def test_some_are_asked_something_else_in_the_same_call():
    """Of one quorum: that the only one asked so fails is no reason to end."""
    fed = federation(FakeEngine(answer=lambda c, o, b: "!no" if o == "listen" else c))
    replies = fed.call("align", per_client_operation={"b": "listen"}, rate=0.5)
    assert fed.engine.called == [
        (c, "listen" if c == "b" else "align", {"rate": 0.5}) for c in "abcd"
    ]
    assert list(replies) == ["a", "c", "d"] and replies.failures["b"].operation == "listen"


def test_named_clients_and_nobody_else():
    fed = federation()
    assert list(fed.call("train", clients=["d", "b"])) == ["b", "d"]
    fed.call("align", clients=["b"], per_client={"b": {"x": 1}, "c": {"x": 2}})
    assert fed.engine.called[2:] == [("b", "align", {"x": 1})]
    assert dict(fed.call("train", clients=[])) == {} == dict(fed.call("train", per_client={}))


def test_messages_are_numbered_once_each():
    fed = federation()
    fed.start_round(3)
    fed.call("train")
    fed.call("align", clients=["b"])
    assert [m["number"] for _, m in fed.engine.log] == [1, 2, 3, 4, 5]
    assert {m["round"] for _, m in fed.engine.log} == {3}


def test_every_message_is_in_the_ledger():
    fed = federation(
        FakeEngine("ab", answer=lambda c, o, b: torch.zeros(100 if c == "a" else 1000))
    )
    fed.start_round(2)
    fed.call("train", x=torch.zeros(64))
    down = sum(encoded_size(m) for _, m in fed.engine.log)
    assert fed.ledger.total("down") == fed.ledger.total("down", round=2) == down
    assert fed.ledger.total("up", client="b") - fed.ledger.total("up", client="a") == (
        4096 - 512
    )  # padded to 256 each


# failing


def test_a_client_that_failed_is_asked_again_in_later_rounds_so_often():
    """It is out after three failures in a row; a round without one begins the count anew."""
    fails = {1, 2, 4, 5, 6}
    fed = federation(FakeEngine(answer=lambda c, o, b: "!ill" if c == "b" and ill() else c))
    ill = lambda: fed.round in fails
    active = {}
    for number in range(1, 9):
        fed.start_round(number)
        active[number] = "b" in fed.active
        fed.call("train")
        assert "b" not in fed.active or number not in fails
        fed.finished = number
        if number == 5:  # what is known of failures is saved with the rest
            saved = copy.deepcopy(fed.checkpoint())
            fed.ill, fed.quarantined = {}, {}
            fed.restore(saved)
    assert active == {1: True, 2: True, 3: True, 4: True, 5: True, 6: True, 7: False, 8: False}
    assert list(fed.quarantined) == ["b"] and len(fed.failures) == 5


def test_a_client_whose_reply_is_malformed_is_not_asked_again():
    fed = federation(FakeEngine())
    fed.start_round(1)
    fed.refuse("b", "train", "it lies")
    fed.start_round(2)
    assert fed.active == ["a", "c", "d"]


def test_a_failure_is_named_and_lasts_without_retries():
    events = []
    engine = FakeEngine(answer=lambda c, o, b: "!its disk is full" if c == "b" else c)
    fed = federation(engine, retries=0)
    fed.log_event = lambda event, **facts: events.append((event, facts))
    fed.start_round(1)
    replies = fed.call("train")
    assert list(replies) == ["a", "c", "d"]
    assert (
        str(replies.failures["b"]) == "b failed in train, round 1: its disk is full"
        and replies.failures["b"].lasting
    )
    assert (
        "failure",
        {
            "round": 1,
            "client": "b",
            "operation": "train",
            "reason": "its disk is full",
            "lasting": True,
        },
    ) in events
    fed.start_round(2)
    assert fed.active == fed.clients == ["a", "c", "d"]
    fed.call("train")
    fed.call("train", clients=["a", "b"])
    fed.call("train", per_client={"b": {}, "c": {}})
    assert [c for c, *_ in fed.engine.called].count("b") == 1


@pytest.mark.parametrize(
    "bad, path",
    [
        (math.nan, "the reply"),
        ({"loss": math.inf}, "loss"),
        ({"z": [torch.tensor(math.nan)]}, "z.0"),
    ],
)
def test_a_reply_that_is_no_number_is_quarantined(bad, path):
    fed = federation(FakeEngine(answer=lambda c, o, b: bad if c == "c" else 1.0))
    fed.start_round(1)
    replies = fed.call("train")
    assert (
        list(replies) == ["a", "b", "d"]
        and replies.failures["c"].reason == f"its reply holds NaN or infinity ({path})"
    )
    assert "c" in fed.quarantined and [f.client for f in fed.failures] == ["c"]


def test_too_few_replies_end_the_run_with_names_and_reasons():
    fed = federation(FakeEngine(answer=lambda c, o, b: c if c == "a" else f"!{c} is ill"))
    fed.start_round(4)
    with pytest.raises(QuorumError) as caught:
        fed.call("train")
    assert (
        str(caught.value)
        == "train, round 4: 1 of 4 clients replied, the quorum is 2. b: b is ill; c: c is ill; d: d is ill"
    )


@pytest.mark.parametrize(
    "quorum, failing, holds",
    [
        (0.5, 2, True),
        (0.5, 3, False),
        (1.0, 0, True),
        (1.0, 1, False),
        (0.0, 4, True),
        (0.75, 1, True),
    ],
)
def test_the_quorum_is_a_share_of_those_called(quorum, failing, holds):
    answer = lambda c, o, b: "!no" if c in "abcd"[:failing] else c
    for share, asked in ((quorum, None), (1, quorum)):  # by the terms, or by the call
        fed = federation(FakeEngine(answer=answer), quorum=share)
        if holds:
            assert len(fed.call("train", quorum=asked)) == 4 - failing
        else:
            with pytest.raises(QuorumError):
                fed.call("train", quorum=asked)


def test_a_quorum_is_not_raised_by_rounding():
    """0.07 * 100 is a hair above 7 in floating point; 7 replies are enough."""
    names = [f"c{i}" for i in range(100)]
    fed = federation(
        FakeEngine(names, answer=lambda c, o, b: c if c in names[:7] else "!no"), quorum=0.07
    )
    assert len(fed.call("train")) == 7


def test_the_late_are_left_out_for_the_round_and_nobody_waits_for_them():
    fed = federation(FakeEngine(takes=lambda c: 9.0 if c == "b" else 1.0), deadline=2.5)
    fed.start_round(1)
    replies = fed.call("train")
    assert (
        list(replies) == ["a", "c", "d"]
        and replies.failures["b"].reason == "late: 9 s, the deadline is 2.5 s"
    )
    assert fed.clock == fed.engine.now == 2.5
    assert fed.active == ["a", "c", "d"] and fed.clients == list("abcd")
    fed.start_round(2)
    assert fed.active == list("abcd")
    fed.call("align")
    assert fed.clock == 5.0


def test_looking_on_takes_no_simulated_time_and_nobody_is_late_for_it():
    fed = federation(FakeEngine(takes=lambda c: 9.0), deadline=2.5)
    fed.start_round(1)
    assert (
        list(fed.call("evaluate", clients=fed.clients)) == list("abcd")
        and fed.clock == fed.engine.now == 0.0
    )


# who takes part


def test_participation_draws_the_right_share_and_the_same_again():
    names = [f"c{i}" for i in range(20)]
    drawn = []
    for _ in range(2):
        fed = federation(FakeEngine(names), participation=0.3)
        fed.training = Training(rounds=200)
        drawn.append([list(fed.active) for _ in fed.rounds()])
    assert drawn[0] == drawn[1] and all(len(here) == len(set(here)) == 6 for here in drawn[0])
    assert all(here == sorted(here, key=names.index) for here in drawn[0])
    counts = [sum(name in here for here in drawn[0]) for name in names]
    assert (
        min(counts) >= 35 and max(counts) <= 85
    )  # 200 * 0.3 = 60, four standard deviations either way
    fed.seed = 1
    fed.finished = 0
    assert [list(fed.active) for _ in fed.rounds()] != drawn[0]


def test_at_least_one_takes_part_and_only_they_are_called():
    fed = federation(participation=0.01)
    fed.start_round(1)
    assert len(fed.active) == 1
    assert list(fed.call("train")) == fed.active
    absent = next(c for c in "abcd" if c not in fed.active)
    assert dict(fed.call("align", per_client={absent: {}})) == {}
    assert list(fed.call("evaluate", clients=fed.clients)) == list("abcd")


def test_dropouts_are_drawn_by_name_last_a_round_and_come_near_their_share():
    names = [f"c{i}" for i in range(20)]
    gone = []
    for _ in range(2):
        fed = federation(FakeEngine(names), dropout=0.2, quorum=0)
        out = []
        for _ in fed.rounds():
            first = fed.call("train")
            assert all(f.reason == "dropped out" and not f.lasting for f in first.failures.values())
            assert (
                list(fed.call("align")) == list(first) == fed.active
            )  # those who are gone are not asked again
            out.append(sorted(first.failures))
        gone.append(out)
    assert gone[0] == gone[1] and not fed.quarantined
    assert 0.15 < sum(map(len, gone[0])) / 1000 < 0.25
    assert len(fed.call("evaluate", clients=fed.clients)) == 20


def test_dropouts_count_against_the_quorum():
    fed = federation(dropout=0.999999)
    fed.start_round(1)
    with pytest.raises(
        QuorumError, match=r"0 of 4 clients replied, the quorum is 2\. a, b, c, d: dropped out"
    ):
        fed.call("train")
    assert not fed.engine.log


def test_rounds_go_on_after_the_last_finished_one():
    fed = federation()
    fed.training = Training(rounds=5)
    fed.finished = 3
    assert list(fed.rounds()) == [4, 5]


@pytest.mark.parametrize(
    "wrong",
    [
        {"participation": 0},
        {"participation": 1.1},
        {"dropout": -0.1},
        {"dropout": 1},  # nobody would ever take part
        {"quorum": 2},
        {"deadline": 0},
        {"deadline": math.inf},
        {"quorums": 1},
        {"evaluations": 0},
    ],
)
def test_terms_that_cannot_be_are_refused(wrong):
    with pytest.raises(UserError):
        FederationConfig(**wrong)


# nobody waits


def driven(fed, asks=1, rest=True):
    """Visits of `asks` questions each; what came, as (instant, {client: (visit, question)})."""
    came = []

    def take(replies):
        came.append((fed.clock, {c: (fed.visits[c] + 1, n) for c, n in replies.items()}))
        return {c: ("work", {"n": n + 1}) for c, n in replies.items() if n < asks}

    return came, fed.run_async(lambda client: ("work", {"n": 1}), take, rest)


def finish(fed, drive):
    """Run a drive to its end, saying at each yield that it is finished."""
    for number in drive:
        fed.finished = number
    return fed.finished


def echo(client, operation, body):
    return body.get("n", operation)


def pace(rounds=2, engine=None, **federation):
    """a needs 1 s, b 2 s, c 2.5 s for each answer."""
    engine = engine or FakeEngine("abc", echo, {"a": 1.0, "b": 2.0, "c": 2.5}.get)
    return Federation(engine, Training(rounds=rounds), FederationConfig(**federation))


def test_replies_come_in_the_order_of_the_clock_and_together_where_they_coincide():
    fed = pace()
    came, drive = driven(fed)
    assert finish(fed, drive) == 2
    assert came == [
        (1.0, {"a": (1, 1)}),
        (2.0, {"a": (2, 1), "b": (1, 1)}),
        (2.5, {"c": (1, 1)}),
        (4.0, {"b": (2, 1)}),
        (5.0, {"c": (2, 1)}),
    ]
    assert fed.visits == {"a": 2, "b": 2, "c": 2}


def test_quick_clients_rest_or_go_on_until_the_slowest_is_done():
    fed = pace()
    finish(fed, driven(fed, rest=False)[1])
    assert (
        fed.visits == {"a": 5, "b": 3, "c": 2} and fed.clock == 6.0
    )  # what is under way when c is done is taken in


def test_a_visit_may_have_several_questions_and_carries_its_number():
    fed = pace()
    came, drive = driven(fed, asks=2)
    finish(fed, drive)
    assert came[:3] == [
        (1.0, {"a": (1, 1)}),
        (2.0, {"a": (1, 2), "b": (1, 1)}),
        (2.5, {"c": (1, 1)}),
    ]
    assert [(m["round"], m["turn"], m["body"]["n"]) for c, m in fed.engine.log if c == "a"] == [
        (1, 0, 1),
        (1, 1, 2),
        (2, 0, 1),
        (2, 1, 2),
    ]
    assert {r for r, *_ in fed.ledger.rows} == {1, 2}


def test_questions_of_different_kinds():
    fed = pace(rounds=1, engine=FakeEngine("ab", lambda c, o, b: o))
    finish(
        fed,
        fed.run_async(
            lambda c: ("weigh", {}),
            lambda replies: {c: ("train", {}) for c, o in replies.items() if o == "weigh"},
        ),
    )
    assert fed.engine.called == [
        ("a", "weigh", {}),
        ("b", "weigh", {}),
        ("a", "train", {}),
        ("b", "train", {}),
    ]
    assert {o for *_, o in fed.ledger.rows} == {"weigh", "train"}


@pytest.mark.parametrize("retries", [0, 2])
def test_a_failure_while_driving_leaves_the_others_alone(retries):
    fed = pace(
        rounds=3,
        engine=FakeEngine("abc", lambda c, o, b: "!gone" if c == "b" and fed.visits[c] == 1 else 1),
        retries=retries,
    )
    seen = []

    def take(replies):
        seen.append((sorted(replies), sorted(replies.failures)))
        return {}

    finish(fed, fed.run_async(lambda client: ("work", {}), take))
    last = (["a", "b", "c"], []) if retries else (["a", "c"], [])
    assert seen == [(["a", "b", "c"], []), (["a", "c"], ["b"]), last]
    assert list(fed.quarantined) == ([] if retries else ["b"]) and fed.finished == 3


def test_a_drive_ends_when_too_few_are_left():
    fed = pace(engine=FakeEngine("abc", lambda c, o, b: 1 if c == "a" else "!gone"))
    with pytest.raises(QuorumError, match=r"1 of 3 clients replied, the quorum is 2\. b, c: gone"):
        finish(fed, driven(fed)[1])


def test_who_drops_out_or_is_late_has_had_its_visit():
    fed = pace(rounds=20, dropout=0.4, deadline=2.2)
    came, drive = driven(fed)
    assert finish(fed, drive) == 20 and set(fed.visits.values()) == {20}
    assert not any("c" in replies for _, replies in came) and not fed.quarantined
    reasons = {(f.client, f.reason.split(":")[0]) for f in fed.failures}
    assert reasons == {
        ("a", "dropped out"),
        ("b", "dropped out"),
        ("c", "dropped out"),
        ("c", "late"),
    }
    assert len([f for f in fed.failures if f.client == "c"]) == 20


def test_a_drive_where_everyone_always_drops_out_ends():
    fed = pace(rounds=3, dropout=0.999999)
    came, drive = driven(fed)
    assert finish(fed, drive) == 3 and not came


def test_participation_is_how_many_are_visited_at_a_time():
    takes = {f"c{i}": 1.0 + i / 7 for i in range(10)}
    fed = pace(rounds=4, engine=FakeEngine(list(takes), echo, takes.get), participation=0.3)
    most = []

    def invite(client):
        most.append(len({sent.client for sent in fed.in_flight.values()} | {client}))
        return "work", {"n": 1}

    finish(fed, fed.run_async(invite, lambda replies: {}))
    assert max(most) <= 3 and set(fed.visits.values()) == {4}


def test_a_call_between_instants_takes_nobody_elses_reply():
    """Evaluating in the middle of an asynchronous run must leave the messages under way, and their times, as they are."""
    plain = pace(3)
    expected, drive = driven(plain)
    finish(plain, drive)
    fed = pace(3)
    came, drive = driven(fed)
    for number in drive:
        fed.finished = number
        assert dict(fed.call("evaluate", clients=fed.clients, quorum=1.0)) == {
            c: "evaluate" for c in "abc"
        }
    assert came == expected


@pytest.mark.parametrize(
    "federation", [{}, {"participation": 0.5}, {"dropout": 0.3}, {"deadline": 2.2}]
)
@pytest.mark.parametrize("rest", [True, False])
def test_a_drive_that_was_interrupted_goes_on_with_what_was_under_way(federation, rest):
    plain = pace(4, **federation)
    expected, drive = driven(plain, 2, rest)
    last = finish(plain, drive)
    for stop in range(1, last + 1):
        first = pace(4, **federation)
        came, drive = driven(first, 2, rest)
        for first.finished in drive:
            if first.finished >= stop:
                break
        second = pace(4, **federation)
        second.restore(copy_value(first.checkpoint()))
        second.ledger = first.ledger  # which the run keeps, in a file of its own
        again, drive = driven(second, 2, rest)
        finish(second, drive)
        assert came + again == expected
        assert (
            second.last_number == plain.last_number
            and second.ledger.rows == plain.ledger.rows
            and second.clock == plain.clock
        )
        assert second.visits == plain.visits and second.failures == plain.failures


# what is remembered


def test_memory_comes_back_whole():
    first = federation(FakeEngine(answer=lambda c, o, b: "!no" if c == "d" else c))
    first.start_round(1)
    first.call("train")
    first.state["w"] = torch.ones(3)
    first.finished = 1
    second = federation()
    second.restore(copy_value(first.checkpoint()))
    assert (
        second.finished == 1
        and second.clock == 1.0 == second.engine.now
        and second.last_number == 4
    )
    assert second.quarantined == {"d": Failure("d", "train", 1, "no")}
    assert torch.equal(second.state["w"], torch.ones(3)) and next(second.rounds()) == 2


def test_evaluations_are_spread_over_the_rounds():
    fed = federation(evaluations=10)
    fed.evaluator = lambda fed: fed.call("evaluate", clients=fed.clients)
    events = []
    fed.log_event = lambda event, **facts: (
        events.append(facts["round"]) if event == "evaluation" else None
    )
    for _ in fed.rounds():
        fed.evaluate()
    assert events == [1, *range(5, 51, 5)]
    fed.evaluator = None
    assert fed.evaluate() is None


# averaging


def test_the_mean_is_weighted_and_keeps_every_dtype():
    states = {
        "a": {
            "w": torch.tensor([1.0, 2.0]),
            "d": torch.tensor(1.0).double(),
            "n": torch.tensor(3),
            "h": torch.ones(2).half(),
        },
        "b": {
            "w": torch.tensor([5.0, 6.0]),
            "d": torch.tensor(2.0).double(),
            "n": torch.tensor(6),
            "h": torch.zeros(2).half(),
        },
    }
    mean = mean_states(states, {"a": 3.0, "b": 1.0, "absent": 9.0})
    assert (
        mean["w"].tolist() == [2.0, 3.0]
        and mean["d"].item() == 1.25
        and mean["n"].item() == 4
        and mean["h"].tolist() == [0.75, 0.75]
    )
    assert {name: t.dtype for name, t in mean.items()} == {
        name: t.dtype for name, t in states["a"].items()
    }
    assert states["a"]["w"].tolist() == [1.0, 2.0]


def test_the_mean_of_one_is_itself():
    state = {"w": torch.randn(50), "n": torch.tensor(7), "flag": torch.tensor([True, False])}
    for name, tensor in mean_states({"a": state}, {"a": 12.0}).items():
        assert torch.equal(tensor, state[name])


# bugs in a user's method


def test_a_bug_in_a_method_is_logged_with_its_traceback(toys, tmp_path):
    class Faulty(FedAvg):
        class Program(FedAvg.Program):
            def loss(self, x, y):
                return undefined_name  # noqa: F821

    events = []
    fed = toys.federation(tmp_path, Faulty(), toys.clients(2))
    fed.log_event = lambda event, **facts: events.append((event, facts))
    with pytest.raises(QuorumError, match=r"NameError.*test_federation.py, line \d+, in loss"):
        for _ in Faulty().serve(fed):
            pass
    bugs = [facts for event, facts in events if event == "failure"]
    assert {facts["client"] for facts in bugs} == {"a", "b"}
    assert all("return undefined_name" in facts["traceback"] for facts in bugs)
    assert all(facts["location"].endswith("in loss") for facts in bugs)


def test_a_recognised_mistake_is_logged_without_a_traceback(toys, tmp_path):
    clients = toys.clients(2)
    clients[1].train.x[3] = float("nan")
    events = []
    fed = toys.federation(tmp_path, FedAvg(), clients)
    fed.log_event = lambda event, **facts: events.append((event, facts))
    list(FedAvg().serve(fed))
    bugs = [facts for event, facts in events if event == "failure"]
    assert {facts["client"] for facts in bugs} == {"b"} and "traceback" not in bugs[0]
