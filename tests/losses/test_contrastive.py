"""Pairwise and Gramian contrast against their formulas, their limits and their bad inputs."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from unalike.losses import gramian_loss, infonce, nt_xent, pairwise_loss
from unalike.losses.contrastive import relaxed_contrast


def draw(batch, width, peers, seed=0):
    z, *others = torch.randn(
        1 + peers, batch, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return z.requires_grad_(), [other.requires_grad_() for other in others]


def naive_gramian(z, peers, temperature):
    """One determinant for each anchor i and each j."""
    z, peers = normalize(z, dim=-1), [normalize(peer, dim=-1) for peer in peers]
    tuples = [
        [torch.stack([z[i], *(peer[j] for peer in peers)]) for j in range(len(z))]
        for i in range(len(z))
    ]
    volume = torch.stack(
        [torch.stack([torch.linalg.det(rows @ rows.mT).sqrt() for rows in line]) for line in tuples]
    )
    return cross_entropy(-volume / temperature, torch.arange(len(z)))


def test_infonce_is_cross_entropy_on_cosines():
    z, (peer,) = draw(6, 4, 1)
    cosines = torch.nn.functional.cosine_similarity(z[:, None], peer[None], dim=-1)
    torch.testing.assert_close(infonce(z, peer, 0.3), cross_entropy(cosines / 0.3, torch.arange(6)))


def test_infonce_limits():
    z, (peer,) = draw(6, 4, 1)
    torch.testing.assert_close(infonce(z, peer, math.inf), torch.tensor(math.log(6)).double())
    torch.testing.assert_close(infonce(z, peer), infonce(5 * z, 0.1 * peer))
    assert infonce(torch.eye(6), torch.eye(6), 0.01) < 1e-6


def test_pairwise_sums_over_peers():
    z, peers = draw(6, 4, 3)
    torch.testing.assert_close(
        pairwise_loss(z, peers, 0.3), sum(infonce(z, peer, 0.3) for peer in peers)
    )
    each = [0.1, 0.3, 100.0]
    torch.testing.assert_close(
        pairwise_loss(z, peers, each),
        sum(infonce(z, peer, t) for peer, t in zip(peers, each, strict=True)),
    )
    torch.testing.assert_close(pairwise_loss(z, peers), pairwise_loss(z, peers[::-1]))


@pytest.mark.parametrize("peers", [1, 2, 3, 4, 5])
def test_gramian_is_one_determinant_per_pair(peers):
    z, others = draw(5, 8, peers)
    ours, naive = gramian_loss(z, others, 0.2), naive_gramian(z, others, 0.2)
    torch.testing.assert_close(ours, naive, atol=1e-9, rtol=1e-9)
    for a, b in zip(
        torch.autograd.grad(ours, [z, *others]),
        torch.autograd.grad(naive, [z, *others]),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize(
    "kind", ["equal peers", "peers equal to the anchor", "more peers than dimensions"]
)
def test_gramian_gradient_is_finite_at_zero_volume(kind):
    z, (a, b, c) = draw(5, 3, 3)
    peers = {
        "equal peers": [a, a],
        "peers equal to the anchor": [z, z],
        "more peers than dimensions": [a, b, c],
    }[kind]
    loss = gramian_loss(z, peers)
    gradients = torch.autograd.grad(loss, [z, a], allow_unused=True)
    assert loss.isfinite() and all(g.isfinite().all() for g in gradients if g is not None)


def test_gramian_falls_with_the_volume_of_the_positives():
    z, peers = draw(6, 8, 2)
    near = [z + 0.1 * peers[0], peers[1]]
    assert (
        gramian_loss(z, near[:1], 0.05) < gramian_loss(z, near, 0.05) < gramian_loss(z, peers, 0.05)
    )
    torch.testing.assert_close(gramian_loss(z, peers), gramian_loss(2 * z, peers[::-1]))


def test_many_clients_at_once():
    z, peers = torch.randn(3, 4, 5).double(), torch.randn(3, 2, 4, 5).double()
    for loss in (pairwise_loss, gramian_loss):
        one_by_one = torch.stack([loss(a, list(b)) for a, b in zip(z, peers, strict=True)])
        torch.testing.assert_close(
            torch.func.vmap(lambda a, b, loss=loss: loss(a, b.unbind()))(z, peers), one_by_one
        )


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda z: infonce(z, z[:3]), r"\(4, 5\) and \(3, 5\)"),
        (lambda z: pairwise_loss(z, []), "at least one peer"),
        (lambda z: gramian_loss(z, []), "at least one peer"),
        (lambda z: gramian_loss(z, [z, z[:, :2]]), r"\(4, 2\)"),
        (lambda z: pairwise_loss(z, [z, z], [0.1]), r"one per peer \(2\), got shape \(1,\)"),
    ],
)
def test_says_what_is_wrong(call, words):
    with pytest.raises(ValueError, match=words):
        call(torch.randn(4, 5))


def test_nt_xent_is_the_literal_sum():
    z, other = torch.randn(5, 3).double(), torch.randn(5, 3).double()
    rows = torch.nn.functional.normalize(torch.cat([z, other]), dim=-1)
    costs = []
    for i in range(10):
        others = [(rows[i] @ rows[j] / 0.5).exp() for j in range(10) if j != i]
        costs.append(-((rows[i] @ rows[(i + 5) % 10] / 0.5).exp() / sum(others)).log())
    assert torch.allclose(nt_xent(z, other, 0.5), torch.stack(costs).mean(), rtol=1e-12)
    assert nt_xent(z[:0], other[:0]) == 0
    with pytest.raises(ValueError, match="one shape"):
        nt_xent(z, other[:3])


def test_relaxed_contrast_is_its_definition():
    z = torch.randn(7, 4, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    y = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    rows = torch.nn.functional.normalize(z, dim=-1)
    cosines = rows @ rows.mT
    costs, pushed = [], []
    for i in range(7):
        group_key = [cosines[i, j] for j in range(7) if j != i and y[j] == y[i]]
        foreign = sorted((cosines[i, j] for j in range(7) if y[j] != y[i]), reverse=True)[:2]
        far = min(group_key)
        costs.append(
            -(far / 0.1).exp().div((far / 0.1).exp() + sum((c / 0.1).exp() for c in foreign)).log()
        )
        pushed += [(c - 0.1) / 0.1 for c in group_key if c > 0.1]
    by_hand = sum(costs) / 7 + sum(pushed) / max(len(pushed), 1)
    assert pushed and torch.allclose(
        relaxed_contrast(z, y[:, None] == torch.arange(3), 0.1, 0.1), by_hand
    )


def test_relaxed_contrast_of_nothing_to_contrast_is_nothing():
    z = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for labels in (torch.eye(3) > 0, torch.zeros(3, 2) > 0):  # nobody of a kind; no labels at all
        loss = relaxed_contrast(z, labels)
        assert loss.item() == 0 and torch.isfinite(torch.autograd.grad(loss, z)[0]).all()
    assert relaxed_contrast(z[:1], torch.ones(1, 2) > 0).item() == 0
    with pytest.raises(ValueError, match="every row has labels"):
        relaxed_contrast(z, torch.ones(2, 2) > 0)
