"""Every task of numbers, times and steps under each kind of method, and mixed in one federation."""

import pytest
import torch
from torch import nn

import unalike
from unalike import (
    Client,
    FedAvg,
    FedDF,
    FedMuscle,
    FedRolex,
    HeteroFL,
    Regression,
    SequenceLabelling,
    Survival,
    Training,
    UserError,
)
from unalike.algorithms import ALGORITHMS
from unalike.models.series import CNN1d

STEPS = 8
TASKS = {
    "real": Regression(("price",), mean=2.0, std=3.0),
    "count": Regression(("visits",), kind="count"),
    "ordinal": Regression(("low", "middle", "high"), kind="ordinal"),
    "survival": Survival(("relapse",)),
    "sequence": SequenceLabelling(("down", "up")),
}
METHODS = {
    "fedavg": FedAvg(),
    "fedmuscle": FedMuscle(peers=2, batch=8, width=8),
    "distillation": FedDF(batch=8),
    "submodels": HeteroFL(),
    "rolling submodels": FedRolex(),
}


def series(rows, seed):
    """Two channels of 8 steps."""
    return torch.randn(rows, 2, STEPS, generator=torch.Generator().manual_seed(seed))


def targets(name, x, seed):
    """What a task learns, all from the sum of the first channel."""
    draws = torch.Generator().manual_seed(seed)
    signal = x[:, 0].sum(1) / STEPS**0.5
    match name:
        case "real":
            return 2 + 3 * signal
        case "count":
            return torch.poisson(signal.exp(), generator=draws)
        case "ordinal":
            return torch.bucketize(signal, torch.tensor([-0.5, 0.5]))
        case "survival":
            time = torch.rand(len(x), generator=draws).log().neg() * (-2 * signal).exp()
            return torch.stack([time.clamp(max=3), (time < 3).float()], 1)
        case _:
            return (x[:, 0] > 0).long()


def client(id, name, seed, rows=24, **options):
    train, test = series(rows, seed), series(40, seed + 50)
    return Client(
        id,
        lambda: CNN1d((2, STEPS), (8,), 8, kernel=3),
        TASKS[name],
        train=(train, targets(name, train, seed)),
        test=(test, targets(name, test, seed)),
        **options,
    )


def run(folder, method, clients, rounds=2, optimizer="adamw", **options):
    if method.needs_public:
        options["public"] = series(16, 99)
    training = Training(rounds=rounds, epochs=2, batch_size=12, optimizer=optimizer, lr=0.02)
    return unalike.run(method, clients, training=training, out=folder, **options)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", TASKS)
def test_runs_under_each_kind_of_method(tmp_path, name, method):
    clients = [client(id, name, i, capacity=1 - i / 4) for i, id in enumerate("abc")]
    results = run(tmp_path / "run", METHODS[method], clients)
    assert not results["failures"]
    for entry in results["clients"].values():
        better = entry["value"] > entry["alone"]
        assert entry["value"] == entry["alone"] or better == (
            (entry["gain"] > 0) == entry["higher_is_better"]
        )
    if method == "distillation":
        assert "distil" in (tmp_path / "run" / "ledger.csv").read_text()


@pytest.mark.parametrize("name", TASKS)
def test_the_safeguard_judges_each(tmp_path, name):
    clients = [client(id, name, i, rows=60) for i, id in enumerate("ab")]
    method = FedMuscle(peers=1, batch=8, width=8)
    results = run(tmp_path / "run", method, clients, rounds=1, safeguard=True, alone=False)
    for entry in results["clients"].values():
        assert entry["kept"] in ("alone", "together")
        assert entry["judged"]["alone"] > 0 and entry["judged"]["together"] > 0


def test_all_of_them_learn_in_one_federation(tmp_path):
    clients = [client(name, name, i) for i, name in enumerate(TASKS)]
    results = run(tmp_path / "run", METHODS["fedmuscle"], clients)
    assert not results["failures"]
    assert {name: entry["metric"] for name, entry in results["clients"].items()} == {
        "real": "mae",
        "count": "mae",
        "ordinal": "mae",
        "survival": "c_index",
        "sequence": "accuracy",
    }


@pytest.mark.parametrize("method", ["fedavg", "distillation"])
def test_outputs_of_another_kind_are_not_mixed(tmp_path, method):
    """One target by its number and by its logarithm: averages of the two would mean nothing."""
    clients = []
    for id, kind in (("a", "real"), ("b", "count")):
        x = series(24, 0)
        y = targets("count", x, 0)
        model = lambda: CNN1d((2, STEPS), (8,), 8)
        clients.append(Client(id, model, Regression(("visits",), kind), (x, y), (x, y)))
    # plain SGD remembers nothing, so a client that nobody is averaged with trains as alone
    results = run(tmp_path / "run", METHODS[method], clients, optimizer="sgd")
    for entry in results["clients"].values():
        assert entry["value"] == pytest.approx(entry["alone"], rel=1e-6)


@pytest.mark.parametrize("name", TASKS)
def test_methods_that_cannot_serve_a_task_say_so_before_the_run(tmp_path, name):
    method = ALGORITHMS["fednca"]()
    with pytest.raises(UserError, match=f"client a wants {TASKS[name].name}"):
        run(tmp_path / "run", method, [client("a", name, 0), client("b", name, 1)])
    assert not (tmp_path / "run" / "events.jsonl").exists()


def test_a_recurrent_encoder_is_not_narrowed_and_says_so_before_the_run(tmp_path):
    from unalike.models.series import GRU1d

    x = series(12, 0)
    members = [
        Client(id, lambda: GRU1d((2, STEPS), 8), TASKS["real"], (x, targets("real", x, 0)))
        for id in "ab"
    ]
    members[1].capacity = 0.5
    with pytest.raises(
        UserError, match=r"widths of this model cannot be found.*name it in `fixed`"
    ):
        run(tmp_path / "run", HeteroFL(), members)
    fixed = HeteroFL(fixed=("encoder.ahead", "encoder.back"))
    results = run(tmp_path / "fixed", fixed, members, rounds=1)
    assert not results["failures"]


def test_a_label_that_is_not_in_the_list_is_refused():
    x = torch.zeros(3, 2)
    with pytest.raises(UserError, match="client a, train: label 3 does not fit 3 classes"):
        Client("a", nn.Linear(2, 4), unalike.Classification(3), train=(x, torch.tensor([0, 1, 3])))
    with pytest.raises(UserError, match="client a, test: survival times are 0 or more, got -1"):
        y = torch.tensor([[1.0, 1.0], [2.0, 0.0], [-1.0, 1.0]])
        Client("a", nn.Linear(2, 4), Survival(), train=(x[:2], y[:2]), test=(x, y))
