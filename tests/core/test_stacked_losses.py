"""Cross entropies of a stack: the same numbers, without an import of sympy."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from unalike.training.stacked_losses import CrossEntropies

WITHOUT_SYMPY = """
import sys, torch
import torch.nn.functional as F
from unalike.training.stacked_losses import CrossEntropies
with CrossEntropies():
    loss = lambda z, y: F.cross_entropy(z, y, reduction="sum")
    torch.func.vmap(loss)(torch.randn(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64))
print("sympy" in sys.modules)
"""


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 3, 2)])
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_and_gradients_are_those_of_torch(shape, weighted):
    """Also of dense outputs; two rows do not count."""
    output = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    y = torch.randint(4, (shape[0], *shape[2:]))
    y[:2] = -1
    weight = torch.rand(4, dtype=torch.float64) if weighted else None
    expected = F.cross_entropy(output, y, weight, ignore_index=-1, reduction="sum")
    with CrossEntropies():
        own = F.cross_entropy(output, y, weight, ignore_index=-1, reduction="sum")
    assert own.grad_fn.name() != expected.grad_fn.name()  # another program
    assert torch.allclose(own, expected, rtol=1e-12)
    gradients = [torch.autograd.grad(loss, output)[0] for loss in (own, expected)]
    assert torch.allclose(*gradients, rtol=1e-12)


def test_other_forms_are_left_to_torch():
    output, y = torch.randn(5, 3), torch.randint(3, (5,))
    for options in ({}, {"reduction": "none"}, {"reduction": "sum", "label_smoothing": 0.1}):
        expected = F.cross_entropy(output, y, **options)
        with CrossEntropies():
            assert torch.equal(F.cross_entropy(output, y, **options), expected)
    with CrossEntropies():
        soft = F.cross_entropy(output, output.softmax(1), reduction="sum")
    assert torch.equal(soft, F.cross_entropy(output, output.softmax(1), reduction="sum"))


def test_a_stack_does_not_import_sympy():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_SYMPY], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
