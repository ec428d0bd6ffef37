"""Runs over a transport end like local ones, whatever the transport does; here it is a call."""

import json
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor

import organisations
import pytest
import torch

from unalike.algorithms import ALGORITHMS
from unalike.base.message import decode, encode
from unalike.core.client import VERSION
from unalike.core.privacy import Privacy
from unalike.cross_silo.client_endpoint import ClientEndpoint
from unalike.cross_silo.remote_run import RemoteRun, follow, serve
from unalike.engines.process import EngineError
from unalike.engines.remote import RemoteEngine, handshake
from unalike.runs.audit import audit_client_file
from unalike.runs.export import trained
from unalike.runs.run_folder import Folder

toys = organisations.toys
ABOUT = {"name": "toy", "algorithm": "fedavg", "seed": 0}


class Direct:
    """A line without a wire. With `forgets`, every message finds a new site."""

    def __init__(self, folder, ids="abc", forgets=False, **options):
        self.files = {id: organisations.describe(folder / id, id, **options) for id in ids}
        self.sites = {id: ClientEndpoint(file, id) for id, file in self.files.items()}
        self.forgets, self.pool, self.calls, self.broken = forgets, ThreadPoolExecutor(1), [], None
        self.passed = Counter()  # bytes, by client, what was asked, where, and which way

    def names(self):
        return list(self.files)

    def admit(self, name, id):
        if name != id:
            raise ValueError(f"{name} is not {id}")

    def request(self, client, do, data, run, place, timeout, tensors=None):
        self.calls.append((client, do))
        self.passed[client, do, place, "down"] += len(data) + len(tensors or b"")
        site = (
            ClientEndpoint(self.files[client], client, resident=False)
            if self.forgets
            else self.sites[client]
        )
        return self.pool.submit(self.answered, site, client, do, data, run, place, tensors)

    def answered(self, site, client, do, data, run, place, tensors):
        reply = site.answer(do, data, run, place, tensors)
        self.passed[client, do, place, "up"] += len(reply)
        return reply

    def check(self):
        if self.broken:
            raise EngineError(self.broken)


class Breaking(Direct):
    """A line that breaks for good once something is over."""

    def request(self, *what):
        if not self.over():
            return super().request(*what)
        self.broken, lost = "the job is gone", Future()
        lost.set_exception(OSError("gone"))
        return lost


def away(folder, transport, name, **about):
    run = organisations.prepared(folder, name, **about)
    serve(folder, transport, 30.0)
    assert not (problem := run.read_json("problem.json")), problem
    return run.results


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_method_ends_the_same_with_the_same_ledger(name, tmp_path):
    organisations.here(tmp_path / "here", name)
    replay = {"replay": tmp_path / "here"} if ALGORITHMS[name].asynchronous else {}
    transport = Direct(tmp_path / "sites")
    away(tmp_path / "away", transport, name, **replay)
    outcome = organisations.same(
        tmp_path / "away", tmp_path / "here", [tmp_path / "sites" / id for id in "abc"]
    )
    assert outcome["apart"] <= 1e-9 and outcome["same_ledger"]


@pytest.mark.parametrize("name", ["fedavg", "fedmuscle"])
def test_clients_may_have_a_new_process_for_every_message(name, tmp_path):
    organisations.here(tmp_path / "here", name)
    away(tmp_path / "away", Direct(tmp_path / "sites", forgets=True), name)
    outcome = organisations.same(
        tmp_path / "away", tmp_path / "here", [tmp_path / "sites" / id for id in "abc"]
    )
    assert outcome["apart"] <= 1e-9 and outcome["same_ledger"]


def test_privacy_is_part_of_the_plan_that_clients_get(tmp_path):
    privacy = Privacy(noise=0.5)
    local = organisations.here(tmp_path / "here", "fedavg", privacy=privacy)
    results = away(tmp_path / "away", Direct(tmp_path / "sites"), "fedavg", privacy=privacy)
    assert results["privacy"] == local["privacy"] and results["privacy"]["releases"] == 2


@pytest.mark.parametrize("name", ["fedmuscle", "fedavg", "creamfl"])
@pytest.mark.parametrize("alone", [True, False])
def test_the_audit_of_a_client_file_is_exact_to_the_byte(name, alone, tmp_path):
    """Of three like clients the first, whose initial weights the others get."""
    transport = Direct(tmp_path / "sites", alike=True)
    about = {
        "name": "toy",
        "training": toys.training(rounds=2).model_dump(),
        "alone": alone,
        "algorithm": {
            "name": name,
            **{
                key: value
                for key, value in vars(toys.method(name)).items()
                if isinstance(value, int | float | str)
            },
        },
    }
    (tmp_path / "server.yaml").write_text(
        json.dumps({**about, "engine": {"name": "flare", "clients": 3}})
    )
    report = audit_client_file(transport.files["a"], str(tmp_path / "server.yaml"), None, None)[
        "clients"
    ]["a"]
    away(tmp_path / "away", transport, name, alone=alone)
    for way in ("up", "down"):
        assert report["bytes"][way] + report["bytes"]["measuring"][way] == sum(
            size
            for (client, do, _, going), size in transport.passed.items()
            if (client, do, going) == ("a", "call", way)
        )
    assert any(message.get("alone") for message in report["messages"]) == alone


