"""What units give after their activation function."""

import torch
from torch import nn

from unalike.models.activity import measure_activity
from unalike.models.classics import ResNet18
from unalike.models.submodels import find_channel_groups


def close(found, expected):
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_activity_is_what_units_give_above_zero_and_how_often_not():
    """Units x and -x of the rows 1, 2, -4: means 3/3 and 4/3, not positive 1/3 and 2/3."""
    model = nn.Sequential(nn.Linear(1, 2, bias=False), nn.ReLU(), nn.Linear(2, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0], [-1.0]]))
    x = torch.tensor([[1.0], [2.0], [-4.0]])
    (found,) = measure_activity(model, find_channel_groups(model, x), [x[:2], x[2:]])
    close(found, [[1.0, 1 / 3], [4 / 3, 2 / 3]])


def test_activity_is_counted_after_norm_and_activation():
    """The norm adds 2 to x and -2 to -x: relu gives 3, 4, 0 and 0, 0, 2 of the rows 1, 2, -4."""
    model = nn.Sequential(
        nn.Linear(1, 2, bias=False), nn.BatchNorm1d(2, eps=0), nn.ReLU(), nn.Linear(2, 1)
    ).eval()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0], [-1.0]]))
        model[1].bias.copy_(torch.tensor([2.0, -2.0]))
    x = torch.tensor([[1.0], [2.0], [-4.0]])
    (found,) = measure_activity(model, find_channel_groups(model, x), [x])
    close(found, [[7 / 3, 1 / 3], [2 / 3, 2 / 3]])


class Residual(nn.Module):
    """relu(x + inner(x)), whose stream is made by `first`."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(1, 2, bias=False)
        self.inner = nn.Linear(2, 2, bias=False)
        self.last = nn.Linear(2, 1)

    def forward(self, x):
        x = self.first(x)
        return self.last((x + self.inner(x)).relu())


def test_a_residual_stream_is_measured_after_the_sum():
    """first gives (x, -x), inner doubles it: the stream is relu(3 x), relu(-3 x)."""
    model = Residual()
    with torch.no_grad():
        model.first.weight.copy_(torch.tensor([[1.0], [-1.0]]))
        model.inner.weight.copy_(2 * torch.eye(2))
    x = torch.tensor([[1.0], [-2.0]])
    (found,) = measure_activity(model, find_channel_groups(model, x), [x])
    close(found, [[1.5, 0.5], [3.0, 0.5]])


def test_a_deep_net_differs_by_layer_after_its_activations():
    """Before norm and activation about half of everything is negative, whatever the layer."""
    torch.manual_seed(0)
    model = nn.Sequential(ResNet18((3, 16, 16), 8), nn.Linear(64, 3))
    x = torch.randn(16, 3, 16, 16)
    model.train()(x)  # statistics
    groups = find_channel_groups(model, x[:1])
    zeros = [float(activity[:, 1].mean()) for activity in measure_activity(model, groups, [x])]
    assert len(zeros) == len(groups) and all(0 < share < 1 for share in zeros)
    assert max(zeros) - min(zeros) > 0.1
