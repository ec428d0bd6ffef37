"""Counting operations of a forward pass."""

import torch
from torch import nn

from unalike.models import MLP, flops
from unalike.models.flops import architecture_key, count_flops


def test_a_linear_layer_costs_two_operations_per_weight():
    assert count_flops(nn.Linear(3, 5), torch.zeros(4, 3)) == 2 * 4 * 3 * 5


def test_equal_architectures_are_counted_once(monkeypatch):
    counted = []
    count = flops._count

    def record(model, x):
        counted.append(model)
        return count(model, x)

    monkeypatch.setattr(flops, "_count", record)
    monkeypatch.setattr(flops, "_known", type(flops._known)())
    x = torch.zeros(1, 8)
    same = [count_flops(MLP((8,), (16,), 4), x) for _ in range(3)]
    assert len(set(same)) == 1
    assert len(counted) == 1
    assert count_flops(MLP((8,), (17,), 4), x) > same[0]
    assert count_flops(MLP((8,), (16,), 4), torch.zeros(2, 8)) == 2 * same[0]
    assert len(counted) == 3


def test_a_setting_that_changes_the_work_changes_the_key():
    class Repeat(nn.Module):
        def __init__(self, times):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.times = times

        def forward(self, x):
            for _ in range(self.times):
                x = self.linear(x)
            return x

    x = torch.zeros(1, 4)
    assert count_flops(Repeat(3), x) == 3 * count_flops(Repeat(1), x)
    assert architecture_key(Repeat(1)) == architecture_key(Repeat(1))
    # What cannot be compared by value is counted each time.
    assert architecture_key(Repeat([1])) is None
