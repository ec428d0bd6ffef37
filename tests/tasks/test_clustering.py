"""Clustering scores, k-means and both federated protocols, and what is refused."""

from itertools import permutations

import numpy as np
import pytest
import torch

from unalike.tasks import Clustering, clustering_scores, federated_scores, kmeans
from unalike.tasks.federated_kmeans import federated_kmeans


def blobs(rows, clusters=4, spread=0.1, seed=0):
    """Features (rows, 5) around one direction a class, and the classes."""
    draws = torch.Generator().manual_seed(seed)
    y = torch.arange(rows) % clusters
    return torch.eye(5)[y] + spread * torch.randn(rows, 5, generator=draws), y


def test_acc_is_the_best_over_all_matchings():
    draws = torch.Generator().manual_seed(0)
    y, groups = torch.randint(4, (2, 60), generator=draws)
    best = max(
        np.mean([order[g] == t for g, t in zip(groups, y)]) for order in permutations(range(4))
    )
    assert clustering_scores(groups, y)["acc"] == pytest.approx(100 * best)


def test_nmi_and_ari_follow_their_formulas():
    draws = torch.Generator().manual_seed(1)
    y, groups = torch.randint(3, (2, 50), generator=draws).numpy()
    joint = np.array([[np.mean((y == a) & (groups == b)) for b in range(3)] for a in range(3)])
    p, q = joint.sum(1), joint.sum(0)
    information = sum(
        joint[a, b] * np.log(joint[a, b] / p[a] / q[b]) for a in range(3) for b in range(3)
    )
    entropies = -(p * np.log(p)).sum() - (q * np.log(q)).sum()
    same_class, same_group = y[:, None] == y, groups[:, None] == groups
    i, j = np.triu_indices(50, 1)
    both, one, other = (
        (same_class & same_group)[i, j].sum(),
        same_class[i, j].sum(),
        same_group[i, j].sum(),
    )
    chance = one * other / len(i)
    scores = clustering_scores(torch.from_numpy(groups), torch.from_numpy(y))
    assert scores["nmi"] == pytest.approx(100 * information / (entropies / 2))
    assert scores["ari"] == pytest.approx(100 * (both - chance) / ((one + other) / 2 - chance))


def test_clusters_have_no_order_and_may_be_more_or_fewer_than_classes():
    y = torch.tensor([0, 0, 1, 1, 2, 2])
    assert clustering_scores((y + 5) * 7, y) == {"acc": 100, "nmi": 100, "ari": 100}
    assert clustering_scores(torch.zeros(6, dtype=torch.int64), y)["acc"] == pytest.approx(100 / 3)
    assert clustering_scores(torch.arange(6), y)["acc"] == pytest.approx(50)


def test_unknown_labels_count_for_nothing():
    _, y = blobs(40)
    more = torch.cat([y, torch.full((5,), -1)])
    assert clustering_scores(torch.cat([y, torch.zeros(5, dtype=torch.int64)]), more)["acc"] == 100


def test_the_meter_takes_clusters_or_scores():
    _, y = blobs(40)
    groups = torch.randint(4, (40,), generator=torch.Generator().manual_seed(2))
    results = []
    for output in (
        groups,
        torch.nn.functional.one_hot(groups, 4).float().requires_grad_(),
        groups.to(torch.int32),
    ):
        meter = Clustering(4).meter()
        for rows in torch.arange(40).split(7):
            meter.add(output[rows], y[rows])
        results.append(meter.result())
    assert results[0] == results[1] == results[2] == clustering_scores(groups, y)


def test_the_head_is_the_matrix_of_equation_4():
    head = Clustering(4).head(8)
    assert [tuple(p.shape) for p in head.parameters()] == [(4, 8)]


@pytest.mark.parametrize("word", ["loss", "imitate"])
def test_clustering_has_no_loss_on_labels(word):
    with pytest.raises(ValueError, match=r"clustering has no .* brings its own loss"):
        getattr(Clustering(4), word)(torch.zeros(2, 4), torch.zeros(2, 4))


def test_kmeans_is_reproducible_and_can_start_from_centres():
    x, y = blobs(60)
    groups, centres = kmeans(x, 4, generator_seed=2**40 + 1, starts=5)
    again, _ = kmeans(x, 4, generator_seed=2**40 + 1, starts=5)
    assert torch.equal(groups, again) and clustering_scores(groups, y)["acc"] == 100
    assert groups.dtype == torch.int64 and centres.shape == (4, 5)
    torch.testing.assert_close(
        centres, torch.stack([x[groups == k].double().mean(0) for k in range(4)])
    )
    other, _ = blobs(30, seed=1)
    named, _ = kmeans(other, 4, 0, centres=centres)  # the same group has the same number
    assert torch.equal(named, torch.cdist(other.double(), centres).argmin(1))


def test_an_empty_cluster_gets_the_farthest_row_as_in_scikit_learn():
    from sklearn.cluster import KMeans

    draws = torch.Generator().manual_seed(0)
    spots = torch.tensor([[5.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 5.0, 0.0]], dtype=torch.float64)
    x = spots.repeat_interleave(torch.tensor([40, 60, 30]), 0) + 0.2 * torch.randn(
        130, 3, generator=draws, dtype=torch.float64
    )
    far_off = torch.tensor(
        [[100.0, 0.0, 0.0], [0.0, 0.0, 0.0], [200.0, 3.0, 0.0]], dtype=torch.float64
    )
    groups, _ = kmeans(x, 3, 0, centres=far_off)
    assert (
        groups.tolist() == KMeans(3, init=far_off.numpy(), n_init=1).fit(x.numpy()).labels_.tolist()
    )


