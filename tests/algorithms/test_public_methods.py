"""FedMD, KT-pFL and FCCL against their formulas, in float64."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from unalike.algorithms import FCCL, FedMD, KTpFL
from unalike.algorithms.fccl import correlation_loss

CLOSE = 1e-9


def test_fedmd_digests_by_the_mean_squared_difference(by_hand):
    program = by_hand.program(FedMD())
    x, _ = by_hand.batch(program)
    teacher = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scores = program.model(x)
    literal = 0.0
    for row, target in zip(scores, teacher, strict=True):
        literal += sum((row[j] - row.mean() - target[j]) ** 2 for j in range(4)) / 32
    assert (program.distillation_loss(x, teacher) - literal).abs() <= CLOSE


def test_fedmd_consensus_is_the_mean_of_centred_scores(toys, tmp_path, monkeypatch):
    fed = toys.federation(tmp_path, FedMD(batch=8), toys.clients())
    fed.start_round(1)
    sent, seen = {}, {}
    usual = fed.call

    def call(operation, **arguments):
        if operation == "distil":
            seen.update({c: body["teacher"] for c, body in arguments["per_client"].items()})
        replies = usual(operation, **arguments)
        if operation == "opinion":
            sent.update(replies)
        return replies

    monkeypatch.setattr(fed, "call", call)
    FedMD(batch=8).learn_from_public(fed, 1)
    mean = sum(sent.values()) / 3
    assert all((teacher - mean).abs().max() <= CLOSE for teacher in seen.values())
    assert set(seen) == set("abc")


def test_ktpfl_coefficients_descend_eq_5(toys):
    draw = torch.Generator().manual_seed(0)
    stacked = torch.rand(3, 5, 4, dtype=torch.float64, generator=draw).softmax(2)
    weights, own = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64), stacked[0]
    c = weights.clone().requires_grad_()
    literal = 0.0
    for row in range(5):
        for label in range(4):
            mixture = sum(c[m] * stacked[m, row, label] for m in range(3))
            p = own[row, label]
            literal = literal + p * (p.log() - mixture.log()) / 5
    literal = literal + 0.7 * sum((c[m] - 1 / 3) ** 2 for m in range(3))
    (gradient,) = torch.autograd.grad(literal, c)
    expected = (weights - 0.1 * gradient).clamp(min=0)
    got = KTpFL(server_lr=0.1).descend(weights, stacked, own)
    assert (got - expected / expected.sum()).abs().max() <= CLOSE


def test_ktpfl_mixtures_start_even_and_are_remembered():
    soft = {c: torch.full((2, 2), 0.5, dtype=torch.float64) for c in "ab"}
    soft["b"] = torch.tensor([[0.9, 0.1], [0.2, 0.8]], dtype=torch.float64)
    coefficients = {}
    mixtures = KTpFL(server_lr=1e-12).mix(coefficients, soft)
    assert (mixtures["a"] - (soft["a"] + soft["b"]) / 2).abs().max() <= CLOSE
    for _ in range(20):
        KTpFL(server_lr=0.5).mix(coefficients, soft)
    assert coefficients["a"]["a"] > 0.5 and sum(coefficients["a"].values()) == pytest.approx(1)


def test_ktpfl_distils_at_a_temperature(by_hand):
    program = by_hand.program(KTpFL(temperature=4.0))
    x, _ = by_hand.batch(program)
    teacher = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    teacher = teacher.softmax(1)
    literal = -(teacher * (program.model(x) / 4).log_softmax(1)).sum(1).mean()
    assert (program.distillation_loss(x, teacher.log()) - literal).abs() <= CLOSE


def test_fccl_correlation_is_eq_3():
    draw = torch.Generator().manual_seed(0)
    one, other = (torch.randn(6, 3, dtype=torch.float64, generator=draw) for _ in range(2))
    literal = 0.0
    for i in range(3):
        for j in range(3):
            a, b = one[:, i] - one[:, i].mean(), other[:, j] - other[:, j].mean()
            norm = ((a**2).mean() + 1e-5).sqrt() * ((b**2).mean() + 1e-5).sqrt()
            m = (a * b).mean() / norm
            literal += (1 - m) ** 2 if i == j else 0.2 * (1 + m) ** 2
    assert (correlation_loss(one, other, 0.2) - literal).abs() <= CLOSE


def test_fccl_learns_from_itself_before_and_from_its_first_model(by_hand):
    program = by_hand.program(FCCL(dual=0.3))
    program.round = 1
    program.train()
    assert program.teachers == []
    intra = by_hand.program(FCCL()).model
    intra.load_state_dict(program.memory["intra"])
    program.round = 2
    inter = by_hand.program(FCCL()).model
    inter.load_state_dict(program.model.state_dict())
    program.train()
    x, y = by_hand.batch(program)
    output = program.model(x)
    soft = lambda model: -(model(x).detach().softmax(1) * output.log_softmax(1)).sum(1).mean()
    literal = cross_entropy(output, y) + 0.3 * soft(inter) + 0.3 * soft(intra)
    assert (program.loss(x, y) - literal).abs() <= CLOSE
