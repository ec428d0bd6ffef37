"""Nobody loses: what a client keeps is decided by its own labelled data, and decided well where the case is clear."""

import copy

import pytest
import torch

from unalike.algorithms import Local
from unalike.base import message
from unalike.core.runtime import ClientRuntime
from unalike.core.safeguard import build_fold_replicas, split_folds
from unalike.core.safeguard import safeguard as decide
from unalike.data.samples import Samples
from unalike.training.loop import build_optimizer, step


class Sealed(Samples):
    """A test set that nobody may open."""

    def __len__(self):
        return 40

    def rows(self, index):
        raise AssertionError("the test set was read")

    take = rows


def safeguard(program):
    """In all rounds."""
    return decide(program, range(1, program.training.rounds + 1))


@pytest.fixture
def guarded(toys):
    """A client's side with its shadows, and a test set under seal."""

    def made(rows=12, model="mlp", **fields):
        client = toys.client("a", rows=rows, model=getattr(toys, model), test=Sealed(), **fields)
        program = Local.Program(client, Local(), toys.training(rounds=4), 0)
        program.fold_replicas = build_fold_replicas(program)
        return program

    return made


def runtime_of(program):
    """What an engine holds: the program with its replicas."""
    return ClientRuntime(program, fold_replicas=program.fold_replicas)


def learn_from_many(program, toys):
    """What a good federation would have taught, the shadows too: they have seen 400 labelled rows elsewhere."""
    x, y = toys.blobs(400, 31)
    for each in (program, *program.fold_replicas):
        optimizer = build_optimizer(list(each.model.parameters()), program.training)
        for _ in range(60):
            step(program.client.task.loss(each.model(x.double()), y), optimizer)


def destroy(*programs):
    draws = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in (p for program in programs for p in program.model.parameters()):
            p.copy_(torch.randn(p.shape, generator=draws, dtype=p.dtype))


def same(state, other):
    return state.keys() == other.keys() and all(
        torch.equal(state[name], other[name]) for name in state
    )


def equal(program, other):
    return same(program.model.state_dict(), other.model.state_dict())


def alone(program):
    """All rounds on all labels, from the same first weights."""
    fresh = Local.Program(program.client, Local(), program.training, 0)
    for fresh.round in range(1, program.training.rounds + 1):
        fresh.train()
    return fresh.model.state_dict()


def test_keeps_together_where_it_is_clearly_better(guarded, toys):
    program = guarded()
    learn_from_many(program, toys)
    before = copy.deepcopy(program.model.state_dict())
    kept = safeguard(program)
    assert kept.name == "together" and kept.log_loss["together"] < kept.log_loss["alone"]
    assert same(kept.state, before) and same(program.model.state_dict(), before)


def test_keeps_alone_where_together_was_destroyed(guarded):
    program = guarded()
    destroy(program, *program.fold_replicas)
    kept = safeguard(program)
    assert kept.name == "alone" and kept.log_loss["alone"] < kept.log_loss["together"]
    assert same(kept.state, alone(program))


def test_what_was_memorised_does_not_count(guarded, toys):
    """The model knows its own labels by heart, but taking part taught the shadows nothing about rows they did not see."""
    program = guarded()
    x, y = program.client.train.rows(torch.arange(12))
    optimizer = build_optimizer(list(program.model.parameters()), program.training)
    for _ in range(100):
        step(program.client.task.loss(program.model(x.double()), y), optimizer)
    destroy(*program.fold_replicas)
    assert safeguard(program).name == "alone"


def test_operation_puts_the_kept_model_in_place(guarded):
    program = guarded()
    destroy(program, *program.fold_replicas)
    reply = program.safeguard([1, 2, 3, 4])
    assert reply["kept"] == "alone" and set(reply["log_loss"]) == {"alone", "together", "doubt"}
    assert same(program.model.state_dict(), alone(program))


def test_trained_alone_is_a_tie_and_alone_wins_it(guarded):
    program = guarded()
    for round in range(1, program.training.rounds + 1):
        runtime_of(program).perform("train", round, round, {})
    kept = safeguard(program)
    assert kept.name == "alone" and kept.log_loss["alone"] == kept.log_loss["together"]


def test_shadows_do_as_the_client_does_and_keep_what_they_learnt(guarded):
    program, again = guarded(), guarded()
    runtime_of(program).perform("train", 1, 1, {})
    assert not any(map(equal, program.fold_replicas, again.fold_replicas))
    runtime_of(again).restore(message.copy_value(runtime_of(program).state()))
    for each in (program, again):
        runtime_of(each).perform("train", 2, 2, {})
    assert equal(program, again) and all(map(equal, program.fold_replicas, again.fold_replicas))


def test_a_side_without_shadows_can_take_a_state_that_has_them(guarded):
    """As `unalike export` does with a run that has not finished."""
    program, plain = guarded(), guarded()
    runtime_of(program).perform("train", 1, 1, {})
    ClientRuntime(plain).restore(runtime_of(program).state())
    assert same(plain.model.state_dict(), program.model.state_dict())


def test_each_label_is_held_back_once(guarded):
    program = guarded(rows=13)
    held = split_folds(program, len(program.fold_replicas))
    assert sorted(torch.cat(held).tolist()) == list(range(13))
    x, _ = program.client.train.rows(torch.arange(13))
    for shadow, rows in zip(program.fold_replicas, held, strict=True):
        seen = shadow.client.train.rows(torch.arange(len(shadow.client.train)))[0]
        rest = [i for i in range(13) if i not in rows.tolist()]
        assert torch.equal(seen, x[rest])


@pytest.mark.parametrize(
    "rows, model", [(1, "mlp"), (2, "noisy"), (3, "noisy"), (4, "noisy"), (5, "mlp"), (9, "noisy")]
)
def test_any_number_of_labels(rows, model, guarded):
    """The verdict can be sent: it is finite. Where there is nothing to judge by, alone is kept."""
    program = guarded(rows, model)
    for round in range(1, program.training.rounds + 1):
        runtime_of(program).perform("train", round, round, {})
    kept = safeguard(program)
    assert all(0 <= loss < float("inf") for loss in kept.log_loss.values())
    assert kept.log_loss or kept.name == "alone"


def test_global_randomness_is_left_alone(guarded):
    program = guarded()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    safeguard(program)
    assert torch.equal(torch.rand(3), expected)