@pytest.mark.parametrize(
    "privacy, says",
    [
        (None, True),
        ({"noise": 0.1, "entropy": "secret"}, True),
        ({"noise": 4}, True),
        ({"noise": 4, "entropy": "secret"}, False),
    ],
)
def test_a_client_itself_refuses_a_run_with_less_privacy_than_its_file_asks_for(
    privacy, says, tmp_path
):
    transport = Direct(tmp_path / "sites", alike=True, least=2.0)
    folder = organisations.prepared(
        tmp_path / "away", "fedavg", privacy=privacy and Privacy(**privacy), alone=True
    )
    serve(folder.path, transport, 30.0)
    problem = (folder.read_json("problem.json") or {"problem": ""})["problem"]
    assert (
        "client a: it takes part only with privacy: {noise: 2, entropy: secret}" in problem
    ) == says
    assert (folder.results is None) == says
    assert (
        bool(
            transport.passed["a", "call", "alone", "up"]
            + transport.passed["a", "call", "clients", "up"]
        )
        != says
    ), "nothing left it"


def test_a_run_that_broke_continues_from_its_checkpoint(tmp_path):
    organisations.here(tmp_path / "here", "fedmuscle", rounds=3)
    folder = organisations.prepared(tmp_path / "away", "fedmuscle", rounds=3)

    class Breaks(Breaking):
        def over(self):
            return self.calls.count(("a", "save")) == 1 and self.calls.count(("a", "call")) > 8

    tried = []

    def submit():
        tried.append(1)
        transport = (Breaks if len(tried) == 1 else Direct)(tmp_path / "sites")
        try:
            serve(folder.path, transport, 30.0)
        except EngineError as error:
            why = str(error)
            return lambda: why
        return lambda: "finished"

    results = follow(folder, lambda event, **facts: None, submit, every=0.0)
    assert len(tried) == 2 and results["rounds"] == 3
    outcome = organisations.same(
        tmp_path / "away", tmp_path / "here", [tmp_path / "sites" / id for id in "abc"]
    )
    assert outcome["apart"] <= 1e-9 and outcome["same_ledger"]


def test_a_run_that_never_finishes_a_round_is_given_up(tmp_path):
    folder = organisations.prepared(tmp_path / "away", "fedavg")

    def submit():
        folder.record("resume", round=1, rounds=2, algorithm="fedavg")
        return lambda: "FLARE says no"

    with pytest.raises(EngineError, match="ended 5 times without finishing a round: FLARE says no"):
        follow(folder, lambda event, **facts: None, submit, every=0.0)


def test_a_server_that_was_given_up_saves_nothing_any_more(tmp_path):
    folder = organisations.prepared(tmp_path / "away", "fedavg")
    folder.write_json("attempt.json", 1)
    old = RemoteRun(folder, Direct(tmp_path / "sites"), 30.0)
    folder.write_json("attempt.json", 2)
    with pytest.raises(EngineError, match="another server has taken this run over"):
        old.execute()
    assert folder.last_checkpoint() is None


def test_a_client_that_left_has_failed_and_a_late_one_takes_part_from_then_on(tmp_path):
    folder = organisations.prepared(tmp_path / "away", "fedavg", rounds=4)
    whole = Direct(tmp_path / "sites")

    class Two(Breaking):
        def over(self):
            return self.calls.count(("a", "save")) == 2 and self.calls[-1][1] != "save"

    with pytest.raises(EngineError):
        RemoteRun(folder, Two(tmp_path / "sites", ids="ab"), 30.0).execute()
    whole.files.pop("a")
    results = RemoteRun(folder, whole, 30.0).execute()
    assert results["rounds"] == 4 and set(results["clients"]) == {"b", "c"}
    assert [(f["client"], f["reason"]) for f in results["failures"]] == [
        ("a", "left the federation")
    ]
    events = [
        json.loads(transport)
        for transport in (folder.path / "events.jsonl").read_text().splitlines()
    ]
    assert [(e["client"], e["round"]) for e in events if e["event"] == "joined"] == [("c", 2)]


def test_another_version_is_refused_with_one_sentence(tmp_path):
    transport, other = Direct(tmp_path), VERSION + 1
    reply = decode(transport.sites["a"].answer("hello", encode({"version": other, "about": ABOUT})))
    assert reply == {
        "failure": f"this client speaks version {VERSION} of the protocol, the server {other}: "
        "install the same unalike"
    }
    transport.sites["a"].hello = lambda **arguments: {
        "version": other,
        "card": {"what": "a later version says"},
    }
    infos, refused = handshake(transport, ABOUT, 5.0)
    assert list(infos) == ["b", "c"]
    assert refused == {
        "a": f"it speaks version {other} of the protocol, this server {VERSION}: "
        "install the same unalike"
    }


