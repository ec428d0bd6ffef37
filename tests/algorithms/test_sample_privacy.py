"""Differential privacy of single samples (DP-SGD): the step by hand, what it costs, what it refuses."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import unalike
from unalike.algorithms import ALGORITHMS, FedAvg, FedProx
from unalike.base.errors import Refusal, UserError
from unalike.core.privacy import Privacy
from unalike.methods.sample_privacy import (
    row_gradients,
    sample_epsilon,
    steps_per_round,
    sum_clipped_gradients,
)
from unalike.report.table import _privacy_lines

SAMPLE = {"clip": 0.5, "noise": 1.5}


def alike(toys):
    return [toys.client(id) for id in "ab"]


def program_of(toys, method, **fields):
    program = type(method).Program(toys.client("a", **fields), method, toys.training(), 0)
    program.round = 1
    program.round_start = {n: p.detach() + 0.1 for n, p in program.model.named_parameters()}
    return program


def gradient_by_hand(program, row, drift=0.0):
    """Gradient of the cross-entropy of one row, and of FedProx's term."""
    x, y = map(program.client.to_device, program.client.train.rows(torch.tensor([row])))
    parameters = dict(program.model.named_parameters())
    loss = cross_entropy(program.model(x), y)
    for name, p in parameters.items() if drift else ():
        loss = loss + drift / 2 * ((p - program.round_start[name]) ** 2).sum()
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


def flat(gradients):
    return torch.cat([g.flatten() for g in gradients.values()])


@pytest.mark.parametrize("method, drift", [(FedAvg(sample=SAMPLE), 0.0), (FedProx(mu=0.3), 0.3)])
def test_each_samples_gradient_is_clipped_by_itself(method, drift, toys):
    program = program_of(toys, method)
    rows = torch.tensor([3, 0, 11])
    by_hand = [gradient_by_hand(program, int(row), drift) for row in rows]
    norms = [float(flat(g).norm()) for g in by_hand]
    clip = sorted(norms)[1]  # one is shorter, one longer
    total = sum_clipped_gradients(program, rows, clip)
    expected = sum(flat(g) * min(1.0, clip / n) for g, n in zip(by_hand, norms, strict=True))
    assert torch.allclose(flat(total), expected, atol=1e-12)


def test_a_row_that_vmap_does_not_know_is_done_by_itself(toys):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = toys.mlp()

        def forward(self, x):
            assert float(x.sum()) < 1e9  # reads a value, which vmap refuses
            return self.layer(x)

    torch.manual_seed(0)
    program = program_of(toys, FedAvg(sample=SAMPLE), model=Own)
    trainable = dict(program.model.named_parameters())
    parts = list(row_gradients(program, trainable, torch.tensor([3, 0])))
    assert len(parts) == 2
    for part, row in zip(parts, (3, 0), strict=True):
        assert torch.allclose(flat(part), flat(gradient_by_hand(program, row)), atol=1e-12)


def test_a_round_is_the_formula_by_hand(toys):
    """SGD with lr 1: minus (sum of clipped gradients + noise * clip * N) / batch size."""
    client = toys.client("a", rows=6)
    training = toys.training(optimizer="sgd", lr=1.0, batch_size=3, weight_decay=0.0, epochs=1)
    method = FedAvg(sample=SAMPLE)
    program, twin = (FedAvg.Program(client, method, training, 0) for _ in range(2))
    program.round = twin.round = 1
    start = {name: t.clone() for name, t in program.model.state_dict().items()}
    reply = program.update(start)
    assert reply["loss"] == 0.0, "the loss would tell of the samples"
    draw = Privacy(noise=1.5, bound=0.5).draws(0, "a", "samples", 1)
    twin.model.load_state_dict(start)
    for _ in range(2):  # an epoch: 6 rows, 3 in the mean
        drawn = torch.special.ndtr(draw(torch.Size([6]))) < 0.5
        rows = [gradient_by_hand(twin, int(row)) for row in drawn.nonzero().flatten()]
        with torch.no_grad():
            for name, p in twin.model.named_parameters():
                clipped = [g[name] * min(1.0, 0.5 / float(flat(g).norm())) for g in rows]
                total = sum(clipped, torch.zeros_like(p)) + 1.5 * 0.5 * draw(p.shape)
                p -= total / 3
    assert toys.apart({"a": reply["parameters"]}, {"a": twin.model.state_dict()}) <= 1e-12


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_no_sample_moves_the_sum_farther_than_the_clip(toys, value):
    """Also one whose gradient is huge or not finite, of which the client says nothing."""
    x, y = toys.blobs(20, 0)
    x[5] = value
    program = program_of(toys, FedAvg(sample=SAMPLE), train=(torch.zeros_like(x), y))
    program.training_batch = lambda index: (x[index], y[index])
    total = flat(sum_clipped_gradients(program, torch.arange(20), 0.5))
    without = flat(sum_clipped_gradients(program, torch.tensor([*range(5), *range(6, 20)]), 0.5))
    assert total.isfinite().all() and (total - without).norm() <= 0.5 + 1e-9


