"""FedMP and AdaptiveFL: which units a client gets, and what becomes of its upload."""

import torch

from unalike.algorithms import AdaptiveFL, FedMP
from unalike.algorithms.adaptivefl import pool
from unalike.algorithms.fedmp import unit_norms
from unalike.methods.submodels import masked_mean, numel
from unalike.models.submodels import extract, first_units

CLOSE = 1e-9


def registered(toys, folder, method, capacity=0.5):
    """A federation of one whole and one narrow client whose models the server has."""
    clients = [toys.client("a"), toys.client("b", capacity=capacity)]
    fed = toys.federation(folder, method, clients)
    fed.start_round(1)
    method.register_clients(fed)
    return fed


def test_fedmp_keeps_units_with_the_largest_l1_norm(toys, tmp_path):
    method = FedMP()
    fed = registered(toys, tmp_path, method)
    model, groups = method.server_model(fed, "b"), method.channel_groups(fed, "b")
    for group, units in zip(groups, method.select_units(fed, "b"), strict=True):
        outputs = [p for p in group.slices if p.is_output and model[p.tensor].dim() > 1]
        (part,) = outputs
        norms = [float(model[part.tensor][unit].abs().sum()) for unit in range(group.units)]
        assert (
            max(abs(unit_norms(model, group) - torch.tensor(norms, dtype=torch.float64))) <= CLOSE
        )
        best = sorted(range(group.units), key=lambda unit: -norms[unit])[: group.units // 2]
        assert units.tolist() == sorted(best)


def test_fedmp_counts_pruned_entries_with_the_residual(toys, tmp_path):
    """R2SP: mean over clients of (upload at its places, the server's value elsewhere)."""
    method = FedMP()
    fed = registered(toys, tmp_path, method)
    model, groups = method.server_model(fed, "b"), method.channel_groups(fed, "b")
    units = {c: method.select_units(fed, c) for c in "ab"}
    states = {c: {n: t + 1.0 for n, t in extract(model, groups, units[c]).items()} for c in "ab"}
    mean = masked_mean(model, method.place_uploads(fed, model, states), {"a": 3.0, "b": 1.0})
    name = next(part.tensor for part in groups[0].slices if part.is_output)
    for unit in range(groups[0].units):
        moved = mean[name][unit] - model[name][unit]
        expected = 1.0 if unit in units["b"][0] else 0.75
        assert (moved - expected).abs().max() <= CLOSE


def test_adaptivefl_gives_the_largest_submodel_within_the_budget(toys, tmp_path):
    method = AdaptiveFL()
    fed = registered(toys, tmp_path, method, capacity=0.7)
    model, groups = method.server_model(fed, "b"), method.channel_groups(fed, "b")
    size = lambda units: numel(extract(model, groups, units))
    budget = size(first_units(groups, 0.7))
    fitting = [size(units) for units in pool(groups, method.ratios) if size(units) <= budget]
    assert size(method.select_units(fed, "b")) == max(fitting)
    assert size(method.select_units(fed, "a")) == numel(model)


def test_adaptivefl_pool_has_whole_first_layers(toys, tmp_path):
    """Two layers of 8 units, ratio 0.4: (4, 4), (8, 4) and (8, 8)."""
    method = AdaptiveFL()
    groups = method.channel_groups(registered(toys, tmp_path, method), "a")[:2]
    counts = [[len(units) for units in submodel] for submodel in pool(groups, (0.4,))]
    assert counts == [[4, 4], [8, 4], [8, 8]]
