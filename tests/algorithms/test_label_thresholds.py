"""Thresholds of labels, chosen on training rows and moved into the biases of the head."""

from functools import partial

import pytest
import torch
from torch import nn

import unalike
from unalike import Client, Training
from unalike.algorithms import FedAvg, FedNCA, HeteroFL
from unalike.base.errors import UserError
from unalike.methods.label_thresholds import best_thresholds, count_hits, shift_outputs
from unalike.models import CNN
from unalike.tasks import MultiLabel

LABELS = 3


def rows(count, seed):
    """Images whose mean brightness decides about the first label; the second is rare."""
    source = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 1, 8, 8, generator=source)
    y = torch.rand(count, LABELS, generator=source) < torch.tensor([0.5, 0.15, 0.3])
    x = x + y[:, :1, None, None]
    return x, y.float()


def client(id):
    return Client(
        id=id, model=partial(CNN, (1, 8, 8), (4, 8), 16), task=MultiLabel(LABELS),
        train=rows(60, ord(id)), test=rows(40, 50 + ord(id)), dtype=torch.float64,
    )  # fmt: skip


def test_counts_by_hand():
    """Logits 2, -1 and 0.6, the first and the last label present: at 0 both guesses are right."""
    counts = count_hits(torch.tensor([[2.0], [-1.0], [0.6]]), torch.tensor([[1.0], [0.0], [1.0]]))
    zero, one = 24, 28  # of the grid: -6, -5.75, ...
    assert counts[0, zero].tolist() == [2, 2, 2]
    assert counts[0, one].tolist() == [1, 1, 2]
    assert counts[0, 0].tolist() == [2, 3, 2]


def test_unknown_labels_count_nowhere():
    y = torch.tensor([[1.0], [-1.0], [float("nan")]])
    counts = count_hits(torch.tensor([[2.0], [3.0], [3.0]]), y)
    assert counts[0, 24].tolist() == [1, 1, 1]


def test_the_best_threshold_is_of_the_sum_of_all_clients():
    """Alone the first client would take any threshold below 1, the second one above 0.5."""
    one = count_hits(torch.tensor([[1.0]]), torch.tensor([[1.0]]))
    other = count_hits(torch.tensor([[0.4], [-3.0]]), torch.tensor([[0.0], [0.0]]))
    assert best_thresholds([one]).tolist() == [0.0]
    assert best_thresholds([one, other]).tolist() == [0.5]
    assert best_thresholds([other]).tolist() == [0.0]  # nobody has the label


def test_a_threshold_becomes_part_of_the_bias():
    head = nn.Linear(4, LABELS)
    parameters = {f"head.{name}": p.detach() for name, p in head.named_parameters()}
    moved = shift_outputs(parameters, torch.tensor([1.0, 0.0, -2.0]))
    torch.testing.assert_close(
        moved["head.bias"], parameters["head.bias"] - torch.tensor([1.0, 0.0, -2.0])
    )
    assert torch.equal(moved["head.weight"], parameters["head.weight"])
    with pytest.raises(ValueError, match="a bias for each of 2 labels"):
        shift_outputs(parameters, torch.zeros(2))


@pytest.mark.parametrize("method", [FedAvg, FedNCA])
def test_ranks_stay_and_predictions_change(method):
    clients = [client("a"), client("b")]
    run = partial(
        unalike.run, clients=clients, alone=False,
        training=Training(rounds=2, batch_size=16, lr=0.01),
    )  # fmt: skip
    half, chosen = run(method()), run(method(thresholds="training"))
    for id in "ab":
        before, after = half.clients[id].metrics, chosen.clients[id].metrics
        assert before["macro_auc"] == pytest.approx(after["macro_auc"])
        assert before["mAP"] == pytest.approx(after["mAP"])
        assert before["macro_f1"] != after["macro_f1"]


def test_methods_without_one_merged_model_refuse():
    with pytest.raises(UserError, match=r"thresholds.*must be half.*HeteroFL"):
        unalike.run(HeteroFL(thresholds="training"), [client("a"), client("b")])
