"""Matching: permuted networks are recovered, wider ones compute the same, batches as singles."""

import copy

import pytest
import torch
from torch import nn

from unalike.matching import Matcher, entropic_plans, solve_plans
from unalike.models import CNN, MLP, Transformer
from unalike.models.classics import VGG11, FastText, ResNet18
from unalike.models.submodels import expand, extract, first_units, narrow_model, reindex_groups
from unalike.models.tracing import trace

MODELS = {
    "linear": (lambda: nn.Sequential(MLP((6,), (32, 32), 32), nn.ReLU(), nn.Linear(32, 3)), (6,)),
    "conv, batch norm": (
        lambda: nn.Sequential(VGG11((3, 32, 32), 4), nn.Linear(32, 3)),
        (3, 32, 32),
    ),
    "conv, batch norm, residual": (
        lambda: nn.Sequential(ResNet18((3, 8, 8), 4), nn.Linear(32, 3)),
        (3, 8, 8),
    ),
    "group norm": (
        lambda: nn.Sequential(CNN((1, 8, 8), (8, 16), 16, "group"), nn.Linear(16, 3)),
        (1, 8, 8),
    ),
    "conv to linear": (
        lambda: nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 3)),
        (1, 8, 8),
    ),
    "depthwise": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.Conv2d(8, 8, 3, groups=8),
            nn.BatchNorm2d(8),
            nn.Flatten(),
            nn.Linear(128, 2),
        ),
        (3, 8, 8),
    ),
    "transformer": (lambda: nn.Sequential(Transformer((1, 8, 8)), nn.Linear(32, 3)), (1, 8, 8)),
    "words": (lambda: nn.Sequential(FastText((7,), 30, 16, 16), nn.Linear(16, 4)), (7,)),
}


def build_case(name, seed=0):
    """A model in double precision whose norms have seen something, rows, and its widths."""
    torch.manual_seed(seed)
    model, shape = MODELS[name][0]().double(), MODELS[name][1]
    x = (
        torch.randint(1, 30, (4, *shape))
        if name == "words"
        else torch.randn(4, *shape, dtype=torch.float64)
    )
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d | nn.GroupNorm | nn.LayerNorm):
            nn.init.normal_(module.weight, 1, 0.2)
            nn.init.normal_(module.bias)
    for _ in range(3):
        model.train()(x)
    return model.eval(), x, trace(model, x)


def permuted(state, groups, seed=1):
    """The same network with its units in another order."""
    draws, shuffled = torch.Generator().manual_seed(seed), dict(state)
    for width in groups:
        order = torch.randperm(width.units, generator=draws)
        for place in width.slices:
            index = torch.arange(shuffled[place.tensor].shape[place.axis])
            index[place.entries.flatten()] = place.entries[order].flatten()
            shuffled[place.tensor] = shuffled[place.tensor].index_select(place.axis, index)
    return shuffled


def output(model, state, x):
    net = copy.deepcopy(model)
    net.load_state_dict(state)
    return net.eval()(x)


def apart(a, b):
    return max(float((a[n].double() - b[n].double()).abs().max()) for n in a)


@pytest.mark.parametrize("inputs", ["mass", "barycentre"])
@pytest.mark.parametrize("name", MODELS)
def test_a_permuted_network_is_recovered(name, inputs):
    model, x, groups = build_case(name)
    shuffled = permuted(model.state_dict(), groups)
    assert (
        torch.allclose(output(model, shuffled, x), model(x), atol=1e-9)
        and apart(shuffled, model.state_dict()) > 1e-2
    )
    (back,) = Matcher(inputs).transport([model.state_dict()], [shuffled], groups, groups)
    assert apart(back, shuffled) < 1e-6


@pytest.mark.parametrize("name", ["conv, batch norm, residual", "group norm", "depthwise"])
def test_norms_do_not_influence_the_matching(name):
    """Two clients' data leave other statistics in the same units."""
    model, _, groups = build_case(name)
    state, draws = model.state_dict(), torch.Generator().manual_seed(3)
    norms = [
        f"{path}.{part}"
        for path, module in model.named_modules()
        if isinstance(module, nn.BatchNorm2d | nn.GroupNorm)
        for part in ("weight", "bias", "running_mean", "running_var")
        if f"{path}.{part}" in state
    ]
    other = {
        n: t + 10 * torch.rand(t.shape, generator=draws) if n in norms else t
        for n, t in state.items()
    }
    (back,) = Matcher(solver="picked").transport([state], [other], groups, groups)
    assert norms and apart(back, state) == 0


@pytest.mark.parametrize("name", MODELS)
def test_a_network_made_wider_computes_the_same(name):
    """16 units become 32: with "mass" each is split; with "barycentre" outputs would grow."""
    model, x, groups = build_case(name)
    keep = first_units(groups, 0.5)
    small = narrow_model(model, groups, keep, x).eval()
    (wide,) = Matcher("mass").transport(
        [small.state_dict()], [model.state_dict()], reindex_groups(groups, keep), groups
    )
    assert torch.allclose(output(model, wide, x), small(x), atol=1e-6)
    assert {n: t.shape for n, t in wide.items()} == {
        n: t.shape for n, t in model.state_dict().items()
    }


