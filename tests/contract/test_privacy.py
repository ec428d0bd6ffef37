"""What every method that declares what it sends must keep with privacy; the others are refused. A new method is tested without a line."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from unalike import FederationConfig, Privacy
from unalike.algorithms import ALGORITHMS
from unalike.base.errors import UserError
from unalike.base.message import encode_header
from unalike.core.privacy import protects
from unalike.core.protection import Protection
from unalike.report import write

NOISY = Privacy(noise=0.01, bound=1.0)


class Stopped(BaseException):
    pass


@pytest.fixture
def toys(toys, name):
    """Clients whose task the method serves, and the method with fields under which nothing leaves unprotected."""
    made = ALGORITHMS[name]
    open_fields = {
        name: value
        for name, value in {"weights": "uniform", "masked": False}.items()
        if name in {field.name for field in dataclasses.fields(made)}
    }
    own = toys.toys_for(made) | {"private": lambda: toys.method(name, **open_fields)}
    return SimpleNamespace(**(vars(toys) | own))


@pytest.fixture
def declares(toys, name, tmp_path):
    """Skips a method that declares nothing, once it is seen to be refused."""
    if toys.private().privacy_problem() is not None:
        with pytest.raises(UserError, match=r"^1 problem in toy\n  privacy   "):
            toys.execute(tmp_path / "refused", toys.private(), toys.clients(), privacy=NOISY)
        pytest.skip("refused")


def test_runs_or_is_refused(name, toys, declares, tmp_path):
    results = toys.execute(
        tmp_path / "run", toys.private(), toys.clients(), rounds=2, privacy=NOISY
    )
    assert not results["failures"] and all(
        entry["value"] is not None for entry in results["clients"].values()
    )
    spent = {id: entry["privacy"] for id, entry in results["clients"].items()}
    assert all(
        each["releases"] >= 2 and each["epsilon"] > 0 and each["delta"] == 1e-5
        for each in spent.values()
    )
    assert results["privacy"] == max(spent.values(), key=lambda each: each["epsilon"])


def test_same_seed_same_bytes_in_process_equals_workers(name, toys, declares, tmp_path):
    runs = {
        where: toys.execute(
            tmp_path / where,
            toys.private(),
            toys.clients(),
            rounds=2,
            privacy=NOISY,
            workers=workers,
        )
        for where, workers in (("one", 0), ("again", 0), ("workers", 2))
    }
    assert toys.hashes(runs["one"]) == toys.hashes(runs["again"])
    assert toys.apart(toys.states(tmp_path / "one"), toys.states(tmp_path / "workers")) <= 1e-9
    assert (tmp_path / "one" / "ledger.csv").read_text() == (
        tmp_path / "workers" / "ledger.csv"
    ).read_text()
    assert runs["one"]["privacy"] == runs["workers"]["privacy"]


def test_with_secret_noise_nothing_is_measured(name, toys, declares, tmp_path):
    """All that passes is what the method declares: nobody is asked for more, and there are no values, but models to take home."""
    secret = Privacy(noise=0.01, entropy="secret")
    results = toys.execute(
        tmp_path / "run", toys.private(), toys.clients(), rounds=2, privacy=secret, alone=True
    )
    assert not results["failures"] and not results["metrics"] and results["privacy"]["epsilon"] > 0
    assert all(
        entry["value"] is None and entry["hash"] is None and entry["alone"] is None
        for entry in results["clients"].values()
    )
    asked = {
        line.split(",")[3] for line in (tmp_path / "run" / "ledger.csv").read_text().splitlines()
    }
    assert "describe" in asked and not asked & {"evaluate", "embed", "appraise", "explain"}
    write(tmp_path / "run")


def test_resumed_equals_undisturbed(name, toys, declares, tmp_path):
    federation = FederationConfig(participation=0.7, dropout=0.1, quorum=0)
    run = lambda folder, watch: toys.execute(
        tmp_path / folder,
        toys.private(),
        toys.clients(4),
        rounds=3,
        federation=federation,
        privacy=NOISY,
        watch=watch,
    )

    def stop(event, **facts):
        if event == "round" and facts["round"] == 2:
            raise Stopped

    whole = run("whole", lambda event, **facts: None)
    with pytest.raises(Stopped):
        run("cut", stop)
    assert run("cut", lambda event, **facts: None)["clients"] == whole["clients"]


def test_no_noise_and_a_bound_never_reached_is_no_privacy(name, toys, declares, tmp_path):
    free, empty = (
        toys.execute(
            tmp_path / folder,
            toys.private(),
            toys.clients(dtype=torch.float32),
            rounds=2,
            privacy=privacy,
        )
        for folder, privacy in (("free", None), ("empty", Privacy(noise=0, bound=1e9)))
    )
    real = lambda folder: {
        c: {name: t for name, t in state.items() if t.is_floating_point()}  # counters are not told
        for c, state in toys.states(tmp_path / folder).items()
    }
    assert toys.apart(real("free"), real("empty")) <= 1e-6
    assert empty["privacy"]["epsilon"] is None and "privacy" not in free


def test_noise_reaches_every_client(name, toys, declares, tmp_path):
    for folder, privacy in (("free", None), ("noisy", NOISY)):
        toys.execute(tmp_path / folder, toys.private(), toys.clients(), rounds=2, privacy=privacy)
    free, noisy = toys.states(tmp_path / "free"), toys.states(tmp_path / "noisy")
    assert all(toys.apart({c: free[c]}, {c: noisy[c]}) > 1e-6 for c in free)


# a client whose operation fails


@pytest.fixture
def compared(monkeypatch):
    """Operations of which the reply to a failure was compared with the honest one: the same but for the numbers that are protected."""
    protect, seen = Protection.protect, set()

    def compare(protection, name, turn, body, reply, blank=False):
        sent = protect(protection, name, turn, body, reply, blank)
        if blank or not protection.covers(name):
            return sent
        kinds = getattr(getattr(type(protection.program), name), "sends", {})
        if kinds and not protects(kinds):
            return sent  # made from no private data
        instead = protection.blank_reply(name, turn, body, RuntimeError("of its data"))
        (first, tensors, size), (first_instead, tensors_instead, size_instead) = (
            encode_header(sent),
            encode_header(instead),
        )
        assert first == first_instead and size == size_instead, name
        assert [(t.dtype, t.shape) for t in tensors] == [
            (t.dtype, t.shape) for t in tensors_instead
        ]
        assert all(t.isfinite().all() for t in tensors_instead)
        seen.add(name)
        return sent

    monkeypatch.setattr(Protection, "protect", compare)
    return seen


VARIANTS = {
    "fedmuscle": [{"exchange": "peers"}, {"exchange": "paper"}, {"sync": "epoch"}],
    "fedmuscleplus": [
        {"average_heads": "round"},
        {"distill_public": "all"},
        {"projection_init": "shared"},
        {"exchange": "peers"},
        {"exchange": "paper"},
        {"sync": "epoch"},
        {"average_heads": "epoch", "backbone_lr_scale": 0.5},
    ],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_failure_has_the_form_of_any_other_reply(name, toys, declares, tmp_path, compared, dtype):
    """In every exchange that the method has."""
    for i, fields in enumerate([{}, *VARIANTS.get(name, [])]):
        method = dataclasses.replace(toys.private(), **fields)
        results = toys.execute(
            tmp_path / str(i), method, toys.clients(dtype=dtype), rounds=2, privacy=NOISY
        )
        assert not results["failures"]
    exchanged = {
        each
        for each in dir(method.Program)
        if protects(getattr(getattr(method.Program, each), "sends", {}))
    }
    assert compared & exchanged
    if name in VARIANTS:
        assert exchanged <= compared, "every form was seen"
