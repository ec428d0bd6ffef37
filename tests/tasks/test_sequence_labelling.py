"""Sequence labelling: positions that are ignored, metrics by hand, and what is refused."""

import pytest
import torch

import unalike
from unalike import FedAvg, SequenceLabelling, Training, UserError
from unalike.models.encoders import CNN
from unalike.models.series import CNN1d


def test_ignored_steps_count_for_nothing():
    task = SequenceLabelling(3)
    output = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    y = torch.tensor([[0, 1, -100, -100], [2, -100, -100, -100]])
    loss = task.loss(output, y)
    loss.backward()
    assert (output.grad[0, :, 2:] == 0).all() and (output.grad[1, :, 1:] == 0).all()
    rows = torch.stack([output[0, :, 0], output[0, :, 1], output[1, :, 0]])
    assert loss.item() == pytest.approx(
        torch.nn.functional.cross_entropy(rows, torch.tensor([0, 1, 2])).item()
    )


def test_metrics_can_be_checked_by_hand():
    """Truth 0 0 1 1, predicted 0 1 1 1: three of four; F1 of class 0 is 2/3, of class 1 4/5."""
    meter = SequenceLabelling(2).meter()
    predicted = torch.tensor([[0, 1, 1, 1, 0]])
    output = torch.nn.functional.one_hot(predicted, 2).mT.double()
    meter.add(output, torch.tensor([[0, 0, 1, 1, -100]]))
    metrics = meter.result()
    assert metrics["accuracy"] == 75
    assert metrics["macro_f1"] == pytest.approx(100 * (2 / 3 + 4 / 5) / 2)
    assert set(metrics) == {"accuracy", "macro_f1", "log_loss"}


def test_fewer_steps_are_stretched_to_the_labels():
    task = SequenceLabelling(2)
    output = torch.tensor([[[5.0, -5.0], [-5.0, 5.0]]])  # class 0, then class 1
    assert task.loss(output, torch.tensor([[0, 0, 1, 1]])) < 0.1


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (torch.tensor([[0, 3]]), "step label 3 does not fit 3 classes.*-100 where unknown"),
        (torch.tensor([[0, -1]]), "step label -1 does not fit"),
        (torch.tensor([0, 1]), r"2 axes \(n, steps\), got shape \(2,\)"),
        (torch.tensor([[0.0, 1.0]]), "whole numbers .*got torch.float32"),
    ],
)
def test_labels_that_do_not_fit_are_refused(y, message):
    with pytest.raises(ValueError, match=message):
        SequenceLabelling(3).check(y)


@pytest.mark.parametrize(
    ("model", "x", "message"),
    [
        (CNN((1, 8, 8)), torch.randn(4, 1, 8, 8), r"grid\(x\) is \(n, width, steps\)"),
        (torch.nn.Flatten(), torch.randn(4, 1, 8), "a dense task needs an encoder with grid"),
    ],
)
def test_an_encoder_without_steps_is_refused_before_the_run(tmp_path, model, x, message):
    y = torch.zeros(4, 8, dtype=torch.int64)
    client = unalike.Client("a", model, SequenceLabelling(2), train=(x, y))
    with pytest.raises(UserError, match=message):
        unalike.run(FedAvg(), [client], training=Training(rounds=1), out=tmp_path / "run")


def test_a_step_is_learnt_from_its_surroundings(tmp_path):
    """The label of a step is whether the step before it was positive."""
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(60, 1, 12, generator=draws)
    y = (x.roll(1, 2) > 0).long()[:, 0]
    y[:, 0] = -100
    client = unalike.Client(
        "a",
        lambda: CNN1d((1, 12), (16,), 16, kernel=3),
        SequenceLabelling(2),
        train=(x[:40], y[:40]),
        test=(x[40:], y[40:]),
    )
    training = Training(rounds=10, epochs=2, batch_size=8, lr=0.01)
    results = unalike.run(unalike.Local(), [client], training=training, out=tmp_path / "run")
    assert results["clients"]["a"]["value"] > 90
