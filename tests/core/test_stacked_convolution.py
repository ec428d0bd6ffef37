"""Convolutions of a stack as matrix products."""

import pytest
import torch
from torch.nn import functional as F

from unalike.training import stacked_convolution
from unalike.training.stacked_convolution import MatrixConvolutions


def outcome(models, options, matrices, channels=4):
    """Outputs and gradients of a stack's convolutions, with matrices or as vmap has them."""
    source = torch.Generator().manual_seed(0)
    shapes = [(models, 3, channels, 9, 8), (models, 6, channels // options.get("groups", 1), 3, 2)]
    x, weight, bias = (
        torch.randn(*shape, generator=source, dtype=torch.float64).requires_grad_()
        for shape in (*shapes, (models, 6))
    )

    def one(x, weight, bias):
        return F.conv2d(x, weight, bias, **options).square().mean()

    if matrices:
        with MatrixConvolutions(models):
            losses = torch.func.vmap(one)(x, weight, bias)
    else:
        losses = torch.func.vmap(one)(x, weight, bias)
    return [losses, *torch.autograd.grad(losses.sum(), [x, weight, bias])]


@pytest.fixture
def unfolded(monkeypatch):
    """How often patches were taken."""
    calls = []
    unfold = F.unfold
    monkeypatch.setattr(F, "unfold", lambda *args: calls.append(args) or unfold(*args))
    return calls


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2, "padding": 1},
        {"stride": (1, 3), "padding": (2, 0), "dilation": (2, 1)},
    ],
)
def test_matrix_products_give_what_convolutions_give(options, unfolded):
    for a, b in zip(outcome(3, options, True), outcome(3, options, False), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    assert unfolded


@pytest.mark.parametrize("options", [{"groups": 2}, {"padding": "same", "dilation": (1, 2)}])
def test_other_convolutions_stay_as_they_are(options, unfolded):
    for a, b in zip(outcome(3, options, True), outcome(3, options, False), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    assert not unfolded


def test_patches_beyond_the_limit_are_not_made(unfolded, monkeypatch):
    monkeypatch.setattr(stacked_convolution, "MAX_PATCH_BYTES", 1000)
    outcome(3, {}, True)
    assert not unfolded
