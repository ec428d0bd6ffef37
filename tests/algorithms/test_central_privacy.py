"""Central differential privacy: the mechanism by hand in float64, its epsilon, its refusals."""

import math

import pytest
import torch

import unalike
from unalike.algorithms import ALGORITHMS, FedAvg
from unalike.base.randomness import stream
from unalike.core.privacy import Privacy, epsilon
from unalike.methods.central_privacy import amplified_epsilon, noisy_mean
from unalike.report.table import _privacy_lines

CENTRAL = {"clip": 0.5, "noise": 2.0}


@pytest.mark.parametrize("mean", ["uniform", "samples"])
def test_a_round_is_the_formula_by_hand(mean, toys, tmp_path):
    """x + (sum_i w_i clip(x_i - x) + noise * clip * max_i w_i * N) / sum_i w_i."""
    sizes = {"a": 20, "b": 12, "c": 36}
    clients = [toys.client(id, rows=rows) for id, rows in sizes.items()]
    start = FedAvg.Program(clients[0], FedAvg(), toys.training(), 0).model.state_dict()
    trained = {}
    for client in clients:
        program = FedAvg.Program(client, FedAvg(), toys.training(), 0)
        program.round = 1
        reply = program.update({name: tensor.clone() for name, tensor in start.items()})
        trained[client.id] = {name: tensor.clone() for name, tensor in reply["parameters"].items()}
    method = FedAvg(mean=mean, central=CENTRAL)
    fed = toys.federation(tmp_path, method, clients, rounds=1)
    ends = toys.serve(fed, method)
    weights = sizes if mean == "samples" else dict.fromkeys(sizes, 1)
    generator = stream(0, "privacy", "central", fed.state["group"]["a"], 1)
    expected = {}
    for name, tensor in start.items():
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        total = 2.0 * 0.5 * max(weights.values()) * noise
        for id, state in trained.items():
            squares = sum(((state[other] - start[other]) ** 2).sum() for other in start)
            factor = min(1.0, 0.5 / math.sqrt(squares))
            assert factor < 1
            total = total + weights[id] * factor * (state[name] - tensor)
        expected[name] = tensor + total / sum(weights.values())
    assert toys.apart(ends, dict.fromkeys(sizes, expected)) <= 1e-9


def test_no_update_moves_the_sum_farther_than_the_clip():
    """Also one that is huge or not finite; a client that does not answer counts as no update."""
    model = {"w": torch.zeros(4, dtype=torch.float64), "count": torch.tensor(3)}
    privacy = Privacy(noise=1.0, bound=0.5)
    weights = {"a": 2.0, "b": 3.0}
    zeros = lambda shape: torch.zeros(shape, dtype=torch.float64)
    for value in (1e300, -1e300, math.nan, math.inf, 1e-3):
        sent = {"w": torch.full((4,), value, dtype=torch.float64), "count": torch.tensor(99)}
        merged = noisy_mean(model, {"a": sent}, weights, privacy, zeros)
        assert merged["w"].norm() <= 0.5 * 2 / 5 + 1e-12 and merged["count"] == 3
    assert not noisy_mean(model, {}, weights, privacy, zeros)["w"].any()


def test_epsilon_in_results_is_of_the_client_that_took_part_most(toys):
    result = unalike.run(
        FedAvg(central=CENTRAL), toys.clients(), training=toys.training(rounds=3), alone=False
    )
    spent = result["central_privacy"]
    assert spent == {
        "epsilon": epsilon(2.0, 3, 1e-5),
        "delta": 1e-5,
        "releases": 3,
        "sampling": "known",
    }
    (text,) = [text for name, text in _privacy_lines(result) if name == "central"]
    assert text.plain == "epsilon 8.39 at most, delta 1e-05, 3 releases"


def test_secret_sampling_costs_less_and_never_more():
    whole = epsilon(4.0, 100, 1e-5)
    tenth = amplified_epsilon(4.0, 100, 0.1, 1000, 1e-5)
    hundredth = amplified_epsilon(4.0, 100, 0.01, 1000, 1e-5)
    assert hundredth < tenth < whole
    assert amplified_epsilon(4.0, 100, 0.9, 10, 1e-5) <= whole
    assert amplified_epsilon(4.0, 0, 0.1, 10, 1e-5) == 0


@pytest.mark.parametrize(
    "method, fields, words",
    [
        ("scaffold", {}, "is for methods that only average"),
        ("fedavg", {"robust": "median"}, "needs robust: never"),
        ("fedavg", {"central": CENTRAL | {"sampling": "secret"}}, "needs mean: uniform"),
    ],
)
def test_central_noise_is_refused_where_it_would_not_hold(method, fields, words):
    problems = ALGORITHMS[method](**{"central": CENTRAL} | fields).check(3, 0)
    assert any(field == "central" and words in sentence for field, sentence in problems)
