"""1x1 convolutions of a stack as matrix products."""

import pytest
import torch
from torch.nn import functional as F

from unalike.training.stacked_convolution import PointwiseConvolutions


def outcome(kernel, options, matrices):
    """Losses and gradients of a stack's convolutions, and whether they were products."""
    source = torch.Generator().manual_seed(0)
    channels = 4 // options.get("groups", 1)
    shapes = (3, 2, 4, 6, 5), (3, 6, channels, *kernel), (3, 6)
    x, weight, bias = (
        torch.randn(*shape, generator=source, dtype=torch.float64).requires_grad_()
        for shape in shapes
    )

    def one(x, weight, bias):
        return F.conv2d(x, weight, bias, **options).square().mean()

    if matrices:
        with PointwiseConvolutions():
            losses = torch.func.vmap(one)(x, weight, bias)
    else:
        losses = torch.func.vmap(one)(x, weight, bias)
    nodes, names = [losses.grad_fn], []
    while nodes:
        node = nodes.pop()
        names.append(node.name())
        nodes += [child for child, _ in node.next_functions if child is not None]
    gradients = torch.autograd.grad(losses.sum(), [x, weight, bias])
    return [losses, *gradients], any("Convolution" in name for name in names)


@pytest.mark.parametrize(
    "kernel, options, product",
    [
        ((1, 1), {}, True),
        ((1, 1), {"stride": (1, 1), "padding": 0}, True),
        ((1, 1), {"stride": 2}, False),
        ((1, 1), {"padding": 1}, False),
        ((1, 1), {"groups": 2}, False),
        ((3, 1), {"padding": "valid"}, False),
    ],
)
def test_they_give_what_convolutions_give(kernel, options, product):
    ours, convolved = outcome(kernel, options, True)
    theirs, _ = outcome(kernel, options, False)
    assert convolved is not product
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
