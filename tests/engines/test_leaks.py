"""What leaves a client that fails: no data and no file names; with privacy not even the failure."""

import json
import re

import organisations
import pytest
import torch
from test_remote_run import ABOUT, Direct
from torch import nn

from unalike.base.message import decode, encode
from unalike.core.client import VERSION, Client
from unalike.core.privacy import Privacy
from unalike.core.runtime import ClientRuntime
from unalike.core.signatures import describe_leaves
from unalike.cross_silo import client_endpoint as sites
from unalike.cross_silo.client_endpoint import ClientEndpoint
from unalike.cross_silo.remote_run import serve
from unalike.engines.store import Store
from unalike.tasks import Classification

toys = organisations.toys
NAME = "Jane_Doe_1957-03-02.png"
SECRET = {"noise": 1000.0, "bound": 1.0, "delta": 1e-5, "entropy": "secret"}


def described_by(folder, function, **options):
    """A client.yaml whose factory is a function of a test."""
    folder.mkdir(parents=True, exist_ok=True)
    setattr(organisations, function.__name__, function)
    (folder / "client.yaml").write_text(
        json.dumps({"factory": f"organisations:{function.__name__}", "options": options})
    )
    return folder / "client.yaml"


def plan(privacy=None, **training):
    return {
        "algorithm": {"name": "fedavg"},
        "training": toys.training(**training).model_dump(),
        "seed": 0,
        "guarded": False,
        "privacy": privacy,
    }


class EndpointProbe:
    """Sends a client whatever requests a test likes; `sent_bytes` is everything it answered."""

    def __init__(self, file, name="a", **options):
        self.site, self.number, self.sent_bytes = ClientEndpoint(file, name, **options), 0, []

    def request(self, do, **what):
        reply = self.site.answer(do, encode(what), "run")
        self.sent_bytes.append(reply)
        return decode(reply)

    def hello(self):
        return self.request("hello", version=VERSION, about=ABOUT)

    def begin(self, **agreed):
        return self.request("begin", about=ABOUT, terms=plan(**agreed), round=0)

    def call(self, operation, **body):
        self.number += 1
        return self.request(
            "call", operation=operation, number=self.number, round=1, turn=self.number, body=body
        )


# noise cannot be got around


COUNTS = (30, 17, 6, 2, 0)


def counted(run, id, counts):
    """A client with so many samples of each class; its model sees nothing but a bias."""
    y = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    x = torch.zeros(len(y), 3)
    return Client(
        id=id,
        model=lambda: nn.Linear(3, 2),
        task=Classification(len(counts)),
        train=(x, y),
        test=(x, y),
    )


def losses_overflow(first, label, least):
    """Parameters whose loss overflows if there are at least so many samples of `label`."""
    sent = {name: torch.zeros_like(tensor) for name, tensor in first.items()}
    bias = sent[list(sent)[-1]]  # of the last layer
    bias[label] = -3.4e38 / (least - 0.5) if least > 1 else -3e38
    if least == 1:
        bias[[other for other in range(len(bias)) if other != label]] = 3e38
    return sent


def seen_by_server(folder, counts, most=31, **training):
    """By class and number of samples, what a server observes: the reply's form, or a failure."""
    probe = EndpointProbe(described_by(folder, counted, id="a", counts=list(counts)))
    assert (
        "card" in probe.hello()
        and probe.begin(
            privacy=SECRET, batch_size=64, optimizer="sgd", weight_decay=0.0, **training
        )
        == {}
    )
    first = probe.call("begin")["body"]
    observations = {}
    for label in range(len(counts)):
        for least in range(1, most):
            reply = probe.call("update", parameters=losses_overflow(first, label, least))
            observations[label, least] = (
                re.sub("incident [0-9a-f]+", "", reply["failure"])
                if "failure" in reply
                else describe_leaves(reply)
            )
            assert "failure" in reply or all(
                tensor.isfinite().all() for tensor in reply["body"]["parameters"].values()
            )
    return observations


def read_off(observations, counts):
    """The counts, if it is by them that a client answers in one way or in another."""
    readings = []
    for label in range(len(counts)):
        own = [
            observations[label, least]
            for least in sorted(least for of, least in observations if of == label)
        ]
        readings.append(
            next(
                (at for at, observation in enumerate(own) if observation != own[0]),
                0 if isinstance(own[0], list) else len(own),
            )
        )
    return readings


