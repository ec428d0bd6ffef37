"""The Muscle loss against the paper's literal sum, its limits, its temperatures and its bad inputs."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

from unalike.losses import (
    consistent_lower,
    infonce,
    information_bound,
    muscle,
    muscle_loss,
    pairwise_loss,
)
from unalike.losses.muscle import aggregate, muscle_from_aggregate, muscle_literal, positive_rows


def draw(batch, width, peers, seed=0, dtype=torch.float64):
    source = torch.Generator().manual_seed(seed)
    z, *others = torch.randn(1 + peers, batch, width, generator=source, dtype=torch.float64).to(
        dtype
    )
    return z.requires_grad_(), [other.requires_grad_() for other in others]


def assert_same(z, peers, *temperatures, loss=1e-9, gradient=1e-8):
    ours, theirs = muscle_loss(z, peers, *temperatures), muscle_literal(z, peers, *temperatures)
    torch.testing.assert_close(ours, theirs, atol=loss, rtol=loss)
    for a, b in zip(
        torch.autograd.grad(ours, [z, *peers]),
        torch.autograd.grad(theirs, [z, *peers]),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=gradient, rtol=gradient)


def matrix(peers, low, high, seed=1):
    upper = torch.rand(
        peers, peers, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).triu(1)
    return (low + (high - low) * (upper + upper.mT)).fill_diagonal_(0).tolist()


# reference


@pytest.mark.parametrize("peers", [1, 2, 3])
def test_literal_is_equation_3_term_by_term(peers):
    z, others = draw(3, 4, peers)
    t, lower = matrix(peers + 1, 0.2, 0.5), matrix(peers, 0.05, 0.2)
    rows = [normalize(z, dim=-1), *(normalize(other, dim=-1) for other in others)]
    losses = []
    for i in range(3):
        federation = {}
        for j in product(range(3), repeat=peers):
            unary = sum(rows[0][i] @ rows[1 + m][j[m]] / t[0][1 + m] for m in range(peers))
            alpha = -0.5 * sum(
                (1 / lower[m][k] - 1 / t[1 + m][1 + k]) * rows[1 + m][j[m]] @ rows[1 + k][j[k]]
                for m in range(peers)
                for k in range(peers)
                if m != k
            )
            federation[j] = (unary + alpha).exp()
        losses.append(-(federation[(i,) * peers] / sum(federation.values())).log())
    torch.testing.assert_close(
        muscle_literal(z, others, t, lower), torch.stack(losses).mean(), atol=1e-12, rtol=1e-12
    )


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    peers=st.integers(1, 4),
    batch=st.integers(1, 6),
    width=st.integers(1, 9),
    seed=st.integers(0, 99),
    temperature=st.floats(0.03, 3),
    lower=st.floats(0.01, 3),
)
def test_equals_the_literal_sum(peers, batch, width, seed, temperature, lower):
    assert_same(*draw(batch, width, peers, seed), temperature, lower)


@pytest.mark.parametrize(
    "block", [1, 7, 60, 130, 300]
)  # batch 5: heads of one and of two peers, every way to cut
@pytest.mark.parametrize("peers", [2, 3, 4])
def test_blocks_change_nothing(monkeypatch, peers, block):
    monkeypatch.setattr(muscle, "BLOCK", block)
    assert_same(*draw(5, 6, peers), 0.1, 0.06)


def test_per_pair_temperatures():
    z, peers = draw(4, 5, 3)
    full, between, lower = matrix(4, 0.1, 100.0), matrix(3, 0.1, 0.3), matrix(4, 0.04, 0.1)
    assert_same(z, peers, full, between)
    assert_same(z, peers, full, lower)
    assert_same(z, peers, [0.1, 100.0, 0.3], 0.07)
    assert_same(z, peers, torch.tensor(full), torch.tensor(lower))
    peers_only = [row[1:] for row in lower[1:]]
    torch.testing.assert_close(
        muscle_loss(z, peers, full, lower), muscle_loss(z, peers, full, peers_only)
    )


def test_one_temperature_per_peer_means_its_geometric_mean_between_peers():
    z, peers = draw(4, 5, 2)
    full = [[0, 0.1, 0.4], [0.1, 0, 0.2], [0.4, 0.2, 0]]
    torch.testing.assert_close(
        muscle_loss(z, peers, [0.1, 0.4], 0.15), muscle_loss(z, peers, full, 0.15)
    )
    torch.testing.assert_close(muscle_loss(z, peers, [0.2, 0.2]), muscle_loss(z, peers, 0.2))


@pytest.mark.parametrize("block", [2**20, 30])
def test_temperatures_can_be_learnt(monkeypatch, block):
    monkeypatch.setattr(muscle, "BLOCK", block)
    z, peers = draw(4, 5, 3)
    t, lower = (
        torch.tensor(matrix(4, 0.2, 0.5)).requires_grad_(),
        torch.tensor(matrix(3, 0.1, 0.2)).requires_grad_(),
    )
    ours = torch.autograd.grad(muscle_loss(z, peers, t, lower), [t, lower])
    theirs = torch.autograd.grad(muscle_literal(z, peers, t, lower), [t, lower])
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-8, rtol=1e-8)


def test_server_and_client_halves():
    z, peers = draw(4, 5, 3)
    S, log_alpha = aggregate(peers, 0.2, 0.15)
    rows = [normalize(peer, dim=-1) for peer in peers]
    torch.testing.assert_close(S[1 * 16 + 3 * 4 + 2], (rows[0][1] + rows[1][3] + rows[2][2]) / 0.2)
    likeness = rows[0][1] @ rows[1][3] + rows[0][1] @ rows[2][2] + rows[1][3] @ rows[2][2]
    torch.testing.assert_close(log_alpha[1 * 16 + 3 * 4 + 2], -(1 / 0.15 - 1 / 0.2) * likeness)
    torch.testing.assert_close(
        muscle_from_aggregate(z, S, log_alpha, positive_rows(4, 3)),
        muscle_loss(z, peers, 0.2, 0.15),
    )


# properties


def test_one_peer_is_infonce():
    z, (peer,) = draw(7, 5, 1)
    torch.testing.assert_close(muscle_loss(z, [peer], 0.1, 0.05), infonce(z, peer, 0.1))


@pytest.mark.parametrize("temperature", [0.2, [0.1, 0.3, 0.7]])
def test_equal_temperatures_are_pairwise(temperature):
    z, peers = draw(5, 6, 3)
    each = torch.as_tensor(temperature).double()
    lower = torch.outer(each, each).sqrt() if each.ndim else temperature
    torch.testing.assert_close(
        muscle_loss(z, peers, temperature, lower), pairwise_loss(z, peers, temperature)
    )


@pytest.mark.parametrize("peers", [2, 3, 4])
def test_order_of_peers_changes_nothing(peers):
    z, others = draw(5, 6, peers)
    torch.testing.assert_close(
        muscle_loss(z, others), muscle_loss(z, others[::-1]), atol=1e-10, rtol=1e-10
    )


def test_length_of_rows_changes_nothing():
    z, peers = draw(5, 6, 3)
    torch.testing.assert_close(
        muscle_loss(z, peers), muscle_loss(3 * z, [0.1 * peer for peer in peers])
    )


@pytest.mark.parametrize("peers", [1, 2, 3, 4])
def test_infinite_temperatures_know_nothing(peers):
    z, others = draw(6, 5, peers)
    loss = muscle_loss(z, others, math.inf, math.inf)
    torch.testing.assert_close(loss, torch.tensor(peers * math.log(6)).double())
    assert information_bound(loss, batch=6, peers=peers).abs() < 1e-6


def test_information_bound_is_what_is_left_of_all_there_is():
    assert information_bound(1.5, batch=32, peers=3) == 3 * math.log(32) - 1.5
    z = torch.eye(8)
    assert 0 < information_bound(muscle_loss(z, [z, z], 0.1, 0.1), 8, 2) <= 2 * math.log(8)


def test_consistent_lower():
    assert consistent_lower(0.2) == pytest.approx(1 / 30)
    t = [[0, 0.2, 0.3], [0.2, 0, 0.5], [0.3, 0.5, 0]]
    assert float(consistent_lower(t)[0, 1]) == pytest.approx(1 / (1 / 0.5 + 1 / (0.2 * 0.3)))
    same = torch.full((3, 3), 0.2).fill_diagonal_(0)
    torch.testing.assert_close(consistent_lower(same)[0, 1], torch.tensor(1 / 30).double())
    z, peers = draw(4, 5, 2)
    torch.testing.assert_close(
        muscle_loss(z, peers, t, consistent_lower(t)),
        muscle_literal(z, peers, t, consistent_lower(t)),
    )


@pytest.mark.parametrize("temperature", [0.2, 0.05, 0.02])
@pytest.mark.parametrize("peers", [4, 5])
def test_float32_survives_equation_22(peers, temperature):
    """gamma = 1 / t^2, up to 2500: products of exp(gamma) overflow float32, and at 0.02 float64. Noise and near copies of z as peers."""
    z, others = draw(12, 16, peers, dtype=torch.float32)
    others = [
        (z + spread * other).detach().requires_grad_()
        for spread, other in zip([0.1, 0.3, 1, 3, 10], others)
    ]
    lower = consistent_lower(temperature)
    ours, exact = (
        muscle_loss(a, b, temperature, lower)
        for a, b in ((z, others), (z.double(), [other.double() for other in others]))
    )
    assert ours.isfinite() and ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), exact, atol=0, rtol=1e-6)
    ours, exact = torch.autograd.grad(ours, [z, *others]), torch.autograd.grad(exact, [z, *others])
    for a, b in zip(ours, exact, strict=True):
        assert a.isfinite().all() and (a - b).norm() <= 1e-5 * b.norm()


@pytest.mark.parametrize("peers", [3, 4, 5])
def test_float32_at_the_usual_temperatures(peers):
    z, others = draw(12, 16, peers, dtype=torch.float32)
    ours, exact = (
        muscle_loss(z, others),
        muscle_loss(z.double(), [other.double() for other in others]),
    )
    torch.testing.assert_close(ours.double(), exact, atol=0, rtol=1e-6)
    for a, b in zip(
        torch.autograd.grad(ours, [z, *others]),
        torch.autograd.grad(exact, [z, *others]),
        strict=True,
    ):
        assert (a - b).norm() <= 1e-5 * b.norm()


@pytest.mark.parametrize(
    "temperature, dtype", [(0.006, torch.float64), (0.006, torch.float32), (0.06, torch.float32)]
)
@pytest.mark.parametrize("peers", [2, 3, 4])
def test_coldest_and_most_opposed_rows(peers, temperature, dtype):
    """All likenesses are 1 or -1: the widest range of logits there is."""
    signs = torch.randn(peers + 1, 4, 1, generator=torch.Generator().manual_seed(3)).sign()
    z, *others = (signs * torch.ones(3)).to(dtype).unbind()
    z, others = z.requires_grad_(), [other.requires_grad_() for other in others]
    for lower in (temperature, 0.06 if temperature == 0.06 else consistent_lower(temperature)):
        exact = muscle_literal(z.double(), [other.double() for other in others], temperature, lower)
        ours = muscle_loss(z, others, temperature, lower)
        torch.testing.assert_close(ours.double(), exact, atol=1e-5, rtol=1e-5)
        assert all(
            gradient.isfinite().all() for gradient in torch.autograd.grad(ours, [z, *others])
        )


@pytest.mark.parametrize("block", [2**20, 30])
@pytest.mark.parametrize("peers", [1, 2, 3, 4])
def test_many_clients_at_once(monkeypatch, peers, block):
    monkeypatch.setattr(muscle, "BLOCK", block)
    z, others = torch.randn(3, 4, 5).double(), torch.randn(3, peers, 4, 5).double()
    one_by_one = torch.stack([muscle_loss(a, list(b)) for a, b in zip(z, others, strict=True)])
    torch.testing.assert_close(
        torch.func.vmap(lambda a, b: muscle_loss(a, b.unbind()))(z, others), one_by_one
    )
    gradients = torch.func.vmap(
        torch.func.grad(lambda a, b: muscle_loss(a, b.unbind()), argnums=(0, 1))
    )(z, others)
    z.requires_grad_(), others.requires_grad_()
    literal = torch.stack(
        [muscle_literal(a, list(b)) for a, b in zip(z, others, strict=True)]
    ).sum()
    for a, b in zip(gradients, torch.autograd.grad(literal, [z, others]), strict=True):
        torch.testing.assert_close(a, b, atol=1e-8, rtol=1e-8)


def test_peers_without_gradient_cost_none():
    z, peers = draw(4, 5, 3)
    detached = [peer.detach() for peer in peers]
    torch.testing.assert_close(
        *(torch.autograd.grad(muscle_loss(z, others), z)[0] for others in (peers, detached))
    )


# bad input


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda z: muscle_loss(z, []), "at least one peer"),
        (lambda z: aggregate([]), "at least one peer"),
        (lambda z: muscle_loss(z, [z, z[:3]]), r"\(4, 5\) and \[\(4, 5\), \(3, 5\)\]"),
        (lambda z: muscle_loss(z[0], [z[0]]), r"one shape \(B, d\)"),
        (lambda z: muscle_loss(z, [z, z], 0.0), "at least 0.006, got 0.0"),
        (lambda z: muscle_loss(z, [z, z], 0.2, -1), "above 0, got -1"),
        (lambda z: muscle_loss(z, [z, z], math.nan), "at least 0.006"),
        (lambda z: muscle_loss(z, [z, z], [0.2, 0.2, 0.2]), r"2 of them .* got shape \(3,\)"),
        (lambda z: muscle_loss(z, [z, z], 0.2, [0.1, 0.1]), r"\(2, 2\) matrix .* got shape \(2,\)"),
        (lambda z: muscle_loss(z, [z, z], 0.2, [[0, 0.1], [0.2, 0]]), "symmetric"),
        (
            lambda z: muscle_from_aggregate(z, *aggregate([z, z]), positive_rows(3, 2)),
            r"\(16, 5\), \(16,\) and \(3,\)",
        ),
    ],
)
def test_says_what_is_wrong(call, words):
    with pytest.raises(ValueError, match=words):
        call(torch.randn(4, 5))
