"""Survival: Cox's loss and the C-index against their definitions, and what is refused."""

import math

import pytest
import torch
from torch import nn

import unalike
from unalike import FedAvg, Survival, Training, UserError


def sample(rows, seed):
    """Risks, times with ties, and events, some of them tied with censored times."""
    draws = torch.Generator().manual_seed(seed)
    risk = torch.randn(rows, generator=draws, dtype=torch.float64).mul(3).round().div(3)
    time = torch.randint(1, 9, (rows,), generator=draws).double()
    event = (torch.rand(rows, generator=draws) < 0.6).double()
    return risk, time, event


def test_the_loss_can_be_checked_by_hand():
    """Events at 1 (risk 0, all three at risk) and 2 (risk log 2, two at risk), one censored at 3.

    log(1 + 2 + 1) - 0, and log(2 + 1) - log 2: mean of log 4 and log 1.5.
    """
    y = torch.tensor([[1.0, 1.0], [2.0, 1.0], [3.0, 0.0]])
    output = torch.tensor([[0.0], [math.log(2)], [0.0]])
    assert Survival().loss(output, y).item() == pytest.approx((math.log(4) + math.log(1.5)) / 2)


def test_the_loss_is_the_literal_partial_likelihood():
    risk, time, event = sample(40, 0)
    total = 0.0
    for i in range(40):
        if event[i]:
            at_risk = [math.exp(risk[j]) for j in range(40) if time[j] >= time[i]]
            total += math.log(sum(at_risk)) - float(risk[i])
    loss = Survival().loss(risk[:, None], torch.stack([time, event], 1))
    assert float(loss) == pytest.approx(total / float(event.sum()), abs=1e-12)


def test_a_batch_without_events_has_loss_and_gradient_0():
    output = torch.randn(4, 1, requires_grad=True)
    loss = Survival().loss(output, torch.stack([torch.arange(4.0), torch.zeros(4)], 1))
    loss.backward()
    assert loss == 0 and (output.grad == 0).all()


def test_the_loss_runs_for_many_clients_at_once():
    risk, time, event = sample(12, 3)
    y = torch.stack([time, event], 1).reshape(3, 4, 2)
    output = risk.reshape(3, 4, 1)
    together = torch.func.vmap(Survival().loss)(output, y)
    assert torch.allclose(together, torch.stack(list(map(Survival().loss, output, y))))


@pytest.mark.parametrize("seed", range(3))
def test_the_c_index_is_the_share_of_pairs_in_order(seed):
    """Harrell's definition, pair by pair: ties in risk count half; two events at once do not."""
    risk, time, event = sample(60, seed)
    hits, pairs = 0.0, 0
    for i in range(60):
        for j in range(60):
            earlier = time[i] < time[j] or (time[i] == time[j] and not event[j])
            if event[i] and i != j and earlier:
                pairs += 1
                hits += 1.0 if risk[i] > risk[j] else 0.5 if risk[i] == risk[j] else 0.0
    meter = Survival().meter()
    for part in torch.arange(60).split(25):
        meter.add(risk[part, None], torch.stack([time, event], 1)[part])
    assert meter.result()["c_index"] == pytest.approx(100 * hits / pairs, abs=1e-10)


def test_perfect_and_reversed_order():
    y = torch.tensor([[1.0, 1.0], [2.0, 1.0], [3.0, 0.0], [2.5, 0.0]])
    for sign, expected in ((-1, 100), (1, 0)):
        meter = Survival().meter()
        meter.add(sign * y[:, :1], y)
        assert meter.result()["c_index"] == expected


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (torch.tensor([[1.0, 1.0], [-2.0, 0.0]]), "0 or more, got -2 in 1 of 2 rows"),
        (torch.tensor([[torch.nan, 1.0]]), "finite, got NaN or infinity in 1 of 1 rows"),
        (torch.tensor([[1.0, 0.5]]), "event is 1 where it was seen.*got 0.5"),
        (torch.tensor([1.0, 2.0]), r"\(n, 2\), time and event, got \(2,\)"),
        (torch.tensor([[1, 1]]), "floats .*got torch.int64"),
    ],
)
def test_targets_that_do_not_fit_are_refused(y, message):
    with pytest.raises(ValueError, match=message):
        Survival().check(y)


def test_a_client_without_events_is_refused_before_the_run(tmp_path):
    y = torch.stack([torch.arange(1.0, 9), torch.zeros(8)], 1)
    client = unalike.Client("a", nn.Linear(2, 4), Survival(), train=(torch.randn(8, 2), y))
    with pytest.raises(UserError, match="none of its 8 training samples has an event"):
        unalike.run(FedAvg(), [client], training=Training(rounds=1), out=tmp_path / "run")
    with pytest.raises(ValueError, match="one event, got 2: a, b"):
        Survival(("a", "b"))