def test_epsilon_is_at_least_the_exact_one_and_near_it():
    """Abadi et al.'s MNIST: 60 epochs of batches of 256 of 60,000, noise 1.1: at most 3."""
    import dp_accounting as dp
    from dp_accounting import pld

    rate, steps = 256 / 60000, 14062
    exact = pld.PLDAccountant(value_discretization_interval=1e-3)
    exact.compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(1.1)), steps)
    bound = sample_epsilon(1.1, rate, steps, 1e-5)
    assert exact.get_epsilon(1e-5) <= bound <= 3.0
    assert bound < 1.25 * exact.get_epsilon(1e-5)


def test_sampling_amplifies_and_a_whole_batch_does_not():
    """Without sampling 10 steps are a Gaussian mechanism with noise / sqrt(10), sensitivity 1."""
    from unalike.core.privacy import epsilon

    exact = epsilon(2 * 4.0, 10, 1e-5)
    assert exact <= sample_epsilon(4.0, 1.0, 10, 1e-5) <= 1.25 * exact
    assert sample_epsilon(4.0, 0.1, 10, 1e-5) < exact / 4


def test_results_say_what_it_cost_each_client(toys, tmp_path):
    clients = [toys.client("a", rows=20), toys.client("b", rows=12)]
    training = toys.training(rounds=2, batch_size=8)
    result = unalike.run(FedAvg(sample=SAMPLE), clients, training=training, out=tmp_path / "run")
    for id, rows in (("a", 20), ("b", 12)):
        steps = 2 * steps_per_round(rows, training)
        cost = sample_epsilon(1.5, 8 / rows, steps, 1e-5)
        assert result["clients"][id]["sample_privacy"] == {
            "epsilon": cost,
            "delta": 1e-5,
            "releases": steps,
        }
    worst = max(result["clients"][id]["sample_privacy"]["epsilon"] for id in "ab")
    assert result["sample_privacy"]["epsilon"] == worst
    (text,) = [text for name, text in _privacy_lines(result) if name == "samples"]
    assert text.plain.startswith("epsilon")
    assert '"train_loss"' not in (tmp_path / "run" / "events.jsonl").read_text()


def test_secret_draws_do_not_repeat_and_nobody_is_trained_alone(toys, tmp_path):
    hashes = set()
    for name in ("one", "two"):
        method = FedAvg(sample={**SAMPLE, "entropy": "secret"})
        result = unalike.run(
            method, alike(toys), training=toys.training(rounds=1), out=tmp_path / name
        )
        hashes.add(result["clients"]["a"]["hash"])
        assert result["clients"]["a"].get("alone") is None
    assert len(hashes) == 2


@pytest.mark.parametrize("name", ["fedper", "moon", "scaffold", "apfl"])
def test_methods_whose_clients_send_more_are_refused(name, toys):
    method = toys.method(name)
    method.sample = SAMPLE
    problems = [sentence for key, sentence in method.check(3, 0) if key == "sample"]
    only_averages = not problems
    assert only_averages == (name == "fedper")
    assert only_averages or "is for methods that only average" in problems[0]


def test_what_mixes_samples_is_refused(toys, tmp_path):
    method = FedAvg(sample=SAMPLE)
    mixed = toys.client("a", model=toys.noisy)
    assert "batch normalisation mixes samples" in method.client_problem(mixed)
    balanced = unalike.Classification(toys.classes, class_weights="balanced")
    assert "depend on all samples" in method.client_problem(toys.client("a", task=balanced))
    with pytest.raises(Refusal, match="batch normalisation"):
        program_of(toys, method, model=toys.noisy).update({})
    with pytest.raises(UserError, match="counted apart"):
        unalike.run(
            method, alike(toys), privacy=Privacy(noise=1.0), training=toys.training(rounds=1)
        )
    assert "would tell of the samples" in method.safeguard_problem()


def test_every_averaging_method_has_the_field_or_refuses_it(toys):
    """A method that is added and reads samples in an operation of its own is refused at once."""
    takes = []
    for name, method in ALGORITHMS.items():
        if not hasattr(method, "sample_problems"):
            continue
        made = toys.method(name)
        made.sample = SAMPLE
        if not made.sample_problems():
            takes.append(name)
    assert {"fedavg", "fedprox", "fedper"} <= set(takes)
    assert not {"scaffold", "apfl", "fedrep", "afmcc", "fednca"} & set(takes)
