"""The estimate of the Muscle loss: without bias where it promises that, near the exact loss, and nearer with more draws."""

import math

import pytest
import torch

from unalike.losses import muscle_loss, muscle_sampled, pairwise_loss
from unalike.losses.muscle import muscle_literal


def made(peers, rows=5, width=6, seed=0):
    draw = torch.Generator().manual_seed(seed)
    common = torch.randn(rows, width, generator=draw)
    return [
        (common + torch.randn(rows, width, generator=draw)).double() for _ in range(peers + 1)
    ], draw


@pytest.mark.parametrize("peers", [1, 2, 4])
def test_the_mean_weight_is_the_sum(peers):
    (z, *others), draw = made(peers)
    drawn = muscle_sampled(z, others, torch.rand(peers, len(z), 50000, generator=draw), 0.3, 0.2)
    assert float(drawn) == pytest.approx(float(muscle_literal(z, others, 0.3, 0.2)), abs=0.01)


def test_draws_do_not_matter_where_peers_are_independent():
    """Equal temperatures: every combination's weight is the same, and the estimate is exact however few are drawn."""
    (z, *others), draw = made(3)
    few = muscle_sampled(z, others, torch.rand(3, 5, 1, generator=draw), 0.2, 0.2)
    assert float(few) == pytest.approx(float(pairwise_loss(z, others, 0.2)), abs=1e-12)


def test_more_draws_are_nearer_and_the_gradient_goes_the_exact_way():
    (z, *others), draw = made(3, rows=8)
    z.requires_grad_()
    exact = muscle_loss(z, others)
    (way,) = torch.autograd.grad(exact, z)
    apart = {}
    for count in (4, 400):
        tries = [
            muscle_sampled(z, others, torch.rand(3, 8, count, generator=draw)) for _ in range(20)
        ]
        apart[count] = sum(float((each - exact).detach().abs()) for each in tries) / 20
        (found,) = torch.autograd.grad(tries[0], z)
    assert apart[400] < apart[4] / 3
    assert float(torch.cosine_similarity(found.flatten(), way.flatten(), dim=0)) > 0.99


def test_nine_peers_against_all_combinations():
    (z, *others), draw = made(9, rows=3, width=64)
    drawn = muscle_sampled(z, others, torch.rand(9, 3, 4000, generator=draw))
    assert float(drawn) == pytest.approx(float(muscle_loss(z, others)), abs=0.1)


def test_ends_of_the_range_and_wrong_shapes():
    (z, *others), _ = made(2)
    for end in (0.0, 1.0):
        assert math.isfinite(float(muscle_sampled(z, others, torch.full((2, 5, 3), end))))
    with pytest.raises(ValueError, match=r"here \(2, 5, any\), got \(3, 5, 4\)"):
        muscle_sampled(z, others, torch.rand(3, 5, 4))
