"""The simplex of prototypes and FedNCA's losses: geometry, closed forms, what counts and what does not."""

import math

import pytest
import torch
from torch.func import grad, vmap

from unalike.losses import collapse, prototype_contrast, rejection, simplex_etf


def draw(rows=5, classes=4, width=6, seed=0):
    source = torch.Generator().manual_seed(seed)
    f = torch.randn(rows, classes, width, generator=source, dtype=torch.float64)
    return f, torch.randint(2, (rows, classes), generator=source).double()


@pytest.mark.parametrize("classes", [2, 7, 20, 80])
def test_prototypes_are_unit_and_as_far_apart_as_can_be(classes):
    w = simplex_etf(classes, classes + 3)
    wanted = torch.full((classes, classes), -1 / (classes - 1), dtype=torch.float64).fill_diagonal_(
        1
    )
    torch.testing.assert_close(w @ w.mT, wanted, rtol=0, atol=1e-14)
    assert (
        w.shape == (classes, classes + 3)
        and (w[:, classes:] == 0).all()
        and w.sum(0).abs().max() < 1e-13
    )


@pytest.mark.parametrize("classes", [2, 7, 20, 80])
@pytest.mark.parametrize("length", [0.1, 1.0, 30.0])
def test_features_on_their_prototypes_cost_the_closed_form(classes, length):
    w, y = simplex_etf(classes, classes), torch.zeros(3, classes)
    y[0, 1] = y[1, :2] = 1  # three present in three samples
    closed = math.log1p((classes - 1) * math.exp(-classes / (classes - 1) / 0.07))
    assert prototype_contrast(length * w.expand(3, -1, -1), w, y).item() == pytest.approx(
        closed, rel=1e-9, abs=1e-15
    )


def test_contrast_is_the_sum_over_present_classes():
    (f, y), w = draw(), simplex_etf(4, 6)
    y[0, 0], y[1, 1] = -1, math.nan
    total = 0.0
    for b in range(5):
        for k in range(4):
            if y[b, k] == 1:
                cosines = [
                    torch.cosine_similarity(f[b, k], w[j], dim=0).item() / 0.2 for j in range(4)
                ]
                total += math.log(sum(map(math.exp, cosines))) - cosines[k]
    assert prototype_contrast(f, w, y, 0.2).item() == pytest.approx(total / 5, rel=1e-12)


def test_rejection_counts_as_many_absent_as_present_the_hardest_first():
    logits = torch.full((2, 3, 3), -9.0, dtype=torch.float64)
    logits[:, :, 0] = torch.tensor([[3.0, 2.0, 1.0], [4.0, 0.5, -8.0]])  # the largest of each class
    sure = lambda logit: 1 / (1 + math.exp(-logit)) - 0.3
    y = torch.tensor([[0.0, 0, 0], [1, 1, 0]])
    assert rejection(logits, y).item() == pytest.approx((sure(3) + sure(2)) / 2)
    y[1, 1] = 0  # one present, one counts
    assert rejection(logits, y).item() == pytest.approx(sure(3) / 2)
    y[0, 0] = -1  # unknown is not absent
    assert rejection(logits, y).item() == pytest.approx(sure(2) / 2)
    slope = grad(rejection)(logits, y)
    assert (slope != 0).nonzero().tolist() == [[0, 1, 0]]


def test_rejection_is_nothing_below_the_margin_or_without_a_present_label():
    _, y = draw()
    below = torch.full((5, 4, 4), math.log(0.3 / 0.7) - 1e-9, dtype=torch.float64)
    assert rejection(below, y) == 0
    assert (
        rejection(below + 5, torch.zeros(5, 4)) == 0
        and prototype_contrast(draw()[0], simplex_etf(4, 6), torch.zeros(5, 4)) == 0
    )
    assert rejection(below + 5, torch.ones(5, 4)) == 0  # more present than absent


def test_a_stack_equals_one_by_one():
    fs, ys = (torch.stack(each) for each in zip(*(draw(seed=seed) for seed in range(3))))
    w = simplex_etf(4, 6)
    loss = lambda f, y: prototype_contrast(f, w, y) + rejection(f @ w.mT, y, 0.1)
    torch.testing.assert_close(
        vmap(grad(loss))(fs, ys), torch.stack([grad(loss)(f, y) for f, y in zip(fs, ys)])
    )


def test_collapse_is_measured():
    w, y = simplex_etf(4, 6), draw(40)[1]
    f = 2 * w.expand(40, -1, -1)
    full = collapse(f, w, y)
    assert full["alignment"] == pytest.approx(1) and full["spread"] == pytest.approx(0, abs=1e-20)
    noisy = collapse(f + 0.5 * draw(40)[0], w, y)
    assert noisy["spread"] > 0.1 and noisy["alignment"] < 1
    scaled = collapse(7 * (f + 0.5 * draw(40)[0]), w, y)
    assert scaled == pytest.approx(noisy)
    assert collapse(-f, w, y)["alignment"] == pytest.approx(-1)
    assert collapse(f, w, torch.zeros(40, 4)) == {}
    assert set(collapse(f, w, torch.eye(4)[[1] * 40])) == {
        "alignment"
    }  # one class has nothing to be apart from


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: simplex_etf(1, 4), "2 classes or more, got 1"),
        (
            lambda: simplex_etf(20, 12),
            "20 classes need 20 channels or more .* have 12: widen the encoder",
        ),
        (lambda: rejection(torch.zeros(2, 3), torch.zeros(2, 3)), r"got \(2, 3\) and \(2, 3\)"),
        (
            lambda: prototype_contrast(torch.zeros(2, 3, 4), simplex_etf(3, 4), torch.zeros(2, 4)),
            r"got \(2, 3, 4\) and \(2, 4\)",
        ),
    ],
)
def test_wrong_inputs_are_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()
