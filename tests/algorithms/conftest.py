"""Fixtures of tests of single methods."""

from functools import wraps
from types import SimpleNamespace

import pytest
import torch

from unalike.algorithms import FedMusclePlus
from unalike.base.randomness import stream


@pytest.fixture
def outcome(toys, tmp_path):
    """Everyone's parameters after some rounds of FedMusclePlus with these fields, and no
    distillation but where they say so."""

    def run_fedmuscle(clients=None, rounds=2, training=None, federation=None, **fields):
        run_fedmuscle.number += 1
        algorithm = toys.method("fedmuscleplus", **({"distill_public": "never"} | fields))
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
        usual = getattr(FedMusclePlus.Program, operation)

        @wraps(usual)
        def fails(self, **arguments):
            if self.client.id == client and self.round == 2:
                raise RuntimeError("gone")
            return usual(self, **arguments)

        monkeypatch.setattr(FedMusclePlus.Program, operation, fails)

    return make


@pytest.fixture
def by_hand(toys):
    """Programs of clients, and local training written out: AdamW, batches of 8 in the order of the
    client's stream."""

    def program(method, client=None, **training):
        return method.Program(client or toys.client("a"), method, toys.training(**training), 0)

    def batch(program, rows=8):
        """Inputs and labels of the first rows."""
        x, y = program.training_batch(torch.arange(rows))
        return program.client.to_device(x), y

    def train(parameters, client, loss, round=1, epochs=(0,), optimizer=None):
        """Minimise `loss(x, y)` over the parameters."""
        parameters = list(parameters)
        optimizer = optimizer or torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.01)
        x, y = client.train.rows(torch.arange(len(client.train)))
        for epoch in epochs:
            order = torch.randperm(len(x), generator=stream(0, "order", client.id, round, epoch))
            for rows in order.split(8):
                optimizer.zero_grad()
                loss(x[rows].double(), y[rows]).backward()
                optimizer.step()

    def mean(states, counts):
        """Mean of states, weighted by numbers of samples."""
        return {
            name: sum(n * state[name] for n, state in zip(counts, states, strict=True))
            / sum(counts)
            for name in states[0]
        }

    def gradients(loss, parameters):
        """Gradients of a loss; zeros where it does not depend on a parameter."""
        parameters = list(parameters)
        found = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
        pairs = zip(parameters, found, strict=True)
        return [torch.zeros_like(p) if g is None else g for p, g in pairs]

    return SimpleNamespace(
        program=program, batch=batch, train=train, mean=mean, gradients=gradients
    )
