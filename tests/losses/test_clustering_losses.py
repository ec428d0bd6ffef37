"""AFMCC's losses against the paper's sums term by term, their limits, rows that fill up a stack, and bad inputs."""

import math

import pytest
import torch
from torch.func import grad, vmap
from torch.nn.functional import cosine_similarity, mse_loss

from unalike.losses import (
    class_correlation,
    class_correlation_loss,
    fusion_contrast,
    infonce,
    reconstruction,
)

LOSSES = {
    "class correlation": lambda h, z, weights=None: class_correlation_loss(
        h.softmax(-1), weights=weights
    ),
    "fusion contrast": lambda h, z, weights=None: fusion_contrast(h, z, weights=weights),
    "reconstruction per feature": lambda h, z, weights=None: reconstruction(
        z, h, "feature", weights
    ),
    "reconstruction per sample": lambda h, z, weights=None: reconstruction(z, h, "sample", weights),
}


def draw(rows=7, width=4, count=2, seed=0):
    return torch.randn(
        count, rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).unbind()


# reference


def test_class_correlation_is_equation_4_entry_by_entry():
    p = draw(9, 3)[0].softmax(-1)
    entries = [
        [3 / 9 * sum(p[i, a] * p[i, b] for i in range(9)) for b in range(3)] for a in range(3)
    ]
    torch.testing.assert_close(
        class_correlation(p), torch.tensor(entries, dtype=torch.float64), rtol=1e-12, atol=1e-12
    )
    target = [[0.2 * (a == b) + 0.8 / 3 for b in range(3)] for a in range(3)]
    expected = sum((entries[a][b] - target[a][b]) ** 2 for a in range(3) for b in range(3))
    torch.testing.assert_close(class_correlation_loss(p, 0.2), expected, rtol=1e-12, atol=1e-12)


def test_class_correlation_gradient_is_equation_14():
    p = draw(9, 3)[0].softmax(-1)
    A = class_correlation(p) - (0.3 * torch.eye(3, dtype=torch.float64) + 0.7 / 3)
    torch.testing.assert_close(
        grad(class_correlation_loss)(p), 4 * 3 / 9 * p @ A, rtol=1e-12, atol=1e-12
    )


def test_fusion_contrast_is_equation_3_term_by_term():
    h, z = draw()
    sim = [[cosine_similarity(h[i], z[j], dim=0) / 0.3 for j in range(7)] for i in range(7)]
    federation = [
        -(sim[i][i].exp() / sum(sim[i][j].exp() for j in range(7) if j != i)).log()
        for i in range(7)
    ]
    torch.testing.assert_close(
        fusion_contrast(h, z, 0.3), torch.stack(federation).mean(), rtol=1e-12, atol=1e-12
    )


