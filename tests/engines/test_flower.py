"""In a real Flower federation, with TLS and keys, a run ends as it does locally."""

import contextlib
import json
import os
import shlex
import ssl
import stat
import time
from types import SimpleNamespace

import pytest
from organisations import run_steps
from storms import run_storm

from unalike.base.errors import UserError

pytest.importorskip("flwr", reason="the extra flower is not installed")
faults = pytest.mark.skipif(
    not os.environ.get("UNALIKE_FAULTS"), reason="takes minutes: make test-faults"
)


def flower(folder, *steps, seconds=1800):
    """An exchange takes seconds, on a busy machine a dozen."""
    return run_steps(folder, *steps, program="on_flower.py", seconds=seconds)


def test_an_operation_has_the_local_answer_and_the_client_is_stored(tmp_path):
    outcome = flower(tmp_path, "smallest")["smallest"]
    assert outcome["cards"] == ["a"] and not outcome["refused"]
    assert outcome["same"] and outcome["right_size"] and outcome["kept"]


@faults
def test_a_whole_run_ends_the_same_with_the_same_ledger(tmp_path):
    outcome = flower(tmp_path, "whole")["whole"]
    assert outcome["apart"] <= 1e-9 and outcome["same_ledger"]


@faults
@pytest.mark.parametrize("step", ["methods"])
def test_three_methods_end_like_local_runs(step, tmp_path):
    outcome = flower(tmp_path, step)[step]
    for name in ("fedavg", "afmcc", "fedmuscle"):
        assert outcome[name]["apart"] <= 1e-9 and outcome[name]["same_ledger"], name


@faults
def test_a_supernode_killed_and_started_again_changes_nothing(tmp_path):
    outcome = flower(tmp_path, "killed")["killed"]
    assert outcome["struck"] == 1 and outcome["apart"] <= 1e-9 and outcome["same_ledger"]
    assert outcome["seconds"] < 180, "60 s is the bar on a machine that has nothing else to do"


@faults
def test_thirty_kills_of_supernodes_their_processes_and_the_superlink_change_nothing(tmp_path):
    outcome = run_storm("flower", tmp_path, 30)
    assert sum(outcome["killed"].values()) >= 30 and outcome["same"]


@faults
def test_an_intruder_can_run_nothing_and_join_nothing_and_the_honest_run_ends(tmp_path):
    """She has the address, ca.pem and a key of her own; test_gate.py has faster tests of it."""
    outcome = flower(tmp_path, "intruder")["intruder"]
    assert outcome["run"] == outcome["register"] == "[code: 404] only SuperNodes are served here"
    assert outcome["statuses"] == [404] and outcome["without_key"] == 400
    assert outcome["joined"] is outcome["joined_as_a"] is False
    assert outcome["joined_with_key"] and not outcome["joined_with_old_key"]
    assert outcome["recorded"] > 1000 and not outcome["replay"]
    assert outcome["owned"] == [] and outcome["apart"] <= 1e-9 and outcome["same_ledger"]
    assert outcome["replies"] == "7 7" and outcome["at_clients"] == 0, (
        "sent from the server's machine, her app is not signed: code 7"
    )


def test_a_deployment_has_commands_keys_and_a_readme(tmp_path):
    from unalike.cross_silo.flower_deploy import commands, prepare

    prepare("digits", tmp_path / "made", "127.0.0.1:9092")
    known = commands(tmp_path / "made")
    assert list(known) == ["superlink", "ada", "ben", "cleo", "dora", "emil", "fay"]
    assert "--enable-supernode-auth" in known["superlink"] and not any(
        "--insecure" in command for command in known.values()
    )
    assert known["superlink"][known["superlink"].index("--host") + 1] == "127.0.0.1"
    trusted = str(tmp_path / "made" / "certificates" / "trusted.yaml")
    assert all(
        known[id][known[id].index("--trusted-entities") + 1] == trusted for id in list(known)[1:]
    )
    readme = (tmp_path / "made" / "README.md").read_text()
    assert all(shlex.join(command) in readme for command in known.values())
    assert stat.S_IMODE((tmp_path / "made" / "keys" / "ada").stat().st_mode) == 0o600
    assert (
        json.loads((tmp_path / "made" / "clients" / "ada" / "client.yaml").read_text())["client"]
        == "ada"
    )
    with pytest.raises(UserError, match="is not empty"):
        prepare("digits", tmp_path / "made", "127.0.0.1:9092")
    with pytest.raises(UserError, match="HOST:PORT"):
        prepare("digits", tmp_path / "other", "9092")


