"""Losses of several labels against their formulas written out, their limits, unknown labels, and bad inputs."""

import math

import pytest
import torch
from torch.func import grad, vmap

from unalike.losses import asymmetric, binary_cross_entropy, focal, known_mean

LOSSES = {"bce": binary_cross_entropy, "focal": focal, "asymmetric": asymmetric}


def draw(seed=0, shape=(6, 5)):
    source = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(shape, generator=source, dtype=torch.float64), torch.randint(
        2, shape, generator=source
    ).double()


def test_each_entry_is_the_papers():
    output, y = draw()
    for b, k in ((b, k) for b in range(6) for k in range(5)):
        p = 1 / (1 + math.exp(-output[b, k]))
        right, p_m = (p if y[b, k] else 1 - p), max(p - 0.05, 0)
        asl = -(1 - p) * math.log(p) if y[b, k] else -(p_m**4) * math.log(1 - p_m)
        assert binary_cross_entropy(output, y)[b, k].item() == pytest.approx(
            -math.log(right), rel=1e-12
        )
        assert focal(output, y)[b, k].item() == pytest.approx(
            -((1 - right) ** 2) * math.log(right), rel=1e-12
        )
        assert asymmetric(output, y)[b, k].item() == pytest.approx(asl, rel=1e-12, abs=1e-300)


def test_without_focus_or_margin_all_are_cross_entropy():
    output, y = draw()
    plain = binary_cross_entropy(output, y)
    torch.testing.assert_close(focal(output, y, 0.0), plain)
    torch.testing.assert_close(asymmetric(output, y, 0.0, 0.0, 0.0), plain)
    torch.testing.assert_close(asymmetric(output, y, 3.0, 3.0, 0.0), focal(output, y, 3.0))


@pytest.mark.parametrize("name", LOSSES)
def test_unknown_labels_cost_nothing_and_pull_nowhere(name):
    output, y = draw()
    y[0, 0], y[1], y[2, 3] = -1, math.nan, -7
    slope = grad(lambda out: LOSSES[name](out, y).sum())(output)
    known = y >= 0
    assert (
        (LOSSES[name](output, y)[~known] == 0).all()
        and (slope[~known] == 0).all()
        and not slope.isnan().any()
    )
    torch.testing.assert_close(
        known_mean(LOSSES[name](output, y), y), LOSSES[name](output, y)[known].mean()
    )
    assert known_mean(LOSSES[name](output, torch.full_like(y, -1)), torch.full_like(y, -1)) == 0


@pytest.mark.parametrize("name", LOSSES)
def test_sure_guesses_stay_finite(name):
    for sure in (-200.0, 200.0):
        output = torch.full((1, 2), sure)
        slope, cost = torch.func.grad_and_value(
            lambda out: LOSSES[name](out, torch.tensor([[1.0, 0.0]])).sum()
        )(output)
        assert cost.isfinite() and slope.isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
def test_a_stack_equals_one_by_one(name):
    outputs, ys = (torch.stack(each) for each in zip(*(draw(seed) for seed in range(3))))
    loss = lambda output, y: known_mean(LOSSES[name](output, y), y)
    torch.testing.assert_close(
        vmap(grad(loss))(outputs, ys), torch.stack([grad(loss)(a, b) for a, b in zip(outputs, ys)])
    )


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda o, y: asymmetric(o, y, negative=-1.0),
            "exponent negative must be 0 or at least 1, got -1",
        ),
        (lambda o, y: asymmetric(o, y, positive=0.5), "exponent positive"),
        (lambda o, y: asymmetric(o, y, margin=1.0), "from 0 to below 1, got 1.0"),
        (lambda o, y: focal(o, y[:, :2]), r"one shape, got \(6, 5\) and \(6, 2\)"),
    ],
)
def test_wrong_inputs_are_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call(*draw())