def test_reconstruction_is_equation_2_and_its_mean_over_features():
    x, x_hat = draw()
    expected = sum((x[i] - x_hat[i]).norm() ** 2 for i in range(7)) / 7
    torch.testing.assert_close(
        reconstruction(x, x_hat, per="sample"), expected, rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(reconstruction(x, x_hat), mse_loss(x_hat, x), rtol=1e-12, atol=1e-12)
    images = draw(7, 36)[0].reshape(7, 1, 6, 6)
    torch.testing.assert_close(reconstruction(images, 2 * images), mse_loss(2 * images, images))


# properties


@pytest.mark.parametrize("flexibility", [0.0, 0.1, 0.3, 1.0])
def test_balanced_clusters_reach_the_target(flexibility):
    """p_i = a e_k + (1 - a) / K with rows spread evenly over k gives Q = a^2 I + (1 - a^2) / K: the target, where a^2 is lambda."""
    a = math.sqrt(flexibility)
    p = (a * torch.eye(5) + (1 - a) / 5).repeat(4, 1).double()
    assert class_correlation_loss(p, flexibility) < 1e-12


@pytest.mark.parametrize("kind", ["all in one", "undecided", "two classes empty"])
def test_collapse_costs(kind):
    eye = torch.eye(5)
    p = {
        "all in one": eye[[0] * 20],
        "undecided": torch.full((20, 5), 0.2),
        "two classes empty": eye[torch.arange(20) % 3],
    }[kind]
    assert class_correlation_loss(p) > 0.3


def test_class_correlation_does_not_care_for_order():
    p = draw(9, 4)[0].softmax(-1)
    for other in (p.flip(0), p.flip(1), torch.cat([p, p])):
        torch.testing.assert_close(class_correlation_loss(other), class_correlation_loss(p))


def test_fusion_contrast_is_infonce_without_the_positive_below():
    h, z = draw()
    torch.testing.assert_close(fusion_contrast(h, z), fusion_contrast(5 * h, 0.1 * z))
    torch.testing.assert_close(fusion_contrast(h, z, math.inf), torch.tensor(math.log(6)).double())
    assert fusion_contrast(h, z) < infonce(h, z, 0.5)
    assert fusion_contrast(h, h) < fusion_contrast(h, z)


def test_a_row_alone_has_nothing_to_contrast_with():
    h, z = draw(1)
    slope, cost = torch.func.grad_and_value(fusion_contrast)(h, z)
    assert cost == 0 and (slope == 0).all()


# rows that fill up a stack


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("kept", [7, 4, 1])
def test_rows_of_weight_zero_count_for_nothing(name, kept):
    loss = LOSSES[name]
    h, z = draw()
    weights = (torch.arange(7) < kept).double()
    filled = torch.where(weights[:, None] > 0, h, 1e3 * draw(seed=1)[0])
    torch.testing.assert_close(
        loss(filled, z, weights), loss(h[:kept], z[:kept]), rtol=1e-12, atol=1e-12
    )
    for program in (0, 1):
        slope = grad(loss, argnums=program)(filled, z, weights)
        alone = grad(loss, argnums=program)(h[:kept], z[:kept])
        torch.testing.assert_close(slope[:kept], alone, rtol=1e-12, atol=1e-12)
        assert (slope[kept:] == 0).all()


@pytest.mark.parametrize("name", LOSSES)
def test_rows_that_are_left_out_may_lie_anywhere_and_be_zero(name):
    loss = LOSSES[name]
    h, z = draw()
    keep = torch.tensor([6, 0, 3])
    weights = torch.zeros(7).index_fill(0, keep, 1)  # float32 weights, float64 rows
    h, z = h * weights[:, None], z * weights[:, None]
    torch.testing.assert_close(loss(h, z, weights), loss(h[keep], z[keep]), rtol=1e-12, atol=1e-12)
    assert grad(loss)(h, z, weights).isfinite().all()
    torch.testing.assert_close(loss(h, z, weights > 0), loss(h, z, 3 * weights))


@pytest.mark.parametrize("name", LOSSES)
def test_clients_of_different_size_in_one_stack_equal_clients_one_by_one(name):
    loss = LOSSES[name]
    h, z = (torch.stack(program) for program in zip(*(draw(seed=seed) for seed in range(4))))
    sizes = [7, 5, 2, 1]
    weights = (torch.arange(7) < torch.tensor(sizes)[:, None]).double()
    together, slopes = vmap(loss)(h, z, weights), vmap(grad(loss))(h, z, weights)
    for i, size in enumerate(sizes):
        torch.testing.assert_close(
            together[i], loss(h[i, :size], z[i, :size]), rtol=1e-12, atol=1e-12
        )
        torch.testing.assert_close(
            slopes[i, :size], grad(loss)(h[i, :size], z[i, :size]), rtol=1e-12, atol=1e-12
        )
        assert (slopes[i, size:] == 0).all()
    torch.testing.assert_close(
        vmap(loss)(h, z), torch.stack([loss(*pair) for pair in zip(h, z)]), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("name", LOSSES)
def test_no_rows_at_all_teach_nothing(name):
    slope, cost = torch.func.grad_and_value(LOSSES[name])(*draw(), torch.zeros(7))
    assert cost.isfinite() and (slope == 0).all()


# bad input


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda z: class_correlation(z[0]), r"probabilities \(N, K\), got shape \(5,\)"),
        (lambda z: class_correlation_loss(z, 1.5), "between 0 .* and 1 .*, got 1.5"),
        (lambda z: fusion_contrast(z, z[:3]), r"\(4, 5\) and \(3, 5\)"),
        (lambda z: reconstruction(z, z[:, :2]), r"\(4, 5\) and \(4, 2\)"),
        (lambda z: reconstruction(z[0], z[0]), r"\(5,\) and \(5,\)"),
        (lambda z: reconstruction(z, z, per="row"), 'per "feature" or per "sample", got \'row\''),
        (
            lambda z: fusion_contrast(z, z, weights=torch.ones(3)),
            r"4 rows, got weights of shape \(3,\)",
        ),
        (
            lambda z: class_correlation_loss(z, weights=torch.ones(4, 1)),
            r"got weights of shape \(4, 1\)",
        ),
    ],
)
def test_says_what_is_wrong(call, words):
    with pytest.raises(ValueError, match=words):
        call(torch.rand(4, 5))
