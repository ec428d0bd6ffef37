"""Nobody loses: what a client keeps is decided by its own labelled data, and decided well where the case is clear."""

import copy

import pytest
import torch

from unalike.algorithms import Local
from unalike.base import message
from unalike.core.safeguard import folds, shadows
from unalike.core.safeguard import safeguard as decide
from unalike.data.samples import Samples
from unalike.training.loop import optimiser_for, step


class Sealed(Samples):
    """A test set that nobody may open."""

    def __len__(self):
        return 40

    def rows(self, index):
        raise AssertionError("the test set was read")

    take = rows


def safeguard(side):
    """In all rounds."""
    return decide(side, range(1, side.training.rounds + 1))


@pytest.fixture
def guarded(toys):
    """A client's side with its shadows, and a test set under seal."""
    def made(rows=12, model="mlp", **fields):
        client = toys.client("a", rows=rows, model=getattr(toys, model), test=Sealed(), **fields)
        side = Local.Side(client, Local(), toys.training(rounds=4), 0)
        side.shadows = shadows(side)
        return side

    return made


def learn_from_many(side, toys):
    """What a good federation would have taught, the shadows too: they have seen 400 labelled rows elsewhere."""
    x, y = toys.blobs(400, 31)
    for each in (side, *side.shadows):
        optimiser = optimiser_for(list(each.model.parameters()), side.training)
        for _ in range(60):
            step(side.client.task.loss(each.model(x.double()), y), optimiser)


def destroy(*sides):
    draws = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in (p for side in sides for p in side.model.parameters()):
            p.copy_(torch.randn(p.shape, generator=draws, dtype=p.dtype))


def same(state, other):
    return state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


def equal(side, other):
    return same(side.model.state_dict(), other.model.state_dict())


def alone(side):
    """All rounds on all labels, from the same first weights."""
    fresh = Local.Side(side.client, Local(), side.training, 0)
    for fresh.round in range(1, side.training.rounds + 1):
        fresh.train()
    return fresh.model.state_dict()


def test_keeps_together_where_it_is_clearly_better(guarded, toys):
    side = guarded()
    learn_from_many(side, toys)
    before = copy.deepcopy(side.model.state_dict())
    kept = safeguard(side)
    assert kept.name == "together" and kept.log_loss["together"] < kept.log_loss["alone"]
    assert same(kept.state, before) and same(side.model.state_dict(), before)


def test_keeps_alone_where_together_was_destroyed(guarded):
    side = guarded()
    destroy(side, *side.shadows)
    kept = safeguard(side)
    assert kept.name == "alone" and kept.log_loss["alone"] < kept.log_loss["together"]
    assert same(kept.state, alone(side))


def test_what_was_memorised_does_not_count(guarded, toys):
    """The model knows its own labels by heart, but taking part taught the shadows nothing about rows they did not see."""
    side = guarded()
    x, y = side.client.train.rows(torch.arange(12))
    optimiser = optimiser_for(list(side.model.parameters()), side.training)
    for _ in range(100):
        step(side.client.task.loss(side.model(x.double()), y), optimiser)
    destroy(*side.shadows)
    assert safeguard(side).name == "alone"


def test_operation_puts_the_kept_model_in_place(guarded):
    side = guarded()
    destroy(side, *side.shadows)
    reply = side.safeguard([1, 2, 3, 4])
    assert reply["kept"] == "alone" and set(reply["log_loss"]) == {"alone", "together", "doubt"}
    assert same(side.model.state_dict(), alone(side))


def test_trained_alone_is_a_tie_and_alone_wins_it(guarded):
    side = guarded()
    for round in range(1, side.training.rounds + 1):
        side.perform("train", round, round, {})
    kept = safeguard(side)
    assert kept.name == "alone" and kept.log_loss["alone"] == kept.log_loss["together"]


def test_shadows_do_as_the_client_does_and_keep_what_they_learnt(guarded):
    side, again = guarded(), guarded()
    side.perform("train", 1, 1, {})
    assert not any(map(equal, side.shadows, again.shadows))
    again.restore(message.copy(side.state()))
    for each in (side, again):
        each.perform("train", 2, 2, {})
    assert equal(side, again) and all(map(equal, side.shadows, again.shadows))


def test_a_side_without_shadows_can_take_a_state_that_has_them(guarded):
    """As `unalike export` does with a run that has not finished."""
    side, plain = guarded(), guarded()
    side.perform("train", 1, 1, {})
    plain.shadows = []
    plain.restore(side.state())
    assert same(plain.model.state_dict(), side.model.state_dict())


def test_each_label_is_held_back_once(guarded):
    side = guarded(rows=13)
    held = folds(side, len(side.shadows))
    assert sorted(torch.cat(held).tolist()) == list(range(13))
    x, _ = side.client.train.rows(torch.arange(13))
    for shadow, rows in zip(side.shadows, held, strict=True):
        seen = shadow.client.train.rows(torch.arange(len(shadow.client.train)))[0]
        rest = [i for i in range(13) if i not in rows.tolist()]
        assert torch.equal(seen, x[rest])


@pytest.mark.parametrize("rows, model", [(1, "mlp"), (2, "noisy"), (3, "noisy"), (4, "noisy"), (5, "mlp"), (9, "noisy")])
def test_any_number_of_labels(rows, model, guarded):
    """The verdict can be sent: it is finite. Where there is nothing to judge by, alone is kept."""
    side = guarded(rows, model)
    for round in range(1, side.training.rounds + 1):
        side.perform("train", round, round, {})
    kept = safeguard(side)
    assert all(0 <= loss < float("inf") for loss in kept.log_loss.values())
    assert kept.log_loss or kept.name == "alone"


def test_global_randomness_is_left_alone(guarded):
    side = guarded()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    safeguard(side)
    assert torch.equal(torch.rand(3), expected)
