"""Regression: metrics checked by hand, what is refused, and runs with gains of the right sign."""

import math

import pytest
import torch
from torch import nn

import unalike
from unalike import FedAvg, FedMuscle, Local, Regression, Training
from unalike.algorithms import ALGORITHMS
from unalike.runs.result import gain


def test_metrics_can_be_checked_by_hand():
    """Errors 1, -1, 0, 2: mae 1, rmse sqrt(6 / 4); the targets' spread around 3 is 4+1+1+4 = 10."""
    meter = Regression().meter()
    meter.add(torch.tensor([[2.0], [1.0]]), torch.tensor([1.0, 2.0]))
    meter.add(torch.tensor([[4.0], [7.0]]), torch.tensor([4.0, 5.0]))
    metrics = meter.result()
    assert metrics["mae"] == 1
    assert metrics["rmse"] == pytest.approx(1.5**0.5)
    assert metrics["r2"] == pytest.approx(1 - 6 / 10)


def test_several_targets_are_averaged_and_constant_ones_have_no_r2():
    """Errors (1, 3): mae 2, rmse sqrt(5). Target two is constant, so r2 is that of target one."""
    meter = Regression(("height", "weight")).meter()
    y = torch.tensor([[0.0, 7.0], [2.0, 7.0]])
    meter.add(y + torch.tensor([1.0, 3.0]), y)
    metrics = meter.result()
    assert metrics["mae"] == 2
    assert metrics["rmse"] == pytest.approx(5**0.5)
    assert metrics["r2"] == pytest.approx(1 - 2 / 2)


def test_the_loss_is_the_mean_squared_error_for_targets_of_either_shape():
    output = torch.tensor([[1.0], [4.0]])
    assert Regression().loss(output, torch.tensor([1.0, 2.0])) == 2
    assert Regression().loss(output, torch.tensor([[1.0], [2.0]])) == 2
    two = torch.tensor([[1.0, 1.0], [0.0, 2.0]])
    assert Regression(2).loss(two, torch.zeros(2, 2)) == 1.5


@pytest.mark.parametrize(
    ("task", "y", "message"),
    [
        (Regression(), torch.tensor([1.0, torch.nan, 2.0]), "NaN or infinity in 1 of 3 rows"),
        (Regression(), torch.tensor([1, 2]), "floats .*got torch.int64"),
        (Regression(), torch.zeros(3, 2), r"\(n,\) or \(n, 1\), got \(3, 2\)"),
        (Regression(2), torch.zeros(3), r"\(n, 2\), got \(3,\)"),
        (Regression(kind="count"), torch.tensor([1.0, -2.0]), "whole numbers of 0 or more, got -2"),
        (Regression(kind="count"), torch.tensor([0.5]), "whole numbers of 0 or more, got 0.5"),
        (Regression(3, "ordinal"), torch.tensor([0, 3]), "level 3 does not fit 3 levels.*0 to 2"),
        (Regression(3, "ordinal"), torch.tensor([0.0, torch.nan]), "NaN or infinity in 1 of 2"),
    ],
)
def test_targets_that_do_not_fit_are_refused(task, y, message):
    with pytest.raises(ValueError, match=message):
        task.check(y)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "order"}, "of kind real, count, ordinal, got 'order'"),
        ({"kind": "ordinal"}, "two levels or more"),
        ({"std": 0.0}, "std must be above 0, got 0"),
        ({"labels": 2, "mean": (1.0, 2.0, 3.0)}, "one for each of 2 targets, got 3"),
        ({"kind": "count", "mean": 4.0}, "mean is for real targets"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Regression(**options)


def test_the_unit_of_a_target_changes_neither_loss_nor_training(tmp_path):
    """Prices in cents with their mean and deviation are learnt like standardized ones."""
    x, y = line(20, 0)
    plain = Regression(("price", "cost"))
    scaled = Regression(("price", "cost"), mean=(900.0, 3.0), std=(100.0, 2.0))
    both = torch.stack([y, -y], 1)
    cents = both * torch.tensor([100.0, 2.0]) + torch.tensor([900.0, 3.0])
    states = []
    for task, target in ((plain, both), (scaled, cents)):
        client = unalike.Client("a", encoder, task, train=(x, target))
        training = Training(rounds=2, batch_size=8, lr=0.05)
        results = unalike.run(Local(), [client], training=training, out=tmp_path / str(task.mean))
        states.append(results.models()["a"](x))
    assert torch.allclose(
        states[1], states[0] * torch.tensor([100.0, 2.0]) + torch.tensor([900, 3]), rtol=1e-3
    )


def test_counts_are_learnt_by_the_poisson_likelihood():
    """Rates e^0 and e^log 3 against counts 1 and 2: (1 - 0) and (3 - 2 log 3), mean."""
    task = Regression(kind="count")
    output = torch.tensor([[0.0], [math.log(3)]])
    y = torch.tensor([1.0, 2.0])
    assert task.loss(output, y).item() == pytest.approx((1 + 3 - 2 * math.log(3)) / 2)
    meter = task.meter()
    meter.add(output, y)
    metrics = meter.result()
    assert metrics["mae"] == pytest.approx(0.5)
    assert metrics["deviance"] == pytest.approx(2 * math.log(2 / 3) + 1)


def test_ordinal_probabilities_are_those_of_proportional_odds():
    """P(y > k) = sigmoid(score - threshold k), from the head's own numbers."""
    torch.manual_seed(0)
    head = Regression(4, "ordinal").head(5).double()
    x = torch.randn(7, 5, dtype=torch.float64)
    odds = head[-1]
    score = odds.score(head[:-1](x))
    above = torch.sigmoid(score - torch.cat([odds.first_threshold, odds.log_gaps.exp()]).cumsum(0))
    edges = torch.cat([torch.ones(7, 1), above, torch.zeros(7, 1)], 1)
    assert torch.allclose(head(x).exp(), edges[:, :-1] - edges[:, 1:])
    assert torch.allclose(head(x).exp().sum(1), torch.ones(7, dtype=torch.float64))


def test_ordinal_metrics_can_be_checked_by_hand():
    """Levels 0, 1, 2 predicted as 0, 2, 2: one off by one, two right."""
    meter = Regression(("low", "middle", "high"), "ordinal").meter()
    output = torch.tensor([[9.0, 0, 0], [0, 0, 9.0], [0, 0, 9.0]])
    meter.add(output, torch.tensor([0, 1, 2]))
    metrics = meter.result()
    assert metrics["mae"] == pytest.approx(1 / 3)
    assert metrics["accuracy"] == pytest.approx(200 / 3)
    assert metrics["kappa"] == pytest.approx(0.8)


def test_a_client_with_missing_targets_is_refused_in_one_sentence():
    y = torch.tensor([1.0, torch.nan])
    with pytest.raises(ValueError, match="client a, train: regression targets must be finite"):
        unalike.Client("a", nn.Linear(2, 4), Regression(), train=(torch.zeros(2, 2), y))


def test_a_gain_is_positive_where_the_metric_moves_to_the_better():
    assert gain(60.0, 50.0) == 20
    assert gain(40.0, 50.0) == -20
    assert gain(4.0, 5.0, higher_is_better=False) == 20
    assert gain(6.0, 5.0, higher_is_better=False) == -20
    assert gain(-0.5, -1.0) == 50  # a score below 0, as R2 may be
    assert gain(1.0, 0.0) is None and gain(None, 1.0) is None


def test_methods_that_need_classes_do_not_serve_regression():
    served = {name for name, method in ALGORITHMS.items() if method.serves(Regression)}
    assert served >= {"local", "fedavg", "fedprox", "fedmuscle", "feddf", "fedhenn", "heterofl"}
    assert not served & {"pseudolabel", "cofed", "sage", "fedrcl", "fednca", "fedmpt", "afmcc"}


WEIGHTS = torch.tensor([2.0, -1.0, 0.5])


def line(rows, seed):
    """Inputs (rows, 3) and noisy targets (rows,) of one linear law."""
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, generator=draws)
    return x, x @ WEIGHTS + 0.5 * torch.randn(rows, generator=draws)