@pytest.mark.parametrize("bounded", [True, False])
def test_a_server_that_makes_losses_overflow_learns_no_counts_of_labels(
    tmp_path, monkeypatch, bounded
):
    """An attack that read each label's count exactly, from whether losses overflowed."""
    if not bounded:
        monkeypatch.setattr("unalike.core.protection.LARGEST", float("inf"), raising=False)
    observations = seen_by_server(tmp_path / "one", COUNTS, lr=1e-12)
    assert read_off(observations, COUNTS) != list(COUNTS)
    other = COUNTS[::-1]
    assert observations == seen_by_server(tmp_path / "other", other, lr=1e-12)
    forms = {str(observation) for observation in observations.values()}
    assert len(forms) == 1
    assert ("holds a number beyond 1e+06" in forms.pop()) == bounded, (
        "refused before they meet the data, or answered with noise"
    )


@pytest.mark.parametrize("rate", [1e-3, 1e30, 3e38])
def test_the_form_of_a_reply_does_not_depend_on_the_data_whatever_lr_the_server_sets(
    tmp_path, rate
):
    def form(counts):
        probe = EndpointProbe(
            described_by(tmp_path / str(counts[0]), counted, id="a", counts=list(counts))
        )
        probe.hello()
        probe.begin(privacy=SECRET, batch_size=64, optimizer="sgd", lr=rate, epochs=3)
        reply = probe.call("update", parameters=probe.call("begin")["body"])
        assert all(tensor.isfinite().all() for tensor in reply["body"]["parameters"].values())
        return describe_leaves(reply), len(probe.sent_bytes[-1]), reply["work"]

    assert form(COUNTS) == form((11, 11, 11, 11, 11))


# what fails stays at home


class Reading(nn.Module):
    """An encoder that fails, once it is `armed`, as one does that reads files."""

    armed: type[BaseException] | None = None

    def __init__(self):
        super().__init__()
        self.layer = toys.mlp()

    def forward(self, x):
        if Reading.armed is OSError:
            raise FileNotFoundError(2, "No such file or directory", f"/wards/{NAME}")
        if Reading.armed is not None:
            raise Reading.armed(f"the picture {NAME} has no pixels")
        return self.layer(x)


def reads(run, id):
    if run.get("name") == "refuse":
        raise ValueError(f"we do not send {NAME}")
    return toys.client(id, model=Reading)


@pytest.fixture(autouse=True)
def disarmed():
    yield
    Reading.armed = None


def full(*arguments):
    raise OSError(28, "No space left on device", f"/wards/{NAME}")


def stays_at_home(probe, reply, err):
    """What was sent has neither file name nor folder; log and stderr have it, under the number."""
    assert not any(
        NAME.encode() in reply_bytes or b"wards" in reply_bytes or b"Traceback" in reply_bytes
        for reply_bytes in probe.sent_bytes
    )
    assert not any(
        str(probe.site.file.parent).encode() in reply_bytes for reply_bytes in probe.sent_bytes
    )
    sentence = re.fullmatch(
        r"it failed; its own log says why, under incident ([0-9a-f]{12})", reply["failure"]
    )
    log = probe.site.folder / "incidents.log"
    for texts in (log.read_text(), err):
        assert (
            f"incident {sentence[1]}: client a failed" in texts
            and NAME in texts
            and "Traceback" in texts
        )
    assert log.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("error", [OSError, ValueError, KeyError, SystemExit])
@pytest.mark.parametrize("stage", ["hello", "begin", "call"])
def test_a_file_name_in_an_exception_stays_with_the_client(tmp_path, capsys, stage, error):
    probe = EndpointProbe(described_by(tmp_path / "clinic", reads, id="a"))
    if stage == "hello":
        reply = probe.request("hello", version=VERSION, about=ABOUT | {"name": "refuse"})
    else:
        probe.hello()
        Reading.armed = error if stage == "begin" else None
        reply = probe.begin()
        if stage == "call":
            first = probe.call("begin")["body"]
            Reading.armed = error
            reply = probe.call("update", parameters=first)
    stays_at_home(probe, reply, capsys.readouterr().err)


@pytest.mark.parametrize("resident", [True, False])
def test_a_full_disk_is_reported_without_its_path(tmp_path, capsys, monkeypatch, resident):
    """At a save, or after each message where every one may find a new process."""
    probe = EndpointProbe(described_by(tmp_path / "clinic", reads, id="a"), resident=resident)
    probe.hello()
    probe.begin()
    monkeypatch.setattr(Store, "snapshot" if resident else "write_current", full)
    reply = probe.call("receive", parameters=probe.call("begin")["body"])
    reply = probe.request("save", round=1) if resident else reply
    stays_at_home(probe, reply, capsys.readouterr().err)


def test_a_failed_announcement_is_reported_without_its_reason(tmp_path, capsys, monkeypatch):
    probe = EndpointProbe(described_by(tmp_path / "clinic", reads, id="a"))
    monkeypatch.setattr(Client, "info", lambda client: full())
    stays_at_home(probe, probe.hello(), capsys.readouterr().err)


