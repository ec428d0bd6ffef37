"""Schedules of the learning rate, optimizers and losses of one's own, accumulation: as written, and off by default."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import unalike
from unalike import Classification, Client, FedAvg, FedMuscle, FedMusclePlus, MultiLabel, Training
from unalike.base.randomness import stream
from unalike.training.loop import accumulate_gradients, build_optimizer, set_learning_rate, train


def clients(task=None, labels=None, count=2, **fields):
    x = torch.randn(60, 4, generator=stream(0, "x"))
    y = (x[:, 0] > 0).long() + (x[:, 1] > 1).long() if labels is None else labels
    task = task or Classification(3)
    return [
        Client(
            f"c{i}",
            lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU()),
            task,
            train=(x[20 * i : 20 * i + 20], y[20 * i : 20 * i + 20]),
            test=(x[40:], y[40:]),
            **fields,
        )
        for i in range(count)
    ]


def factors(**settings):
    training = Training(**settings)
    return [training.lr_factor(round) for round in range(1, training.rounds + 1)]


def test_schedules_by_hand():
    assert factors(rounds=3) == [1.0, 1.0, 1.0]
    assert factors(rounds=4, schedule="linear") == [1.0, 0.75, 0.5, 0.25]
    assert factors(rounds=2, schedule="cosine") == [1.0, pytest.approx(0.5)]
    assert factors(rounds=5, schedule="step", step_every=2, step_factor=0.5) == [
        1.0,
        1.0,
        0.5,
        0.5,
        0.25,
    ]
    assert factors(rounds=5, warmup=3) == [0.25, 0.5, 0.75, 1.0, 1.0]
    # the cosine begins after the warm-up: rounds 2 and 3 are its only two
    assert factors(rounds=3, schedule="cosine", warmup=1) == [0.5, 1.0, pytest.approx(0.5)]
    assert Training(rounds=2, schedule="linear").lr_factor(7) == 0.5  # visits beyond the last round
    assert not Training().has_schedule


def test_without_a_schedule_an_optimizer_is_left_alone():
    training = Training(lr=0.5)
    optimizer = build_optimizer([nn.Parameter(torch.zeros(1))], training)
    set_learning_rate(optimizer, training, 3)
    assert optimizer.param_groups[0]["lr"] == 0.5 and "initial_lr" not in optimizer.param_groups[0]


def test_a_schedule_reaches_every_optimizer_and_a_slow_backbone():
    """Rates at round 3 of 4 are half of those given, for the task, the alignment and the backbone."""
    training = Training(rounds=4, lr=0.1, schedule="linear")
    client = clients(public=torch.zeros(8, 4))[0]
    method = FedMusclePlus(backbone_lr_scale=0.5)
    program = method.Program(client, method, training, 0)
    for program.round in (1, 3):
        rates = [program.optimizer(name).param_groups[-1]["lr"] for name in ("task", "gently")]
        other = program.optimizer("align", 0.02).param_groups[0]["lr"]
        factor = training.lr_factor(program.round)
        assert rates == pytest.approx([0.1 * factor, 0.05 * factor])
        assert other == pytest.approx(0.02 * factor)


def test_a_resumed_run_follows_the_schedule_to_the_same_end(tmp_path):
    training = Training(rounds=4, lr=0.05, schedule="cosine", warmup=1)
    public = torch.randn(16, 4, generator=stream(0, "public"))

    def run(folder, **options):
        method = FedMuscle(peers=1, width=4, batch=8)
        return unalike.run(
            method, clients(), public=public, training=training, out=tmp_path / folder, alone=False,
            **options,
        )  # fmt: skip

    class Stop(Exception):
        pass

    def stop(event, **facts):
        if event == "round" and facts["round"] == 3:
            raise Stop

    whole = run("whole")
    with pytest.raises(Stop):
        run("stopped", watch=stop)
    resumed = run("stopped", resume=True)
    hashes = [[c["hash"] for c in r["clients"].values()] for r in (whole, resumed)]
    assert hashes[0] == hashes[1]
    constant = unalike.run(
        FedMuscle(peers=1, width=4, batch=8), clients(), public=public, alone=False,
        training=Training(rounds=4, lr=0.05), out=tmp_path / "constant",
    )  # fmt: skip
    assert hashes[0] != [c["hash"] for c in constant["clients"].values()]


def test_accumulated_batches_make_the_step_of_one_large_batch():
    x = torch.randn(12, 3, generator=stream(0, "x"), dtype=torch.float64)

    def fit(batch_size, accumulate):
        torch.manual_seed(0)
        model = nn.Linear(3, 1, dtype=torch.float64)

        def gradient(index):
            model.zero_grad()
            loss = model(x[index]).square().mean()
            loss.backward()
            return loss.detach()

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if accumulate > 1:
            gradient = partial(accumulate_gradients, model, gradient, batch_size)
        large = batch_size * accumulate
        loss = train(model, 12, gradient, optimizer, [stream(0, "order")], large, 1.0)
        return model.weight.detach(), torch.tensor(loss, dtype=torch.float64)

    large, accumulated = fit(6, 1), fit(2, 3)
    torch.testing.assert_close(large, accumulated)
    assert not torch.allclose(large[0], fit(2, 1)[0])
    # the last step has fewer rows: 5 + 5, then 2
    torch.testing.assert_close(fit(10, 1)[0], fit(5, 2)[0])


def test_accumulation_in_a_run_is_that_of_large_batches(tmp_path):
    def run(**settings):
        training = Training(rounds=2, optimizer="sgd", lr=0.1, **settings)
        options = {"alone": False, "out": tmp_path / str(settings)}
        return unalike.run(FedAvg(), clients(dtype=torch.float64), training=training, **options)

    losses = [
        [c["metrics"]["log_loss"] for c in run(**settings)["clients"].values()]
        for settings in ({"batch_size": 8}, {"batch_size": 4, "accumulate": 2}, {"batch_size": 4})
    ]
    assert losses[0] == pytest.approx(losses[1]) and losses[0] != pytest.approx(losses[2])


def test_an_optimizer_may_be_named_by_module_or_given(tmp_path):
    parameters = [nn.Parameter(torch.ones(2))]
    options = {"alpha": 0.5}
    named = Training(optimizer="torch.optim:RMSprop", lr=0.2, optimizer_options=options)
    optimizer = build_optimizer(parameters, named)
    group = optimizer.param_groups[0]
    assert isinstance(optimizer, torch.optim.RMSprop)
    assert (group["lr"], group["alpha"], group["weight_decay"]) == (0.2, 0.5, 0.01)
    given = Training(rounds=2, optimizer=torch.optim.Adagrad, lr=0.1)
    result = unalike.run(FedAvg(), clients(), training=given, out=tmp_path / "run", alone=False)
    assert all(math.isfinite(value) for value in (c["value"] for c in result["clients"].values()))


@pytest.mark.parametrize(
    "settings, sentence",
    [
        ({"optimizer": "adm"}, "must be 'adamw', 'adam', 'sgd' or module:name, got 'adm'. Did you"),
        ({"optimizer": 3}, "must be 'adamw', 'adam', 'sgd' or module:name, got 3"),
        ({"schedule": "cosinus"}, "must be 'constant', 'cosine', 'linear' or 'step'"),
        ({"warmup": -1}, "must be at least 0"),
        ({"accumulate": 0}, "must be at least 1"),
    ],
)
def test_wrong_settings_are_named(settings, sentence):
    with pytest.raises(unalike.UserError, match=sentence):
        Training(**settings)


def test_an_optimizer_function_that_returns_none_is_named():
    training = Training(optimizer=lambda parameters, lr, weight_decay: None)
    with pytest.raises(
        unalike.UserError, match=r"must return a torch\.optim\.Optimizer, got NoneType"
    ):
        build_optimizer([], training)


def test_class_weights_by_hand():
    """Losses log 2 of a row of class 0 and of class 1 weigh 3 and 1: (3 log 2 + log 2) / 4."""
    task = Classification(2, class_weights=(3, 1))
    output = torch.tensor([[0.0, 0.0], [0.0, math.log(3)], [9.0, 9.0]])
    y = torch.tensor([0, 1, -1])
    expected = (3 * math.log(2) + 1 * math.log(4 / 3)) / 4
    assert task.loss(output, y).item() == pytest.approx(expected)
    torch.testing.assert_close(
        task.loss(output[:2], y[:2]),
        F.cross_entropy(output[:2], y[:2], weight=torch.tensor([3.0, 1.0])),
    )


def test_balanced_weights_come_from_the_clients_own_labels():
    """Of 20 labels 15 are class 0 and 5 class 1: 20 / (2 * 15) and 20 / (2 * 5)."""
    y = torch.tensor([0, 0, 0, 1] * 15)
    client = clients(Classification(3, class_weights="balanced"), y, count=1)[0]
    assert client.task.class_weights == pytest.approx((20 / 30, 2.0, 1.0))


def test_label_smoothing_is_torchs():
    output, y = torch.randn(5, 4, generator=stream(0, "z")), torch.tensor([0, 1, 2, 3, 0])
    ours = Classification(4, label_smoothing=0.1).loss(output, y)
    torch.testing.assert_close(ours, F.cross_entropy(output, y, label_smoothing=0.1))


@pytest.mark.parametrize(
    "make, sentence",
    [
        (lambda: Classification(3, class_weights=(1, 2)), "each of 3 classes, got 2"),
        (lambda: Classification(2, class_weights=(1, -2)), "at least 0"),
        (lambda: Classification(2, class_weights="balance"), '"balanced" or one number'),
        (lambda: Classification(2, label_smoothing=1.0), "below 1, got 1.0"),
    ],
)
def test_wrong_weights_are_refused(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


def shifted(output, y):
    return F.cross_entropy(output, (y + 1) % 3)


def misses(output, y):
    return float((output.argmax(1) != y).sum())


misses.higher_is_better = False
misses.unit = "rows"


def test_a_loss_and_a_metric_of_ones_own_are_trained_and_shown(tmp_path):
    """Trained on shifted labels, a client that learns is wrong; misses are lower where it is better."""
    task = Classification(3, criterion=shifted, score=misses)
    training = Training(rounds=6, epochs=4, lr=0.03, batch_size=8)
    result = unalike.run(FedAvg(), clients(task), training=training, out=tmp_path / "run")
    client = result["clients"]["c0"]
    assert (client["metric"], client["unit"], client["higher_is_better"]) == (
        "misses",
        "rows",
        False,
    )
    assert client["value"] > 10  # of 20
    assert client["value"] == round(20 * (1 - client["metrics"]["accuracy"] / 100))


def test_another_metric_of_the_task_can_be_the_one_shown():
    task = Classification(3, score="macro_f1")
    assert (task.metric, task.higher_is_better, task.unit) == ("macro_f1", True, "%")
    task = MultiLabel(3, score="log_loss")
    assert (task.metric, task.higher_is_better, task.unit) == ("log_loss", False, "")


def test_a_metric_that_the_task_does_not_have_is_named_before_the_run(tmp_path):
    task = Classification(3, score="macro_f2")
    with pytest.raises(unalike.UserError, match=r'no metric "macro_f2".*Did you mean "macro_f1"'):
        unalike.run(FedAvg(), clients(task), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_biases_and_norms_may_be_spared_from_decay(optimizer):
    """With gradients of 0, what decays shrinks and nothing else moves."""
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    settings = Training(optimizer=optimizer, lr=0.1, weight_decay=0.5, decay_vectors=False)
    optimizer = build_optimizer(list(model.parameters()), settings)
    before = {name: p.clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"0.weight"}
