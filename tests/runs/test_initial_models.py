"""Initial models: each client's model is built once before the first round."""

import pickle
from collections import Counter

import pytest
import torch
from torch import nn

import unalike
from unalike.runs.initial_models import InitialModels, SharedFactory

ONCE = unalike.Training(rounds=1, batch_size=8)


class Factory:
    """A model factory that counts how often it was called."""

    def __init__(self, built, id):
        self.built = built
        self.id = id

    def __call__(self):
        self.built[self.id] += 1
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU())


def counting_clients(toys, built, ids="abc"):
    return [toys.client(id, model=Factory(built, id)) for id in ids]


@pytest.mark.parametrize("method", [unalike.FedAvg(), unalike.FedMuscle(peers=1, width=8, batch=8)])
@pytest.mark.parametrize("safeguard", [False, True])
def test_each_model_is_built_once_for_dry_run_baseline_and_run(tmp_path, toys, method, safeguard):
    built = Counter()
    if safeguard and not method.supports_safeguard:
        pytest.skip("this method has no safeguard")
    clients = counting_clients(toys, built)
    before_the_first_round_ended = []

    def watch(event, **facts):
        if event == "round":
            before_the_first_round_ended.append(dict(built))

    options = {"training": ONCE, "out": tmp_path, "safeguard": safeguard, "watch": watch}
    unalike.run(method, clients, **options)
    assert before_the_first_round_ended == [{"a": 1, "b": 1, "c": 1}]


def test_one_client_of_each_kind_is_built_in_a_dry_run_here_when_others_run_in_workers(
    tmp_path, toys
):
    """Counted in this process: the dry run. Clients are built in the workers."""
    built = Counter()
    shared = Factory(built, "shared")
    clients = [toys.client(id, model=shared) for id in "abc"]
    unalike.run(unalike.FedAvg(), clients, training=ONCE, out=tmp_path, workers=2)
    assert built == {"shared": 1}


def test_shared_models_do_not_change_results(tmp_path, toys, monkeypatch):
    def run(folder):
        method = unalike.FedMuscle(peers=1, width=8, batch=8)
        return unalike.run(method, toys.clients(), training=ONCE, out=tmp_path / folder)

    shared = run("shared")
    monkeypatch.setattr("unalike.runs.initial_models.MAX_BYTES", 0)
    monkeypatch.setattr(InitialModels.__init__, "__defaults__", (0,))
    rebuilt = run("rebuilt")
    for id, entry in shared["clients"].items():
        assert entry["hash"] == rebuilt["clients"][id]["hash"]
        assert entry["alone"] == rebuilt["clients"][id]["alone"]


def test_a_copy_starts_from_the_first_weights_even_after_training(toys):
    built = Counter()
    models = InitialModels()
    client = models.share(toys.client("a", model=Factory(built, "a")), seed=0)
    first = client.encoder(0)
    weights = first[0].weight.detach().clone()
    with torch.no_grad():
        first[0].weight.zero_()
    assert torch.equal(client.encoder(0)[0].weight, weights)
    assert not torch.equal(client.encoder(1)[0].weight, weights)
    assert built["a"] == 2, "another seed, other weights"


def test_models_beyond_the_limit_and_those_that_cannot_be_copied_are_built_again(toys):
    built = Counter()
    small = InitialModels(max_bytes=10)
    client = small.share(toys.client("a", model=Factory(built, "a")), seed=0)
    client.encoder(0)
    client.encoder(0)
    assert built["a"] == 2

    class Uncopyable(nn.Linear):
        def __deepcopy__(self, memo):
            raise RuntimeError("not me")

    client = InitialModels().share(toys.client("b", model=lambda: Uncopyable(6, 8)), seed=0)
    assert client.info().model == "Uncopyable"
    assert torch.equal(client.encoder(0).weight, client.encoder(0).weight)


class KeepsFunction(nn.Module):
    """Its forward goes through a closure that a deep copy would not follow."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 8)
        self.apply_layer = lambda x: self.layer(x)

    def forward(self, x):
        return self.apply_layer(x)


class HasHook(nn.Linear):
    def __init__(self):
        super().__init__(6, 8)
        self.register_forward_hook(lambda module, inputs, output: output + self.bias)


@pytest.mark.parametrize("factory", [KeepsFunction, HasHook])
def test_a_model_whose_copy_would_use_its_parameters_is_built_again(toys, factory):
    client = InitialModels().share(toys.client("a", model=factory), seed=0)
    first, second = client.encoder(0), client.encoder(0)
    x = torch.ones(1, 6)
    expected = first(x)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.zero_()
    assert torch.equal(second(x), expected)


def test_another_process_gets_the_plain_factory():
    shared = SharedFactory("a", nn.Identity, InitialModels())
    assert pickle.loads(pickle.dumps(shared)) is nn.Identity