def test_a_reply_that_cannot_be_encoded_is_reported_without_its_reason(tmp_path, capsys):
    probe = EndpointProbe(described_by(tmp_path / "clinic", reads, id="a"))
    probe.hello()
    probe.begin()
    host = probe.site.host("run", "clients")
    host.wake("a").program.shared = lambda: {f"${NAME}": 1}
    stays_at_home(probe, probe.call("begin"), capsys.readouterr().err)


@pytest.mark.parametrize("error", [OSError, ValueError, SystemExit])
def test_with_privacy_a_failure_is_only_in_the_log(tmp_path, capsys, error):
    probe = EndpointProbe(described_by(tmp_path / "clinic", reads, id="a"))
    probe.hello()
    probe.begin(privacy=SECRET)
    first = probe.call("begin")["body"]
    fine = probe.call("update", parameters=first)
    sent = len(probe.sent_bytes[-1])
    Reading.armed = error
    failed = probe.call("update", parameters=first)
    assert describe_leaves(failed) == describe_leaves(fine) and len(probe.sent_bytes[-1]) == sent
    assert probe.call("receive", parameters=first) == {
        "number": probe.number,
        "body": None,
        "work": 0.0,
    }
    log = (probe.site.folder / "incidents.log").read_text()
    assert NAME in log and "client a failed at update" in log and NAME in capsys.readouterr().err
    assert not any(NAME.encode() in reply_bytes for reply_bytes in probe.sent_bytes)


def test_no_file_of_the_server_has_anything_of_a_failure(tmp_path):
    """Its console's events, failures, results, checkpoints and report."""
    folder = organisations.prepared(tmp_path / "away", "fedavg")
    line = Direct(tmp_path / "sites")
    line.sites["b"] = ClientEndpoint(described_by(tmp_path / "sites" / "b", reads, id="b"), "b")
    answered = line.answered

    def arm(site, client, do, *arguments):
        Reading.armed = OSError if (client, do) == ("b", "call") else None
        return answered(site, client, do, *arguments)

    line.answered = arm
    serve(folder.path, line, 30.0)
    failures = folder.results["failures"]
    assert {failure["client"] for failure in failures} == {"b"}
    for failure in failures:
        assert failure["reason"].startswith("it failed; its own log says why, under incident ")
    texts = [path for path in folder.path.rglob("*") if path.is_file()]
    assert len(texts) > 4 and not any(NAME.encode() in path.read_bytes() for path in texts)
    assert (
        failure["reason"].split()[-1]
        in (tmp_path / "sites" / "b" / "unalike" / sites.LOG).read_text()
    )


def test_in_a_simulation_the_server_gets_the_reason(tmp_path):
    from unalike.engines.host import Host

    method, training = toys.method("fedavg"), toys.training()
    host = Host(
        [toys.client("a", model=Reading)],
        lambda client: ClientRuntime(method.Program(client, method, training, 0)),
        Store(tmp_path),
    )
    first = host.handle(
        "a", {"operation": "begin", "number": 1, "round": 1, "turn": 0, "body": {}}
    )["body"]
    Reading.armed = ValueError
    reply = host.handle(
        "a",
        {"operation": "update", "number": 2, "round": 1, "turn": 0, "body": {"parameters": first}},
    )
    assert reply["failure"] == f"the picture {NAME} has no pixels"
    assert "in forward" in host.incidents[-1].traceback and host.incidents[-1].operation == "update"


def test_a_factory_may_refuse_in_words_of_its_own(tmp_path):
    from unalike.base.errors import Refusal

    def client_problem(run, id):
        raise Refusal("we take part on weekdays")

    probe = EndpointProbe(described_by(tmp_path / "clinic", client_problem, id="a"))
    assert probe.hello() == {"failure": "we take part on weekdays"}


def test_a_failure_of_a_protected_operation_counts_as_a_release(tmp_path):
    """It may have come of the data, or of what was sent and never arrived."""
    privacy = Privacy(noise=1.0)
    folder = organisations.prepared(tmp_path / "away", "fedavg", privacy=privacy)

    class Losing(Direct):
        def answered(self, site, client, do, data, *arguments):
            reply = super().answered(site, client, do, data, *arguments)
            if (client, do) == ("b", "call") and decode(data)["operation"] == "update":
                raise TimeoutError("did not answer within 30 s")
            return reply

    serve(folder.path, Losing(tmp_path / "sites"), 30.0)
    spent = {id: folder.results["clients"][id]["privacy"]["releases"] for id in "abc"}
    assert spent == {"a": 2, "b": 2, "c": 2}  # b was asked again in round 2
