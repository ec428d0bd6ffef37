"""Worker processes that are not forked get their clients by pickle, and compute the same."""

from functools import partial

import pytest
import torch

from unalike import Classification, Client, FedAvg, Training, run
from unalike.base.errors import UserError
from unalike.engines.process import start_method
from unalike.models import build_encoder

MLP = partial(build_encoder, "mlp", (6,), {"hidden": [8], "width": 8})


def train(folder, workers, model=MLP):
    clients = []
    for i, id in enumerate("abc"):
        x = torch.randn(12, 6, generator=torch.Generator().manual_seed(i))
        y = torch.arange(12) % 3
        clients.append(Client(id, model, Classification(3), (x, y), (x, y)))
    training = Training(rounds=2, batch_size=6)
    return run(
        FedAvg(), clients, training=training, out=folder / "run", alone=False, workers=workers
    )


def test_two_spawned_workers_end_like_none(tmp_path, monkeypatch):
    expected = train(tmp_path / "none", 0)
    monkeypatch.setenv("UNALIKE_START_METHOD", "spawn")
    result = train(tmp_path / "two", 2)
    assert not result.failures
    for field in ("clients", "bytes", "clock", "metrics"):
        assert result[field] == expected[field]


def test_where_there_is_no_fork_processes_are_spawned(monkeypatch):
    monkeypatch.delenv("UNALIKE_START_METHOD", raising=False)
    assert start_method() == "fork"
    monkeypatch.setattr("multiprocessing.get_all_start_methods", lambda: ["spawn"])
    assert start_method() == "spawn"


def test_an_unknown_start_method_is_refused_with_those_there_are(monkeypatch):
    monkeypatch.setenv("UNALIKE_START_METHOD", "clone")
    with pytest.raises(UserError, match="must be one of fork, spawn, forkserver, got 'clone'"):
        start_method()


def test_clients_that_cannot_be_pickled_are_refused_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("UNALIKE_START_METHOD", "spawn")
    with pytest.raises(UserError, match=r"need clients that can be pickled .* workers=0"):
        train(tmp_path, 2, lambda: torch.nn.Linear(6, 8))