def encoder():
    return nn.Sequential(nn.Linear(3, 16), nn.ReLU())


def clients(rows=6):
    """Clients with too few rows to learn the law alone."""
    return [
        unalike.Client(
            id, encoder, Regression(("price",)), train=line(rows, place), test=line(100, 50 + place)
        )
        for place, id in enumerate("abcd")
    ]


def run(folder, method, rounds=20, **options):
    training = Training(rounds=rounds, epochs=2, batch_size=8, lr=0.05)
    return unalike.run(method, clients(), training=training, out=folder, **options)


def test_fedavg_lowers_the_error_and_that_is_a_gain(tmp_path, capsys):
    results = run(tmp_path / "run", FedAvg())
    for entry in results["clients"].values():
        assert entry["metric"] == "mae" and entry["higher_is_better"] is False
        assert (entry["value"] < entry["alone"]) == (entry["gain"] > 0)
        assert set(entry["metrics"]) == {"mae", "rmse", "r2"}
    assert results["delta"] > 10 and results["losers"] == 0
    unalike.show(results)
    text = capsys.readouterr().out
    assert "degraded   0 of 4" in text and "regression mae" in text
    page = (tmp_path / "run" / "report.html").read_text()
    assert "all gained" in page and "Lower is better for mae" in page
    assert "Values are percent" not in page and "value (%)" not in page


@pytest.mark.parametrize("name", ["fedmuscle", "feddf", "fedprox", "local"])
def test_other_methods_run_it_to_the_end(tmp_path, name):
    fields = {"peers": 2, "batch": 8, "width": 8} if name == "fedmuscle" else {}
    fields = {"batch": 8} if name == "feddf" else fields
    public = line(16, 99)[0] if name in ("fedmuscle", "feddf") else None
    results = run(tmp_path / "run", ALGORITHMS[name](**fields), rounds=4, public=public)
    assert not results["failures"]
    for entry in results["clients"].values():
        assert entry["value"] > 0
        assert (entry["value"] < entry["alone"]) == (entry["gain"] > 0)


def test_the_safeguard_judges_regression_by_its_squared_error(tmp_path):
    method = FedMuscle(peers=2, batch=8, width=8)
    public = line(16, 99)[0]
    results = run(tmp_path / "run", method, rounds=2, public=public, safeguard=True)
    for entry in results["clients"].values():
        assert entry["kept"] in ("alone", "together")
        assert entry["judged"]["alone"] > 0 and entry["judged"]["together"] > 0


def test_trained_models_predict(tmp_path):
    members = clients()
    training = Training(rounds=5, batch_size=8, lr=0.05)
    results = unalike.run(FedAvg(), members, training=training, out=tmp_path / "run")
    model = unalike.trained(tmp_path / "run", members)["a"]
    x, y = line(100, 50)
    error = (model(x)[:, 0] - y).abs().mean().item()
    assert error == pytest.approx(results["clients"]["a"]["value"], rel=1e-5)