def test_a_client_must_have_the_name_on_its_certificate(tmp_path):
    transport = Direct(tmp_path)
    transport.sites["a"] = ClientEndpoint(transport.files["b"], None)
    infos, refused = handshake(transport, ABOUT, 5.0)
    assert list(infos) == ["b", "c"] and refused == {"a": "a is not b"}
    answer = decode(
        ClientEndpoint(transport.files["b"], "a").answer(
            "hello", encode({"version": VERSION, "about": ABOUT})
        )
    )
    assert 'describes client "b", but this site is known as "a"' in answer["failure"]


@pytest.mark.parametrize(
    "do, place, says",
    [
        ("state", "clients", "can be asked hello, begin, save, finish and call"),
        ("call", "../x", "is asked in"),
        ("call", "clients", "knows nothing of the run"),
        ("save", "alone", "knows nothing"),
    ],
)
def test_an_endpoint_answers_known_actions_only(tmp_path, do, place, says):
    site = Direct(tmp_path).sites["a"]
    assert says in decode(site.answer(do, encode({"round": 1}), "../../etc", place))["failure"]
    assert "failure" in decode(site.answer(do, b"rubbish", "x", "clients"))


def test_a_misfit_is_reported_before_the_first_round(tmp_path):
    folder = organisations.prepared(
        tmp_path / "away", "fmcsc" if "fmcsc" in ALGORITHMS else "afmcc"
    )
    transport = Direct(tmp_path / "sites")
    for file in transport.files.values():
        file.write_text(file.read_text().replace("organisations:make", "organisations:classifies"))
    organisations.classifies = lambda run, id: organisations.toys.client(id)
    serve(folder.path, transport, 30.0)
    assert "wants classification" in folder.read_json("problem.json")["problem"]


def test_a_client_exports_its_model_from_its_own_folder(tmp_path):
    results = away(tmp_path / "away", Direct(tmp_path / "sites"), "fedavg")
    run = json.loads((tmp_path / "away" / "run.json").read_text())["run"]
    models = trained(tmp_path / "sites" / "a" / "unalike" / run, trust=True)
    from unalike.core.program import hash_model

    assert hash_model(models["a"]) == results["clients"]["a"]["hash"]


def test_large_tensors_that_go_to_several_clients_are_encoded_once(tmp_path):
    requests = []

    class Watched(Direct):
        def request(self, client, do, data, run, place, timeout, tensors=None):
            requests.append((do, len(data), tensors))
            return super().request(client, do, data, run, place, timeout, tensors)

    def wide(run, id):
        return toys.client(id, model=lambda: torch.nn.Linear(6, 3000))

    organisations.wide = wide
    transport = Watched(tmp_path / "sites")
    for file in transport.files.values():
        file.write_text(file.read_text().replace("organisations:make", "organisations:wide"))
    results = away(tmp_path / "away", transport, "fedavg", rounds=1)
    toys.execute(tmp_path / "here", toys.method("fedavg"), [wide({}, id) for id in "abc"], rounds=1)
    parts = [tensors for do, _, tensors in requests if tensors is not None]
    assert len(parts) == 3 * len(set(map(id, parts))) > 0 and all(
        len(tensors) > 100_000 for tensors in parts
    )
    assert all(size < 2000 for do, size, tensors in requests if do == "call")
    outcome = organisations.same(
        tmp_path / "away", tmp_path / "here", [tmp_path / "sites" / id for id in "abc"]
    )
    assert outcome["apart"] <= 1e-9 and outcome["same_ledger"] and not results["failures"]


def test_a_client_that_does_not_answer_has_failed(tmp_path):
    class Mute(Direct):
        def request(self, client, do, *what):
            if (client, do) == ("b", "call"):
                lost = Future()
                lost.set_exception(EngineError("did not answer within 30 s"))
                return lost
            return super().request(client, do, *what)

    results = away(tmp_path / "away", Mute(tmp_path / "sites"), "fedavg")
    assert [(f["client"], f["reason"], f["lasting"]) for f in results["failures"]] == [
        ("b", "did not answer within 30 s", False),
        ("b", "did not answer within 30 s", True),
    ]


def test_an_engine_without_messages_in_flight_delivers_nothing(tmp_path):
    transport = Direct(tmp_path)
    infos, _ = handshake(transport, ABOUT, 5.0)
    engine = RemoteEngine(transport, "r", "clients", infos, {}, timeout=5.0)
    assert engine.receive({7}) == [] and engine.pending() == [] and engine.infos() is infos


def test_a_prepared_folder_opens_as_a_run(tmp_path):
    assert (
        Folder.open(organisations.prepared(tmp_path / "away", "fedavg").path).config["name"]
        == "toy"
    )
