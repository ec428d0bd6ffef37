"""Fixtures of tests of FedMuscle and its parts."""

from functools import wraps

import pytest

from unalike.algorithms import FedMuscle


@pytest.fixture
def outcome(toys, tmp_path):
    """Everyone's parameters after some rounds of FedMuscle with these fields."""

    def made(clients=None, rounds=2, training=None, federation=None, **fields):
        made.number += 1
        algorithm = toys.method("fedmuscle", **fields)
        clients = clients or [
            toys.client("a"),
            toys.client("b", model=toys.noisy),
            toys.client("c"),
            toys.client("d"),
        ]
        made.fed = toys.federation(
            tmp_path / str(made.number),
            algorithm,
            clients,
            federation=federation,
            rounds=rounds,
            **(training or {}),
        )
        made.noted = []
        made.fed.log_event = lambda event, **facts: (
            made.noted.append(facts) if event == "note" else None
        )
        return toys.serve(made.fed, algorithm)

    made.number = 0
    return made


@pytest.fixture
def breaks(monkeypatch):
    """Makes an operation fail at one client in the second round."""

    def make(operation, client):
        usual = getattr(FedMuscle.Program, operation)

        @wraps(usual)
        def fails(self, **given):
            if self.client.id == client and self.round == 2:
                raise RuntimeError("gone")
            return usual(self, **given)

        monkeypatch.setattr(FedMuscle.Program, operation, fails)

    return make
