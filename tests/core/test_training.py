"""Batches cover every row once, optimizers do what torch's plain ones do, and a loss that is no number stops the training."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn

from unalike.base.errors import UserError
from unalike.base.randomness import stream
from unalike.models.frozen import FrozenBatchNorm2d
from unalike.training.batch_norm import recompute_statistics
from unalike.training.batching import batches
from unalike.training.cuda_graphs import GraphedStep, RecordedSteps
from unalike.training.loop import Diverged, Training, apply_gradients, build_optimizer, step, train
from unalike.training.stacked import Stack


@settings(deadline=None)
@given(st.integers(0, 70), st.integers(1, 20), st.booleans())
def test_every_row_comes_once_and_no_batch_is_one_row_without_need(rows, batch, shuffled):
    parts = list(batches(rows, batch, stream(0, "order") if shuffled else None))
    assert sorted(torch.cat(parts).tolist() if parts else []) == list(range(rows))
    sizes = [len(part) for part in parts]
    assert all(size == batch for size in sizes[:-1])
    if len(sizes) > 1:
        assert 2 <= sizes[-1] <= batch + 1
    if not shuffled and parts:
        assert torch.cat(parts).tolist() == list(range(rows))


def test_a_last_batch_of_one_joins_the_one_before():
    assert [len(b) for b in batches(33, 16)] == [16, 17]
    assert [len(b) for b in batches(1, 16)] == [1] and [len(b) for b in batches(17, 16)] == [17]
    assert [len(b) for b in batches(34, 16)] == [16, 16, 2] and [
        len(b) for b in batches(16, 16)
    ] == [16]


def test_the_order_belongs_to_the_generator():
    a, b, c = (torch.cat(list(batches(50, 8, stream(0, name)))) for name in ("a", "a", "b"))
    assert torch.equal(a, b) and not torch.equal(a, c)


def regression(dtype=torch.float64):
    x = torch.randn(20, 3, generator=stream(0, "x"), dtype=torch.float64).to(dtype)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=dtype) + 0.3
    model = nn.Linear(3, 1, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.linspace(-1, 1, parameter.numel(), dtype=dtype).view_as(parameter)
            )
    return model, lambda index: ((model(x[index]) - y[index]) ** 2).mean()


@pytest.mark.parametrize(
    "name, plain",
    [
        (
            "adamw",
            lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=False, foreach=False),
        ),
        (
            "adam",
            lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, fused=False, foreach=False),
        ),
        (
            "sgd",
            lambda p: torch.optim.SGD(
                p, lr=0.01, weight_decay=0.1, momentum=0.9, fused=False, foreach=False
            ),
        ),
    ],
)
def test_optimizers_do_what_torchs_plain_ones_do(name, plain):
    ours, theirs = regression(), regression()
    training = Training(optimizer=name, lr=0.01, weight_decay=0.1, momentum=0.9)
    optimizers = (
        build_optimizer(list(ours[0].parameters()), training),
        plain(list(theirs[0].parameters())),
    )
    for _ in range(15):
        for (_, loss), optimizer in zip((ours, theirs), optimizers, strict=True):
            step(loss(torch.arange(20)), optimizer)
    for a, b in zip(ours[0].parameters(), theirs[0].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_rate_of_its_own_comes_before_the_trainings():
    made = build_optimizer([nn.Parameter(torch.zeros(2))], Training(lr=0.5), lr=0.125)
    assert made.param_groups[0]["lr"] == 0.125


def test_the_loop_is_the_plain_loop():
    """Two epochs in batches of 8: as written out by hand."""
    (model, loss), (other, other_loss) = regression(), regression()
    training = Training(optimizer="sgd", lr=0.05, weight_decay=0.0)
    orders = lambda: [stream(0, "order", epoch) for epoch in range(2)]
    mean = train(
        model,
        20,
        GraphedStep(model, loss),
        build_optimizer(list(model.parameters()), training),
        orders(),
        8,
    )
    total = 0.0
    for order in orders():
        for index in torch.randperm(20, generator=order).split(8):
            value = other_loss(index)
            other.zero_grad()
            value.backward()
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter -= 0.05 * parameter.grad
            total += float(value.detach()) * len(index)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert mean == pytest.approx(total / 40, rel=1e-12)


def test_training_learns_and_leaves_the_model_in_training_mode():
    model, loss = regression()
    model.eval()
    optimizer = build_optimizer(list(model.parameters()), Training(lr=0.05))
    first = train(model, 20, GraphedStep(model, loss), optimizer, [stream(0, 1)], 8)
    last = train(
        model, 20, GraphedStep(model, loss), optimizer, [stream(0, e) for e in range(40)], 8
    )
    assert last < first / 3 and model.training


def test_batch_statistics_survive_a_last_batch_of_one():
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    x = torch.randn(9, 2, generator=stream(0, "x"))
    optimizer = build_optimizer(list(model.parameters()), Training())
    assert math.isfinite(
        train(
            model,
            9,
            GraphedStep(model, lambda i: model(x[i]).square().mean()),
            optimizer,
            [stream(0)],
            4,
        )
    )


def test_gradients_are_clipped_to_a_norm():
    weight = nn.Parameter(torch.tensor([0.0, 0.0], dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    step((weight * torch.tensor([300.0, 400.0])).sum(), optimizer, max_grad_norm=1.0)
    torch.testing.assert_close(
        weight.detach(), torch.tensor([-0.6, -0.8], dtype=torch.float64)
    )  # 3-4-5, to length 1
    weight.grad = torch.tensor([0.1, 0.0], dtype=torch.float64)
    apply_gradients(optimizer, max_grad_norm=1.0)  # short ones stay as they are
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.7, -0.8], dtype=torch.float64))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_told_with_what_to_do(bad):
    model, loss = regression()
    optimizer = build_optimizer(list(model.parameters()), Training(lr=0.25))
    with pytest.raises(
        Diverged, match=r"training loss became (nan|inf); lower training.lr \(now 0.25\)"
    ):
        train(
            model,
            20,
            GraphedStep(model, lambda index: loss(index) * bad),
            optimizer,
            [stream(0)],
            8,
        )


def test_a_rate_far_too_high_diverges():
    model, loss = regression(torch.float32)
    optimizer = build_optimizer(list(model.parameters()), Training(optimizer="sgd", lr=1e9))
    with pytest.raises(Diverged):
        train(model, 20, GraphedStep(model, loss), optimizer, [stream(0, e) for e in range(9)], 4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rounds": 0},
        {"epochs": 0},
        {"batch": -1},
        {"rate": 0},
        {"weight_decay": -1},
        {"momentum": 1.0},
        {"clip": 0},
        {"optimizer": "lion"},
        {"epoch": 3},
        {"rounds": 1.5},
        {"rate": math.nan},
        {"rate": math.inf},
        {"clip": math.nan},
    ],
)
def test_a_budget_that_cannot_be_is_refused(wrong):
    with pytest.raises(UserError):
        Training(**wrong)


def test_a_budget_stays_as_it_is():
    with pytest.raises(ValidationError):
        Training().rounds = 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_steps_that_were_recorded_are_the_steps():
    """From other parameters than they were recorded with, and twice."""
    torch.manual_seed(0)
    models = [
        nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).cuda().double() for _ in range(4)
    ]
    x, y = (
        torch.randn(4, 6, 5, device="cuda", dtype=torch.float64),
        torch.randn(4, 6, 3, device="cuda", dtype=torch.float64),
    )
    losses = [
        lambda model, x, y, power=power: (model(x) - y).abs().pow(power).mean()
        for power in (2, 3, 2)
    ]
    starts = [{name: p.detach() for name, p in model.named_parameters()} for model in models]
    other = [{name: p + 0.1 for name, p in each.items()} for each in starts]
    recorded = RecordedSteps(Stack(models[0], starts, Training()), losses, x, y)
    for start in (other, starts, other):
        stack = Stack(models[0], start, Training())
        for loss in losses:
            ends = stack.step(loss, x, y)
        played, last = recorded.replay(start)
        assert torch.allclose(last, ends, rtol=1e-12)
        assert all(
            torch.allclose(p[name], q[name], rtol=1e-12)
            for p, q in zip(played, stack.unstack(), strict=True)
            for name in p
        )


def test_a_stack_does_what_each_would_do_alone():
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).double() for _ in range(3)]
    x, y = torch.randn(3, 6, 5, dtype=torch.float64), torch.randn(3, 6, 3, dtype=torch.float64)
    loss = lambda model, x, y: (model(x) - y).square().mean()
    for training in (
        Training(),
        Training(max_grad_norm=0.05),
        Training(optimizer="sgd", momentum=0.9),
    ):
        given = [
            {name: p.detach().clone() for name, p in model.named_parameters()} for model in models
        ]
        stack = Stack(models[0], given, training)
        for _ in range(4):
            stack.step(loss, x, y)
        for i, after in enumerate(stack.unstack()):
            model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).double()
            model.load_state_dict(given[i])
            optimizer = build_optimizer(list(model.parameters()), training)
            for _ in range(4):
                step(loss(model, x[i], y[i]), optimizer, training.max_grad_norm)
            assert all(
                torch.allclose(p, after[name], rtol=1e-9) for name, p in model.named_parameters()
            )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="steps are recorded on a GPU only")
def test_played_steps_are_those_that_were_run():
    def ends(records: bool) -> tuple[list[float], dict]:
        torch.manual_seed(0)
        model = (
            nn.Sequential(
                nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)
            )
            .cuda()
            .double()
        )
        x, y = (
            torch.randn(20, 1, 8, 8, device="cuda", dtype=torch.float64),
            torch.randint(3, (20,), device="cuda"),
        )
        tape = GraphedStep(model, lambda x, y: nn.functional.cross_entropy(model(x), y), records)
        losses = []
        for visit in range(
            3
        ):  # a fresh optimizer each time, and parameters that came from elsewhere
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(0.01 * visit)
            tape.refresh()
            optimizer = build_optimizer(list(model.parameters()), Training())
            losses.append(
                train(
                    model,
                    20,
                    lambda i: tape(x[i], y[i]),
                    optimizer,
                    [stream(0, e) for e in range(4)],
                    8,
                )
            )
        assert bool(tape.graphed.graphs) == records and all(
            kept is not None for kept in tape.graphed.graphs.values()
        )
        return losses, model.state_dict()

    (run, there), (played, here) = ends(False), ends(True)
    assert run == pytest.approx(played, rel=1e-10)
    assert all(torch.allclose(there[name], here[name], rtol=1e-9) for name in there)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="steps are recorded on a GPU only")
def test_a_loss_that_looks_at_values_is_run_each_time():
    model = nn.Linear(4, 1).cuda()
    tape = GraphedStep(model, lambda x: model(x).sum() * (1.0 if x.sum() > 0 else 2.0))
    x = torch.ones(3, 4, device="cuda")
    losses = [float(tape(x)) for _ in range(6)]
    assert (
        len(set(losses)) == 1
        and list(tape.graphed.graphs.values()) == [None]
        and torch.randn(2, device="cuda").isfinite().all()
    )
    other = GraphedStep(model, lambda x: model(x).sum())
    for _ in range(6):
        other(x)
    assert None not in other.graphed.graphs.values(), "what fails leaves the others alone"


def test_statistics_are_taken_anew_and_a_failure_leaves_no_trace():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 4),
        nn.Dropout(0.5),
        nn.BatchNorm1d(4),
        nn.Linear(4, 2),
        nn.Unflatten(1, (2, 1, 1)),
        FrozenBatchNorm2d(2),
    )
    model[2].running_mean.fill_(100.0)
    x = torch.randn(64, 3)
    held = {name: tensor.clone() for name, tensor in model[5].state_dict().items()}
    recompute_statistics(model, x.split(32))
    seen = model[0](x)  # nothing is dropped meanwhile
    torch.testing.assert_close(model[2].running_mean, seen.mean(0))
    torch.testing.assert_close(
        model[2].running_var, torch.stack([part.var(0) for part in seen.split(32)]).mean(0)
    )
    assert all(torch.equal(held[name], tensor) for name, tensor in model[5].state_dict().items()), (
        "held statistics stay"
    )

    def broken():
        yield x[:32]
        raise RuntimeError("no rows")

    with pytest.raises(RuntimeError, match="no rows"):
        recompute_statistics(model, broken())
    assert model[2].momentum == 0.1 and model.training and model[1].training


@pytest.mark.parametrize(
    "old, new",
    [
        ("rate", "lr"),
        ("batch", "batch_size"),
        ("clip", "max_grad_norm"),
        ("optimiser", "optimizer"),
    ],
)
def test_an_old_name_of_a_setting_is_answered_with_the_new_one(old, new):
    with pytest.raises(ValueError, match=f'"{old}" is called "{new}" now'):
        Training(**{old: 1})
