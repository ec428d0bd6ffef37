"""Nobody loses: what a client keeps is decided by its own labelled data, and decided well where the case is clear."""

import copy

import pytest
import torch

from unalike.algorithms import Local
from unalike.data.samples import Samples
from unalike.safeguard import judge, safeguard
from unalike.training import optimiser_for, step


class Sealed(Samples):
    """A test set that nobody may open."""

    def __len__(self):
        return 40

    def rows(self, index):
        raise AssertionError("the test set was read")

    take = rows


@pytest.fixture
def side(toys):
    """Twelve labels, 64 unlabelled rows, and a test set under seal."""
    client = toys.client("a", rows=12, public=(toys.blobs(64, 2000)[0], None), test=Sealed())
    return Local.Side(client, Local(), toys.training(rounds=4), 0)


def learn_from_many(side, toys):
    """What a good federation would have taught: the model has seen 400 labelled rows elsewhere."""
    x, y = toys.blobs(400, 31)
    optimiser = optimiser_for(list(side.model.parameters()), side.training)
    for _ in range(60):
        step(side.client.task.loss(side.model(x.double()), y), optimiser)


def destroy(side):
    draws = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in side.model.parameters():
            p.copy_(torch.randn(p.shape, generator=draws, dtype=p.dtype))


def same(state, other):
    return state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


def test_keeps_together_where_it_is_clearly_better(side, toys):
    learn_from_many(side, toys)
    before = copy.deepcopy(side.model.state_dict())
    kept = safeguard(side, 4)
    assert kept.name == "together" and kept.log_loss["together"] < kept.log_loss["alone"]
    assert same(kept.state, before) and same(side.model.state_dict(), before)


def test_keeps_alone_where_together_was_destroyed(side, toys):
    destroy(side)
    kept = safeguard(side, 4)
    assert kept.name == "alone" and kept.log_loss["alone"] < kept.log_loss["together"]
    alone = Local.Side(side.client, Local(), side.training, 0)
    for alone.round in range(1, side.training.rounds + 1):
        alone.train()
    assert same(kept.state, alone.model.state_dict()), "alone: all rounds on all labels, from the same first weights"


def test_operation_puts_the_kept_model_in_place(side):
    destroy(side)
    reply = side.safeguard()
    assert reply["kept"] == "alone" and set(reply["log_loss"]) == {"alone", "together"}
    assert side.safeguard()["kept"] == "alone", "together is alone by now: a tie goes to alone"


def test_same_seed_same_verdict(side, toys):
    learn_from_many(side, toys)
    assert safeguard(side, 4).log_loss == safeguard(side, 4).log_loss


def test_without_a_public_set_its_own_inputs_serve(toys):
    client = toys.client("a", rows=12, public=None, test=Sealed())
    side = Local.Side(client, Local(), toys.training(rounds=4), 0)
    destroy(side)
    assert safeguard(side, 4).name == "alone"


@pytest.mark.parametrize("rows, folds", [(1, 4), (2, 4), (3, 4), (9, 4), (4, 9)])
def test_any_number_of_labels(rows, folds, toys):
    side = Local.Side(toys.client("a", rows=rows, test=Sealed()), Local(), toys.training(rounds=1), 0)
    assert all(0 <= loss < float("inf") for loss in safeguard(side, folds).log_loss.values())


def test_each_label_is_judged_once_by_a_student_that_never_saw_it(side, monkeypatch):
    """Rows that students learn from and rows they are scored on, fold by fold."""
    read, rows = [], side.client.train.rows
    monkeypatch.setattr(side.client.train, "rows", lambda index: read.append(index.tolist()) or rows(index))
    judge(side, side.model.state_dict(), side.model.state_dict(), 4)
    held, learnt = [], set()
    for index in read:
        if len(learnt) == 9 and not learnt & set(index):        # a new row after nine others: the fold's end
            held += index
            learnt = set()
        else:
            learnt |= set(index)
    assert sorted(held) == list(range(12)) and not learnt


def test_global_randomness_is_left_alone(side):
    destroy(side)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    safeguard(side, 2)
    assert torch.equal(torch.rand(3), expected)