def test_kmeans_takes_constant_features():
    groups, centres = kmeans(torch.ones(6, 3), 4, 0, starts=2)
    assert len(groups.unique()) == 1 and centres.isfinite().all()


def test_both_protocols_find_clear_clusters():
    clients = [blobs(40, seed=seed) for seed in range(3)]
    scores = federated_scores([x for x, _ in clients], [y for _, y in clients], 4, seed=0, starts=5)
    assert scores == {
        "acc": 100,
        "nmi": 100,
        "ari": 100,
        "joint": {"acc": 100, "nmi": 100, "ari": 100},
    }


def test_the_first_protocol_is_the_first_client_starting_the_others():
    clients = [blobs(40, spread=0.6, seed=seed) for seed in range(3)]
    features, y = [x for x, _ in clients], torch.cat([y for _, y in clients])
    first, centres = kmeans(features[0], 4, 3, starts=10)
    groups = torch.cat([first, *(kmeans(x, 4, 3, centres=centres)[0] for x in features[1:])])
    joint, _ = kmeans(torch.cat(features), 4, 3, starts=10)
    scores = federated_scores(
        features, [y for _, y in clients], 4, 3, starts=10, normalise=False, protocol="first"
    )
    assert scores == {**clustering_scores(groups, y), "joint": clustering_scores(joint, y)}


def test_federated_kmeans_ends_where_kmeans_on_all_rows_ends():
    """It finds the same optimum though no client's rows are like the others' (two classes each)."""
    x, y = blobs(160, spread=0.4)
    parts = [(y == a) | (y == b) for a, b in ((0, 1), (1, 2), (2, 3), (3, 0))]
    parts[0][::3] = parts[2][::3] = False
    features = [x[part].double() for part in parts]
    groups, centres = federated_kmeans(features, 4, seed=0, starts=5)
    rows = torch.cat(features)
    joint, joint_centres = kmeans(rows, 4, 0, starts=20)
    assert torch.cdist(centres, joint_centres.double()).amin(1).max() < 1e-9
    assert clustering_scores(torch.cat(groups), joint)["acc"] == 100


def test_the_first_client_does_not_decide_alone():
    """It has few rows of two of four classes: the protocol "first" splits them, "least" does not."""
    x, y = blobs(160, spread=0.1)
    few = (y < 2).nonzero().flatten()[:8]
    features, labels = [x[few], x], [y[few], y]
    acc = {}
    for protocol in ("first", "least"):
        scores = federated_scores(features, labels, 4, 0, 20, normalise=False, protocol=protocol)
        acc[protocol] = scores["acc"]
    assert acc["first"] < acc["least"] == 100


def test_clients_that_disagree_score_low_unless_they_agree_with_the_first():
    """Turned features: each client is clear by itself and by its own centres, but the classes stand elsewhere."""
    x, y = blobs(40)
    turned = x.roll(1, dims=1)
    scores = federated_scores([x, turned], [y, y], 4, seed=0, starts=5)
    assert scores["acc"] < 100 and scores["joint"]["acc"] < 100
    assert federated_scores([turned], [y], 4, seed=0, starts=5)["acc"] == 100


def test_length_matters_only_without_normalising():
    x, y = blobs(80)
    stretched = x * torch.linspace(0.1, 10, 80)[:, None]
    assert federated_scores([stretched], [y], 4, 0, starts=5)["acc"] == 100
    assert federated_scores([stretched], [y], 4, 0, starts=5, normalise=False)["acc"] < 100


def test_without_labels_there_are_no_scores():
    _, y = blobs(40)
    assert clustering_scores(y, torch.full_like(y, -1)) == {}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x, y: kmeans(x, 41, 0),
            "cannot find 41 clusters in 40 samples: lower the clusters or give more samples",
        ),
        (lambda x, y: kmeans(x, 0, 0), "cannot find 0 clusters"),
        (lambda x, y: kmeans(x[0], 2, 0), r"\(n, width\), got shape \(5,\)"),
        (
            lambda x, y: kmeans(torch.where(x > 1, torch.nan, x), 4, 0),
            "NaN or infinity in .* of 40 samples",
        ),
        (lambda x, y: kmeans(x, 4, 0, centres=x[:3]), r"4 centres of width 5, got shape \(3, 5\)"),
        (
            lambda x, y: federated_scores([x, x[:3]], [y, y[:3]], 4, 0, 1, protocol="first"),
            "client 1: k-means cannot find 4 clusters in 3 samples",
        ),
        (
            lambda x, y: federated_scores([x[:2], x[:3]], [y[:2], y[:3]], 4, 0),
            r"no client has the 4 rows that 4 clusters need, got \[2, 3\]",
        ),
        (lambda x, y: federated_scores([], [], 4, 0), "one client or more"),
        (
            lambda x, y: federated_scores([x, x], [y, y[:3]], 4, 0),
            r"rows \[40, 40\] and labels \[40, 3\]",
        ),
        (lambda x, y: clustering_scores(y, y[:3]), r"\(40,\) torch.int64 and \(3,\)"),
        (lambda x, y: clustering_scores(y.float(), y), "whole numbers"),
        (
            lambda x, y: Clustering(3).check(y),
            "label 3 does not fit 3 clusters: labels run from 0 to 2, -1 where unknown",
        ),
        (lambda x, y: Clustering(4).check(x), "clustering labels have 1 axes"),
    ],
)
def test_invalid_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(*blobs(40))