def test_the_barycentre_of_columns_multiplies_outputs_by_the_ratio_of_widths():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 16, bias=False), nn.Linear(16, 16, bias=False), nn.Linear(16, 2, bias=False)
    ).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    groups = trace(model, x)
    keep = first_units(groups, 0.5)
    small = narrow_model(model, groups, keep)
    (wide,) = Matcher("barycentre").transport(
        [small.state_dict()], [model.state_dict()], reindex_groups(groups, keep), groups
    )
    assert torch.allclose(output(model, wide, x), 4 * small(x), atol=1e-9)


def test_widening_and_narrowing_is_the_identity():
    model, x, groups = build_case("linear")
    keep = first_units(groups, 0.5)
    small, own = narrow_model(model, groups, keep, x).state_dict(), reindex_groups(groups, keep)
    matcher = Matcher("mass")
    (wide,) = matcher.transport([small], [model.state_dict()], own, groups)
    (back,) = matcher.transport([wide], [small], groups, own)
    assert apart(back, small) < 1e-6


@pytest.mark.parametrize("large", [0, 2**30])
@pytest.mark.parametrize("solver", ["auto", "picked", "entropic"])
def test_batches_match_as_one_by_one_and_plans_are_cached(solver, large, monkeypatch):
    monkeypatch.setattr("unalike.matching.transport.LARGE", large)
    model, _, groups = build_case("conv, batch norm, residual")
    keep = first_units(groups, 0.5)
    own, full = reindex_groups(groups, keep), model.state_dict()
    clients = [extract(permuted(full, groups, seed), groups, keep) for seed in range(3)]
    matcher = Matcher(solver=solver)
    together = matcher.transport([full] * 3, clients, groups, own, keys=["a", "b", "c"])
    alone = [
        Matcher(solver=solver).transport([full], [client], groups, own)[0] for client in clients
    ]
    assert all(
        apart(a, b) <= (1e-5 if solver == "entropic" else 0) for a, b in zip(together, alone)
    )
    monkeypatch.setattr("unalike.matching.transport.solve_plans", None)
    assert (
        apart(matcher.transport([full], [clients[1]], groups, own, keys=["b"])[0], together[1])
        < 1e-12
    )
    with pytest.raises(TypeError):
        matcher.transport([full], [clients[1]], groups, own, keys=["d"])


def test_plans_have_their_marginals_and_entropic_ones_approach_the_exact():
    torch.manual_seed(0)
    costs = torch.rand(3, 6, 4, dtype=torch.float64)
    for solver in ("exact", "entropic"):
        plan = solve_plans(costs, solver)
        torch.testing.assert_close(
            plan.sum(2), torch.full((3, 6), 1 / 6, dtype=torch.float64), atol=1e-5, rtol=0
        )
        torch.testing.assert_close(
            plan.sum(1), torch.full((3, 4), 1 / 4, dtype=torch.float64), atol=1e-5, rtol=0
        )
    assert (solve_plans(costs, "exact") > 0).flatten(1).sum(1).max() <= 9
    total_cost = lambda plan: (plan * costs).sum((1, 2))
    assert (
        total_cost(solve_plans(costs, "exact")) <= total_cost(solve_plans(costs, "entropic")) + 1e-9
    ).all()
    torch.testing.assert_close(
        total_cost(entropic_plans(costs, 0.002, 20000)),
        total_cost(solve_plans(costs, "exact")),
        atol=1e-3,
        rtol=0,
    )
    torch.testing.assert_close(
        entropic_plans(costs)[1:2], entropic_plans(costs[1:2]), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (7, 7)])
@pytest.mark.parametrize("apart", [0.0, 5.0])
def test_picked_pairs_are_the_cheapest_assignment(shape, apart):
    from scipy.optimize import linear_sum_assignment

    costs = torch.rand(20, *shape, generator=torch.Generator().manual_seed(0)) + apart * (
        1 - torch.eye(*shape)
    )
    for cost, plan in zip(costs, solve_plans(costs, "picked"), strict=True):
        expected = torch.zeros(shape)
        expected[linear_sum_assignment(cost.numpy())] = 1 / shape[1]
        assert torch.equal(plan, expected)


def test_large_layers_get_entropic_plans_by_default(monkeypatch):
    monkeypatch.setattr("unalike.matching.solvers.MAX_EXACT", 3)
    costs = torch.rand(1, 4, 4)
    assert (solve_plans(costs) > 0).sum() == 16 and (solve_plans(costs, "exact") > 0).sum() < 16
    with pytest.raises(ValueError, match="one or more of each"):
        solve_plans(torch.rand(2, 0, 3))


def test_expand_is_a_plan_of_ones():
    """If a client's units are the server's first ones, transport and expand agree on them."""
    model, _, groups = build_case("linear")
    keep = first_units(groups, 0.5)
    small = extract(model.state_dict(), groups, keep)
    (narrow_to_self,) = Matcher().transport(
        [small], [small], reindex_groups(groups, keep), reindex_groups(groups, keep)
    )
    assert (
        apart(narrow_to_self, small) < 1e-9
        and apart(expand(small, groups, keep, model.state_dict()), model.state_dict()) == 0
    )