def shake_hands(certificates, ca, host):
    """A TLS handshake in memory: a client that has `ca` and the server of a deployment."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    client = ssl.create_default_context(cadata=ca)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(down, up, server_hostname=host),
        server.wrap_bio(up, down, server_side=True),
    ]
    for _ in range(4):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    return ends[0].getpeercert()


def private_keys(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path for path in files if b"PRIVATE KEY" in path.read_bytes()}


def test_a_servers_certificate_is_renewed_under_the_same_authority(tmp_path):
    """Clients keep ca.pem: the new certificate holds by it, for the same names."""
    from cryptography import x509

    from unalike.cross_silo import flower_deploy

    place = tmp_path / "made"
    flower_deploy.deploy(place, ["ada"], None, "fl.example.org:9092", keep_authority=True)
    certificates = place / "certificates"
    ca = (certificates / "ca.pem").read_text()
    old, old_key = ((certificates / name).read_bytes() for name in ("server.pem", "server.key"))
    before = set(place.rglob("*"))
    assert "by the ca.pem that clients have" in flower_deploy.renew(place)
    new = x509.load_pem_x509_certificate((certificates / "server.pem").read_bytes())
    new.verify_directly_issued_by(x509.load_pem_x509_certificate(ca.encode()))
    before_renewal = x509.load_pem_x509_certificate(old)
    assert new.serial_number != before_renewal.serial_number
    assert (certificates / "server.key").read_bytes() != old_key
    names = [
        c.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        for c in (new, before_renewal)
    ]
    assert names[0] == names[1] and (certificates / "ca.pem").read_text() == ca
    assert shake_hands(certificates, ca, "fl.example.org")["serialNumber"]
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(certificates, ca, "other.example.org")
    assert set(place.rglob("*")) == before, "nothing is left lying about"
    keys = private_keys(place)
    assert {path.name for path in keys} == {"ca.key", "server.key", "ada"}
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in keys)


def test_what_cannot_be_renewed_is_said(tmp_path):
    from unalike.cross_silo import flower_deploy

    with pytest.raises(UserError, match="is no deployment"):
        flower_deploy.renew(tmp_path)
    flower_deploy.deploy(tmp_path / "run", [], None, "127.0.0.1:9092")
    assert not (tmp_path / "run" / "certificates" / "ca.key").exists(), "it ends with its run"
    with pytest.raises(UserError, match="without the authority's key"):
        flower_deploy.renew(tmp_path / "run")
    flower_deploy.deploy(tmp_path / "other", [], None, "127.0.0.1:9092", keep_authority=True)
    other = tmp_path / "other" / "certificates" / "ca.key"
    other.rename(tmp_path / "run" / "certificates" / "ca.key")
    with pytest.raises(UserError, match="is not the key of"):
        flower_deploy.renew(tmp_path / "run")


def test_fedmuscle_exchanges_by_epoch_unless_sync_is_set():
    from unalike.scenarios import load

    assert (
        load("digits", engine="flower")[1].sync == "epoch"
        and load("digits", engine="flare")[1].sync == "batch"
    )
    assert load("digits", settings=["algorithm.sync=batch"], engine="flower")[1].sync == "batch"


class Grid:
    """A fake Grid: holds what was pushed until `reply` is called.

    Each SuperNode has the key of its name, or another one in `keys`.
    """

    def __init__(self, names):
        self.names, self.pushed, self.replies, self.came, self.keys = (
            names,
            {},
            [],
            dict.fromkeys(names, "then"),
            {},
        )

    def get_nodes(self):
        return [
            SimpleNamespace(
                node_id=node,
                name=name,
                last_activated_at=self.came[node],
                public_key=self.keys.get(node, key(name)),
            )
            for node, name in self.names.items()
        ]

    def push_messages(self, messages):
        numbers = [f"m{len(self.pushed) + i}" for i, _ in enumerate(messages)]
        self.pushed |= dict(zip(numbers, messages, strict=True))
        return numbers

    def pull_messages(self, numbers):
        pulled = [r for r in self.replies if r.metadata.reply_to_message_id in numbers]
        self.replies = [r for r in self.replies if r not in pulled]
        for r in pulled:
            if isinstance(r.content, Exception):
                raise r.content
        return pulled

    def reply(self, number, data=None, error="it died", content=None):
        content = {"reply": {"data": data}} if content is None else content
        failed = content == {"reply": {"data": None}}
        self.replies.append(
            SimpleNamespace(
                metadata=SimpleNamespace(reply_to_message_id=number),
                has_error=lambda: failed,
                content=content,
                error=SimpleNamespace(reason=error),
            )
        )


def key(name):
    return f"the key of {name}".encode()


@pytest.fixture
def open_transport(monkeypatch, tmp_path):
    """Opens a transport to SuperNodes, {id: name}; keys of ada, ben and eve are in the folder."""
    from unalike.cross_silo import flower

    def begin(names, least=None, **keys):
        monkeypatch.setattr(
            flower,
            "public_keys",
            lambda folder: {name: key(name) for name in ("ada", "ben", "eve")},
        )
        grid = Grid(names)
        grid.keys |= {int(node.removeprefix("node")): own for node, own in keys.items()}
        return grid, flower.FlowerTransport(grid, least or len(names), tmp_path / "keys")

    return begin


def until(true, seconds=10.0):
    start = time.monotonic()
    while not true():
        assert time.monotonic() - start < seconds
        time.sleep(0.02)


def test_a_supernode_is_the_client_its_key_was_registered_for(open_transport):
    _, transport = open_transport(
        {1: "ada", 2: "", 3: "ben", 4: "mallory", 5: "ada"},
        least=2,
        node5=b"another, registered later under her name",
    )
    assert transport.names() == ["1", "3"]
    with pytest.raises(ValueError, match='SuperNode of ada says it is "ben"'):
        transport.admit("1", "ben")
    transport.admit("3", "ben")
    with pytest.raises(ValueError, match='two SuperNodes say they are "ben"'):
        transport.admit("3", "ben")
    transport.close()


def test_a_malformed_reply_fails_only_the_client_that_sent_it(open_transport, monkeypatch):
    from unalike.cross_silo import flower

    monkeypatch.setattr(
        flower,
        "Message",
        lambda content, node, kind, ttl: SimpleNamespace(content=content, node=node),
    )
    grid, transport = open_transport({1: "ada", 2: "ben", 3: "eve"})
    for node, name in grid.names.items():
        transport.admit(str(node), name)
    answers = {
        name: transport.request(name, "call", b"x", "r", "clients", 60.0) for name in ("ada", "ben")
    }
    until(lambda: len(grid.pushed) == 2)
    grid.reply("m0", content={"something": {"else": 1}})
    grid.reply("m1", b"y")
    assert (
        'no record "reply"' in str(answers["ada"].exception(10))
        and answers["ben"].result(10) == b"y"
    )
    for i, content in enumerate(({"reply": {}}, {"reply": {"data": "no bytes"}}, {"reply": 3}), 2):
        failed = transport.request("ada", "call", b"x", "r", "clients", 60.0)
        until(lambda i=i: f"m{i}" in grid.pushed)
        grid.reply(f"m{i}", content=content)
        assert 'no record "reply"' in str(failed.exception(10))
    unreadable = transport.request("ada", "call", b"x", "r", "clients", 60.0)
    for number in ("m5", "m6", "m7"):
        until(lambda number=number: number in grid.pushed)
        grid.reply(number, content=ValueError("no message at all"))
    assert "its reply cannot be read: no message at all" in str(unreadable.exception(10))
    transport.check()
    transport.close()


def test_a_superlink_that_is_gone_is_reported(open_transport, monkeypatch):
    from unalike.cross_silo import flower
    from unalike.engines.process import EngineError

    monkeypatch.setattr(
        flower, "Message", lambda content, node, kind, ttl: SimpleNamespace(content=content)
    )
    grid, transport = open_transport({1: "ada"})
    transport.admit("1", "ada")
    answer = transport.request("ada", "call", b"x", "r", "clients", 60.0)
    until(lambda: "m0" in grid.pushed)
    gone = ConnectionError("nobody there")
    monkeypatch.setattr(grid, "get_nodes", lambda: (_ for _ in ()).throw(gone))
    grid.reply("m0", content=gone)
    until(lambda: transport.broken is not None)
    with pytest.raises(EngineError, match="cannot be reached: nobody there"):
        transport.check()
    assert not answer.done()


def test_a_supernode_that_stays_offline_has_failed(open_transport, monkeypatch):
    from unalike.cross_silo import flower

    monkeypatch.setattr(
        flower, "Message", lambda content, node, kind, ttl: SimpleNamespace(content=content)
    )
    monkeypatch.setattr(flower, "REACH", 1.0)
    grid, transport = open_transport({1: "ada", 2: "ben"})
    for node, name in list(grid.names.items()):
        transport.admit(str(node), name)
    del grid.names[1]
    answers = [
        transport.request(name, "call", b"x", "r", "clients", 60.0) for name in ("ada", "ben")
    ]
    assert (
        "its SuperNode is not there any more" in str(answers[0].exception(15))
        and not answers[1].done()
    )
    transport.close()


def test_that_there_is_no_sign_of_a_supernode_is_said_before_flower_notices(
    open_transport, monkeypatch, tmp_path
):
    from unalike.cross_silo import flower

    monkeypatch.setattr(
        flower, "Message", lambda content, node, kind, ttl: SimpleNamespace(content=content)
    )
    monkeypatch.setattr(flower, "NODE_POLL", 0.1)
    seen = tmp_path / "seen" / "ada"  # the gate touches it at each request
    seen.parent.mkdir()
    seen.touch()
    grid, transport = open_transport({1: "ada", 2: "ben"})
    said = []
    transport.say = said.append
    for node, name in grid.names.items():
        transport.admit(str(node), name)
        transport.request(name, "call", b"x", "r", "clients", 60.0)
    until(lambda: len(grid.pushed) == 2)
    os.utime(seen, (1.0, time.time() - flower.QUIET - 1))
    until(lambda: said)
    assert said[0].startswith("no sign of ada for 8 s")
    seen.touch()
    until(lambda: len(said) == 2)
    assert said[1] == "ada is there again", "ben has no gate, and nothing is said of it"
    transport.close()


def test_a_supernode_that_works_for_long_is_not_taken_for_one_that_is_gone(
    open_transport, monkeypatch, tmp_path
):
    """While it works it asks for nothing; its connection stays open until it is killed."""
    from unalike.cross_silo import flower

    monkeypatch.setattr(
        flower, "Message", lambda content, node, kind, ttl: SimpleNamespace(content=content)
    )
    monkeypatch.setattr(flower, "NODE_POLL", 3600.0)
    seen, connected = tmp_path / "seen" / "ada", tmp_path / "connected" / "ada"
    for path in (seen, connected):
        path.parent.mkdir()
        path.touch()
    _, transport = open_transport({1: "ada"})
    said = []
    transport.say = said.append
    transport.admit("1", "ada")
    transport.request("1", "call", b"x", "r", "clients", 60.0)
    until(lambda: transport.in_flight)
    (request,) = transport.in_flight.values()
    request.sent_at = time.time() - 100
    for path, ago in ((seen, 90), (connected, 1)):  # it took the request and has worked since
        os.utime(path, (1.0, time.time() - ago))
    transport._look_for_silence()
    assert not said
    os.utime(connected, (1.0, time.time() - 8))
    transport._look_for_silence()
    assert len(said) == 1 and said[0].startswith("no sign of ada for 8 s")
    request.sent_at = time.time() - 20  # one that never took its request, connected or not
    connected.touch()
    transport.quiet.clear()
    transport._look_for_silence()
    assert len(said) == 2 and said[1].startswith("no sign of ada for 90 s")
    transport.close()


def test_a_supernode_that_comes_back_gets_the_request_again(open_transport, monkeypatch):
    from unalike.cross_silo import flower

    monkeypatch.setattr(
        flower, "Message", lambda content, node, kind, ttl: SimpleNamespace(content=content)
    )
    grid, transport = open_transport({1: "ada"})
    transport.admit("1", "ada")
    answer = transport.request("ada", "call", b"x", "r", "clients", 60.0)
    until(lambda: "m0" in grid.pushed)
    del grid.names[1]
    grid.reply("m0", error="Node Unavailable")
    until(lambda: transport.unsent)
    grid.names[1] = "ada"
    until(lambda: "m1" in grid.pushed)
    grid.reply("m1", b"y")
    assert answer.result(10) == b"y"
    transport.close()


def test_a_supernode_with_a_new_key_replaces_the_one_that_died(open_transport, monkeypatch):
    """The SuperLink still takes the dead one for online; its key is no longer in the folder."""
    from unalike.cross_silo import flower

    to = []
    monkeypatch.setattr(
        flower,
        "Message",
        lambda content, node, kind, ttl: to.append(node) or SimpleNamespace(content=content),
    )
    grid, transport = open_transport({1: "ada", 2: "ben"})
    transport.admit("1", "ada")
    answer = transport.request("ada", "call", b"x", "r", "clients", 60.0)
    until(lambda: "m0" in grid.pushed)
    grid.keys[1] = b"the key that ada had before"
    grid.came |= {3: "until", 4: "until"}
    grid.names |= {3: "ada", 4: "eve"}
    until(lambda: "m1" in grid.pushed)
    grid.reply("m1", b"y")
    assert answer.result(10) == b"y" and to == [1, 3]
    transport.close()
    assert sorted(flower.FlowerTransport(grid, 3, None).names()) == ["2", "3", "4"], (
        "a server that is started again knows the new one only"
    )


def test_each_start_of_a_supernode_makes_a_new_key(tmp_path, monkeypatch):
    from unalike.cross_silo import flower
    from unalike.cross_silo import flower_deploy as deploy

    deploy.deploy(tmp_path / "made", ["ada"], tmp_path / "none.yaml", "127.0.0.1:9092")
    registered = []
    monkeypatch.setattr(
        flower,
        "run_flwr",
        lambda place, *command: registered.append((place / "keys" / "ada.pub").read_text()),
    )
    monkeypatch.setattr(
        flower.subprocess,
        "Popen",
        lambda *arguments, **named: SimpleNamespace(poll=lambda: dead.get("code")),
    )
    here, dead = flower.LocalFlowerFederation(tmp_path / "made", ["ada"]), {}
    here.start()
    here.start()
    dead["code"] = 1
    here.start()
    assert len(set(registered)) == len(registered) == 2


def test_requests_lost_with_a_process_or_a_supernode_are_sent_again(open_transport, monkeypatch):
    from unalike.cross_silo import flower

    monkeypatch.setattr(
        flower, "Message", lambda content, node, kind, ttl: SimpleNamespace(content=content)
    )  # needs a run
    grid, transport = open_transport({1: "ada"})
    transport.admit("1", "ada")
    answer = transport.request("ada", "call", b"x", "r", "clients", 60.0)
    until(lambda: "m0" in grid.pushed)
    grid.reply("m0")  # its process died
    until(lambda: "m1" in grid.pushed)
    grid.came[1] = "now"  # its SuperNode was started again
    until(lambda: "m2" in grid.pushed)
    grid.reply("m2", b"y")
    assert answer.result(10) == b"y" and {
        m.content["ask"]["data"] for m in grid.pushed.values()
    } == {b"x"}
    failed = transport.request("ada", "call", b"z", "r", "clients", 60.0)
    for number in ("m3", "m4", "m5"):
        until(lambda number=number: number in grid.pushed)
        grid.reply(number)
    assert "its process failed 3 times over this: it died" in str(failed.exception(10))
    transport.close()
