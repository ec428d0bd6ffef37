"""Remembered walks over a module: as PyTorch's own, after every kind of change."""

import copy
import pickle

import pytest
import torch
from torch import nn

from unalike.base.module_tree import ATTRIBUTE, parameters_of, state_of, tensors_of, tree_of


def build():
    return nn.Sequential(
        nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 2, bias=False))
    )


def add_layer(model):
    model.append(nn.Linear(2, 2))


def swap_layer(model):
    model[0] = nn.Linear(2, 3)


def swap_parameter(model):
    model[0].weight = nn.Parameter(torch.ones(3, 2))


def drop_parameter(model):
    model[0].bias = None


def give_parameter(model):
    model[2][0].bias = nn.Parameter(torch.ones(2))


def tie(model):
    model[1].weight = model[1].bias


def add_buffer(model):
    model[0].register_buffer("extra", torch.ones(1), persistent=False)


def hook_state(model):
    model[0]._register_state_dict_hook(lambda module, state, prefix, meta: state.update(more=1))


CHANGES = [add_layer, swap_layer, swap_parameter, drop_parameter, give_parameter, tie]
CHANGES += [add_buffer, hook_state, lambda model: None]


@pytest.mark.parametrize("change", CHANGES)
def test_a_remembered_walk_gives_what_pytorch_gives_after_a_change(change):
    model = build()
    tensors_of(model)
    change(model)
    for _ in range(2):
        assert list(parameters_of(model)) == [name for name, _ in model.named_parameters()]
        assert all(p is model.get_parameter(name) for name, p in parameters_of(model).items())
        expected = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        assert list(tensors_of(model)) == list(expected)
        assert all(tensor is expected[name] for name, tensor in tensors_of(model).items())
        assert list(state_of(model)) == list(model.state_dict())
        for name, value in model.state_dict().items():
            found = state_of(model)[name]
            same = torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value
            assert same and not getattr(found, "requires_grad", False)


def test_a_kind_follows_every_number_of_a_layer_and_no_value_of_a_parameter():
    one, other = build(), build()
    kind = tree_of(one).kind()
    assert kind is tree_of(other).kind()
    other[1].momentum = 0.2
    assert kind is not tree_of(other).kind()
    other[1].momentum = 0.1
    assert kind is tree_of(other).kind()
    other[0].weight.requires_grad_(False)
    assert kind is not tree_of(other).kind()
    assert kind is not tree_of(build().double()).kind()
    assert kind is not tree_of(build().eval()).kind()


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_a_copy_of_a_module_has_a_walk_of_its_own(duplicate):
    model = build()
    tensors_of(model)
    copied = duplicate(model)
    copied[0].weight = nn.Parameter(torch.zeros(3, 2))
    assert tensors_of(copied)["0.weight"] is copied[0].weight
    assert tree_of(copied).layers[0] is copied
    assert vars(model)[ATTRIBUTE] is not vars(copied)[ATTRIBUTE]
