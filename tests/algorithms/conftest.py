"""Fixtures of tests of FedMuscle and its parts."""

from functools import wraps

import pytest

from unalike.algorithms import FedMuscle


@pytest.fixture
def outcome(toys, tmp_path):
    """Everyone's parameters after some rounds of FedMuscle with these fields."""

    def run_fedmuscle(clients=None, rounds=2, training=None, federation=None, **fields):
        run_fedmuscle.number += 1
        algorithm = toys.method("fedmuscle", **fields)
        clients = clients or [
            toys.client("a"),
            toys.client("b", model=toys.noisy),
            toys.client("c"),
            toys.client("d"),
        ]
        run_fedmuscle.fed = toys.federation(
            tmp_path / str(run_fedmuscle.number),
            algorithm,
            clients,
            federation=federation,
            rounds=rounds,
            **(training or {}),
        )
        run_fedmuscle.noted = []
        run_fedmuscle.fed.log_event = lambda event, **facts: (
            run_fedmuscle.noted.append(facts) if event == "note" else None
        )
        return toys.serve(run_fedmuscle.fed, algorithm)

    run_fedmuscle.number = 0
    return run_fedmuscle


@pytest.fixture
def breaks(monkeypatch):
    """Makes an operation fail at one client in the second round."""

    def make(operation, client):
        usual = getattr(FedMuscle.Program, operation)

        @wraps(usual)
        def fails(self, **arguments):
            if self.client.id == client and self.round == 2:
                raise RuntimeError("gone")
            return usual(self, **arguments)

        monkeypatch.setattr(FedMuscle.Program, operation, fails)

    return make
