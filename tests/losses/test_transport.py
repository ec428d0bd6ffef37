"""Sinkhorn's plan between patches and labels: marginals, agreement with POT, the gradient, and bad shapes."""

import ot
import pytest
import torch

from unalike.losses import importance, sinkhorn, transport


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def problem(images=2, conditions=3, patches=9, labels=5):
    return draw(images, conditions, patches, labels).sigmoid(), draw(
        images, conditions, patches, seed=1
    ).softmax(-1)


def test_rows_and_columns_have_the_weights_asked_for():
    cost, rows = problem()
    plan = sinkhorn(cost, rows)
    torch.testing.assert_close(plan.sum(-1), rows, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        plan.sum(-2), torch.full((2, 3, 5), 0.2, dtype=torch.float64), rtol=0, atol=1e-12
    )


def test_fedmpts_plan_has_the_weights_asked_for():
    from unalike.algorithms import FedMPT

    how, S = (
        FedMPT(),
        20
        * 0.7
        * torch.rand(4, 5, 49, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
    )
    plan = transport(S, how.temperature, how.entropy, how.steps)
    torch.testing.assert_close(plan.sum(-1), importance(S, how.temperature), rtol=0, atol=1e-5)


def test_the_plan_is_that_of_pot():
    cost, rows = problem()
    plan = sinkhorn(cost, rows)
    for image in range(2):
        for condition in range(3):
            wanted = ot.sinkhorn(
                rows[image, condition].numpy(),
                [0.2] * 5,
                cost[image, condition].numpy(),
                0.2,
                stopThr=1e-12,
            )
            torch.testing.assert_close(
                plan[image, condition], torch.from_numpy(wanted), rtol=0, atol=1e-5
            )


def test_single_precision_and_far_costs_stay_finite():
    cost = torch.tensor([[[0.0, 500.0], [500.0, 0.0]]])
    plan = sinkhorn(cost, torch.full((1, 2), 0.5), weight=0.05)
    torch.testing.assert_close(plan, 0.5 * torch.eye(2)[None])


def test_gradients_are_right():
    cost, rows = problem(1, 2, 4, 3)
    assert torch.autograd.gradcheck(
        lambda c, a: sinkhorn(c, a, steps=5),
        (cost.requires_grad_(), rows.requires_grad_()),
        atol=1e-5,
    )
    assert torch.autograd.gradcheck(
        lambda s: transport(s, steps=5), (5 * draw(1, 2, 4, 3, seed=2).requires_grad_(),), atol=1e-5
    )


def test_gradients_of_the_steps_are_those_of_the_plan():
    """At convergence dP = P (dC terms + df + dg), with df and dg from the marginals that must stay (implicit function theorem)."""
    cost, rows = problem(1, 1, 4, 3)
    cost, rows, pull = cost[0, 0].requires_grad_(), rows[0, 0], draw(4, 3, seed=3)
    plan = sinkhorn(cost, rows, steps=200)
    (found,) = torch.autograd.grad((plan * pull).sum(), cost)
    p, q = plan.detach(), (plan * pull).detach()
    whole = torch.cat([torch.cat([p.sum(1).diag(), p], 1), torch.cat([p.mT, p.sum(0).diag()], 1)])
    held = torch.linalg.pinv(whole) @ torch.cat([q.sum(1), q.sum(0)])
    torch.testing.assert_close(
        found, (p * (held[:4, None] + held[None, 4:]) - q) / 0.2, rtol=0, atol=1e-5
    )


def test_batched_equals_one_by_one():
    similarity = 5 * draw(2, 3, 9, 5)
    whole = transport(similarity)
    for image in range(2):
        for condition in range(3):
            torch.testing.assert_close(
                whole[image, condition], transport(similarity[image, condition])
            )


def test_an_unsure_patch_counts_more_and_equal_ones_the_same():
    similarity = torch.tensor([[9.0, 0.0], [1.0, 1.0]])
    assert importance(similarity)[1] > importance(similarity)[0]
    torch.testing.assert_close(importance(torch.zeros(3, 4, 2)), torch.full((3, 4), 0.25))


@pytest.mark.parametrize(
    ("cost", "rows", "more"),
    [
        ((2, 3), (3,), {}),
        ((3,), (), {}),
        ((2, 3), (2,), {"weight": 0.0}),
        ((2, 3), (2,), {"steps": 0}),
    ],
)
def test_bad_input_is_told(cost, rows, more):
    with pytest.raises(ValueError, match="sinkhorn takes"):
        sinkhorn(torch.zeros(cost), torch.ones(rows), **more)
